"""Sum the partial gradients of each weight that several ranks hold: replicas of a stage, or holders of a tied weight.

    before                                             after
    gradients_0 = ...   # rank 0, holds embed          part_0 = gradients_0[0]                                # rank 0
    gradients_2 = ...   # rank 2, holds embed too      part_2 = gradients_2[3]                                # rank 2
                                                       sums = all_reduce(((part_0,), (part_2,)), ranks=(0, 2))
                                                       embed_0 = sums[0][0];  embed_2 = sums[1][0]
    return {0: {gradients}, 2: {gradients}}            return {0: {gradients, reduced: {embed: embed_0}}, 2: ...}

Gradients of the same ranks and type go together, in buckets, since each reduction costs a message's latency at least. A rank that
holds a weight without a gradient of its own gets the sum as a value. A weight with one holder is left alone. Where
all gradients of a stage are reduced, the sums alone are given: the parts are free once they are sent.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from torch import fx

from pdcompiler.core import ops
from pdcompiler.core.ir import Program, ValueType, describe
from pdcompiler.core.program_writer import BUCKET, buckets

Parts = dict[int, fx.Node]
"""By rank."""


def insert_reductions(program: Program, holders: Mapping[str, tuple[int, ...]], bucket: float = BUCKET) -> Program:
    """holders: for each parameter that several ranks hold, these.   bucket: the bytes that make one reduction, if there are so
    many. See the module's docstring."""
    output = program.graph.output_node()
    results: dict[int, dict[str, Any]] = dict(output.args[0])  # type: ignore[arg-type]
    with program.graph.inserting_before(output):
        parts = {name: found for name in holders if (found := _parts(program, name, results))}
        sums: dict[str, Parts] = {}
        for names in _buckets(program, parts, bucket):
            sums |= _reduce(program, names, parts)
    for name, found in sums.items():
        first = next(iter(found.values()))
        for rank in holders[name]:
            results[rank] = results[rank] | {"reduced": {**results[rank].get("reduced", {}), name: found.get(rank, first)}}
    program.summed = frozenset(name for name in sums if len(parts[name]) > 1)
    for rank, result in results.items():
        if "gradients" in result:
            own = {k: total for k, total in result["gradients"].items() if not sums.keys() >= {*program.gradient_names[k]}}
            results[rank] = result | {"gradients": own}
    output.args = (results,)  # type: ignore[assignment]
    return program


def _buckets(program: Program, parts: Mapping[str, Parts], bucket: float) -> list[list[str]]:
    """Of the same ranks each; in the order in which their last gradient is made."""
    alike: dict[tuple[int, ...], dict[str, ValueType]] = defaultdict(dict)
    made = {name: place for place, name in enumerate(program.gradient_types)}
    for name in sorted(parts, key=made.__getitem__):
        alike[tuple(parts[name])][name] = program.gradient_types[name]
    found = [names for types in alike.values() for names in buckets(types, bucket)]
    return sorted(found, key=lambda names: max(made[name] for name in names))


def _parts(program: Program, name: str, results: Mapping[int, Mapping[str, Any]]) -> Parts:
    """What each rank has of a parameter's gradient."""
    parts: Parts = {}
    for rank, result in results.items():
        for stage, total in result.get("gradients", {}).items():
            names = program.gradient_names[stage]
            if name in names:
                part = _node(program, operator.getitem, (total, names.index(name)), {}, rank, name)
                parts[rank] = part if rank not in parts else _node(program, ops.accumulate, (parts[rank], part), {}, rank, name)
    return parts


def _reduce(program: Program, names: list[str], parts: Mapping[str, Parts]) -> dict[str, Parts]:
    """The sums over all ranks that have a part, on each of them."""
    ranks = tuple(parts[names[0]])
    if len(ranks) < 2:
        return {name: parts[name] for name in names}
    given = tuple(tuple(parts[name][rank] for name in names) for rank in ranks)
    sums = _node(program, ops.all_reduce, (given,), {"ranks": ranks}, ranks[0])
    found: dict[str, Parts] = {name: {} for name in names}
    for place, rank in enumerate(ranks):
        own = _node(program, operator.getitem, (sums, place), {}, rank)
        for k, name in enumerate(names):
            found[name][rank] = _node(program, operator.getitem, (own, k), {}, rank, name)
    return found


def _node(program: Program, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], rank: int, name: str = "") -> fx.Node:
    """Of the gradient of a parameter, or of a bucket."""
    readable = f"d_{name}".replace(".", "_") if name else "sums"
    node = program.graph.create_node("call_function", target, args, kwargs, name=readable)
    node.meta["name"] = readable
    source = next((i for i in node.all_input_nodes), None)
    describe(node, rank=rank, stage=source.meta["stage"] if source else None)
    node.meta["type"] = program.gradient_types.get(name)
    return node
