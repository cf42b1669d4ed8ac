"""Give every gradient by an operation of the backward, on a stage that holds the parameter.

    before                                         after
    return loss, gradient(s): loss_weight          d_s = clone(loss_weight)      # backward of the stage that holds s
                                                   return loss, gradient(s): d_s

The gradient of a scalar that is added to the loss is the loss's weight itself; a custom Function may return what its forward
saved, a model input or a weight. A gradient made on a later stage than the parameter's travels there, like any other value.
"""

from __future__ import annotations

import torch
from torch import fx

from pdcompiler.core.cost import Cost
from pdcompiler.core.errors import CompileError
from pdcompiler.core.ir import Trace, is_backward, stage_of, where
from pdcompiler.core.partition import Partition


def place_gradients(trace: Trace, partition: Partition) -> Trace:
    """See the module's docstring."""
    owners = partition.owners()
    nodes = [
        _placed(trace, node, owners[trace.canonical[output.name]], owners) if output.kind == "gradient" else node
        for output, node in trace.output_nodes()
    ]
    trace.graph.output_node().args = (tuple(nodes),)
    return trace


def _placed(trace: Trace, node: fx.Node, holders: tuple[int, ...], owners: dict[str, tuple[int, ...]]) -> fx.Node:
    if node.op != "call_function" or not is_backward(node):
        node = _copy(trace.graph, node, _stage_beside(trace, node, holders, owners))
    stage = stage_of(node)
    if stage in holders:
        return node
    if stage < holders[0]:
        raise CompileError(
            f"the gradient of a parameter of stage {holders[0]} is made on stage {stage}", where=where(node),
            ways_out=("begin the stages elsewhere", "let pdcompiler choose the partition"),
        )
    return _copy(trace.graph, node, max(holder for holder in holders if holder < stage))


def _stage_beside(trace: Trace, node: fx.Node, holders: tuple[int, ...], owners: dict[str, tuple[int, ...]]) -> int:
    """The stage on which a backward can read a value that is none of its own."""
    if node.op == "call_function":
        return next((holder for holder in holders if holder >= stage_of(node)), stage_of(node))
    meaning = trace.inputs.get(node.name)
    if meaning is None or meaning.kind != "parameter":
        return holders[-1]
    possible = owners[trace.canonical[meaning.name]]
    return next((stage for stage in reversed(possible) if stage in holders), possible[-1])


def _copy(graph: fx.Graph, node: fx.Node, stage: int) -> fx.Node:
    with graph.inserting_before(graph.output_node()):
        copy = graph.create_node("call_function", torch.ops.aten.clone.default, (node,), name=f"d_{node.name}")
    copy.meta = dict(node.meta, stage=stage, backward=True, cost=Cost())
    return copy
