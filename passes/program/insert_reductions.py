"""Add up the partial gradients of a tied weight: one reduction per weight and step.

    before                                             after
    gradients_0 = ...   # rank 0, holds embed          part_0 = gradients_0[0]                            # rank 0
    gradients_2 = ...   # rank 2, holds embed too      part_2 = gradients_2[3]                            # rank 2
                                                       sums = all_reduce((part_0, part_2), ranks=(0, 2))
                                                       embed_0 = sums[0];  embed_2 = sums[1]
    return {0: {gradients}, 2: {gradients}}            return {0: {gradients, reduced: {embed: embed_0}}, 2: ...}

A rank that holds the weight without a gradient of its own gets the sum as a value. A weight with one holder is left alone.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from pdcompiler.core import ops
from pdcompiler.core.ir import Program, describe


def insert_reductions(program: Program, holders: dict[str, tuple[int, ...]]) -> Program:
    """holders: for each tied parameter the ranks that hold it. See the module's docstring."""
    output = program.graph.output_node()
    results: dict[int, dict[str, Any]] = output.args[0]  # type: ignore[assignment]
    for name, ranks in holders.items():
        with program.graph.inserting_before(output):
            sums = _reduce(program, name, results)
        if sums:
            first = next(iter(sums.values()))
            results = {
                rank: result | ({"reduced": {**result.get("reduced", {}), name: sums.get(rank, first)}} if rank in ranks else {})
                for rank, result in results.items()
            }
    output.args = (results,)  # type: ignore[assignment]
    return program


def _reduce(program: Program, name: str, results: dict[int, dict[str, Any]]) -> dict[int, fx.Node]:
    """The sum of all partial gradients of a parameter, on each rank that has one."""
    parts: dict[int, fx.Node] = {}
    for rank, result in results.items():
        for stage, total in result.get("gradients", {}).items():
            names = program.gradient_names[stage]
            if name in names:
                part = _node(program, operator.getitem, (total, names.index(name)), {}, rank, name)
                parts[rank] = part if rank not in parts else _node(program, ops.accumulate, (parts[rank], part), {}, rank, name)
    if len(parts) < 2:
        return parts
    ranks = tuple(parts)
    sums = _node(program, ops.all_reduce, (tuple(parts.values()),), {"ranks": ranks}, ranks[0], name)
    return {rank: _node(program, operator.getitem, (sums, i), {}, rank, name) for i, rank in enumerate(ranks)}


def _node(program: Program, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], rank: int, name: str) -> fx.Node:
    readable = f"d_{name}".replace(".", "_")
    node = program.graph.create_node("call_function", target, args, kwargs, name=readable)
    node.meta["name"] = readable
    source = next((i for i in node.all_input_nodes), None)
    describe(node, rank=rank, stage=source.meta["stage"] if source else None)
    node.meta["type"] = None if target is ops.all_reduce else program.gradient_types[name]
    return node


