"""Let every value cross stages in plain row-major memory, and arrive with the layout it was recorded with.

    before                                        after
    h = transpose(a, 1, 2)     # stage 0          h = transpose(a, 1, 2)            # stage 0
    y = view(h, [-1, 8])       # stage 1          p = permute(h, [0, 2, 1])         # stage 0, row-major
                                                  q = permute(p, [0, 2, 1])         # stage 1, as h was
                                                  y = view(q, [-1, 8])              # stage 1

Messages carry row-major memory. A recorded `view` may rely on the layout of what it views, so the receiver puts it back. A value
whose elements overlap or leave gaps (an expanded one) is copied by its maker; views of it become reshapes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from pdcompiler.core.errors import CompileError
from pdcompiler.core.ir import Trace, ValueType, is_backward, stage_of, type_of, where
from pdcompiler.core.values import is_view

aten = torch.ops.aten


def order_boundaries(trace: Trace) -> Trace:
    """See the module's docstring."""
    for node in list(trace.graph.nodes):
        if "stage" not in node.meta or not isinstance(type := type_of(node), ValueType) or type.order is None:
            continue
        readers = [user for user in node.users if "stage" in user.meta and stage_of(user) != stage_of(node)]
        if not readers:
            continue
        if type.order:
            _permute(trace.graph, node, type.order, readers)
        else:
            _copy(trace.graph, node, readers)
    return trace


def _permute(graph: fx.Graph, node: fx.Node, order: Sequence[int], readers: list[fx.Node]) -> None:
    """Send the dimensions in the order of memory; each reading stage puts them back, once."""
    type = type_of(node)
    sent = _after(graph, node, aten.permute.default, (node, list(order)), tuple(type.shape[d] for d in order), stage_of(node), None)
    back = [list(order).index(dim) for dim in range(len(order))]
    received: dict[int, fx.Node] = {}
    for reader in readers:
        stage = stage_of(reader)
        if stage not in received:
            received[stage] = _after(graph, sent, aten.permute.default, (sent, back), type.shape, stage, type.order)
        reader.replace_input_with(node, received[stage])


def _copy(graph: fx.Graph, node: fx.Node, readers: list[fx.Node]) -> None:
    type = type_of(node)
    copy = _after(graph, node, aten.clone.default, (node,), type.shape, stage_of(node), None)
    copy.kwargs = {"memory_format": torch.contiguous_format}
    for reader in readers:
        reader.replace_input_with(node, copy)
        _loosen(reader)


def _loosen(reader: fx.Node) -> None:
    """Views of a value whose layout changed: a view becomes a reshape; what addresses memory itself is refused."""
    if reader.target is aten.as_strided.default:
        raise CompileError(
            "an operation addresses the memory of a value that would cross stages", where=where(reader),
            ways_out=("begin the stages elsewhere", "use .contiguous() before it"),
        )
    if reader.target in (aten.view.default, aten._unsafe_view.default):
        reader.target = aten.reshape.default
    if is_view(reader):
        for user in reader.users:
            _loosen(user)


def _after(
    graph: fx.Graph, node: fx.Node, target: torch._ops.OpOverload, args: tuple[object, ...], shape: tuple[object, ...], stage: int,
    order: tuple[int, ...] | None,
) -> fx.Node:
    with graph.inserting_after(node):
        made = graph.create_node("call_function", target, args, name=node.name)  # type: ignore[arg-type]
    type = type_of(node)
    made.meta = dict(node.meta, stage=stage, backward=is_backward(node), type=ValueType(shape, type.dtype, type.device, order))  # type: ignore[arg-type]
    return made
