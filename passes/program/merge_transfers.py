"""Send several small values of one call as one message.

    before                            after
    t = transfer(a, to=1)             packed = pack((a, b))              # rank 0
    u = transfer(b, to=1)             p = transfer(packed, to=1)
                                      t, u = unpack(p, types=...)        # rank 1

A message of its own costs the link's latency; packing costs two copies in memory. Values are merged where the copies are
cheaper, by the Machine's figures; large ones keep their own message.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from typing import Any

import torch
from torch import fx

from pdcompiler.core import ops
from pdcompiler.core.cost import Cost
from pdcompiler.core.ir import Program, ValueType, describe, evaluate, rank_of, type_of
from pdcompiler.core.machine import Machine


def merge_transfers(program: Program, machine: Machine) -> Program:
    """See the module's docstring."""
    together: dict[tuple[Any, ...], list[fx.Node]] = defaultdict(list)
    place = {node: number for number, node in enumerate(program.graph.nodes)}
    for node in place:
        if node.target is ops.transfer and (call := _call(node)) is not None and _is_small(node, machine):
            together[call, rank_of(node), node.meta["microbatch"]].append(node)  # of none: buffers, at the end of a step
    for transfers in together.values():
        if len(transfers) > 1:
            _merge(program.graph, transfers, max((t.all_input_nodes[0] for t in transfers), key=place.__getitem__))
    return program


def _call(transfer: fx.Node) -> fx.Node | None:
    """The stage function that gave the value, or the tuple with the value in it (buffers)."""
    value: Any = transfer.args[0]
    while isinstance(value, fx.Node) and value.target is operator.getitem:
        value = value.args[0]
    return value if isinstance(value, fx.Node) and value.op == "call_module" else None


def _is_small(transfer: fx.Node, machine: Machine) -> bool:
    type = type_of(transfer)
    if not isinstance(type, ValueType):
        return False
    copies = machine.compute_seconds(Cost(bytes_written=4 * evaluate(type.nbytes(), 1)))
    return bool(copies < machine.link_latency_seconds)


def _merge(graph: fx.Graph, transfers: list[fx.Node], last: fx.Node) -> None:
    """last: of the values that are sent."""
    values: list[Any] = [transfer.args[0] for transfer in transfers]
    types = [type_of(transfer) for transfer in transfers]
    note = {key: transfers[0].meta[key] for key in ("stage", "microbatch", "phase")}
    size = sum(evaluate(type.nbytes(), 1) for type in types)
    bytes_ = ValueType((size,), torch.uint8, types[0].device)
    with graph.inserting_after(last):
        packed = graph.call_function(ops.pack, (tuple(values),))
    describe(packed, rank=rank_of(values[0]), type=bytes_, **note)
    with graph.inserting_after(packed):
        message = graph.call_function(ops.transfer, (packed,), {"to": rank_of(transfers[0])})
    describe(message, rank=rank_of(transfers[0]), type=bytes_, **note)
    with graph.inserting_after(message):
        plain = tuple((tuple(type.shape), type.dtype) for type in types)
        unpacked = graph.call_function(ops.unpack, (message,), {"types": plain})
    describe(unpacked, rank=rank_of(transfers[0]), **note)
    for place, transfer in enumerate(transfers):
        with graph.inserting_after(unpacked):
            value = graph.create_node("call_function", operator.getitem, (unpacked, place), name=str(transfer.meta.get("name")))
        value.meta = dict(transfer.meta)
        transfer.replace_all_uses_with(value)
        graph.erase_node(transfer)
