"""Let each stage that reads a parameter keep its own partial gradient of it.

    before                                     after
    g = add(g0, g2)   # g0 stage 0, g2 stage 2   output gradient(w): g0   # stage 0
    output gradient(w): g                        output gradient(w): g2   # stage 2

Autograd sums the gradients of a parameter that is read in several places. Where the summands stand on several stages, the sum
is taken apart, also through views of it: every holder accumulates its own part and one reduction per step adds them, so no
value of the parameter's size crosses stages for each microbatch.
"""

from __future__ import annotations

import torch
from torch import fx

from pdcompiler.core.ir import Output, Trace, is_backward, stage_of
from pdcompiler.core.values import is_view

aten = torch.ops.aten
LINEAR = (aten._to_copy.default,)


def split_shared_gradients(trace: Trace) -> Trace:
    """Replace each gradient output by one output per summand, where its summands stand on several stages."""
    outputs: list[Output] = []
    nodes: list[fx.Node] = []
    for output, node in trace.output_nodes():
        parts = _summands(trace.graph, node) if output.kind == "gradient" else [node]
        if len({part.meta.get("stage") for part in parts}) == 1:
            parts = [node]
        outputs += [output] * len(parts)
        nodes += parts
    trace.outputs = tuple(outputs)
    trace.graph.output_node().args = (tuple(nodes),)
    trace.graph.eliminate_dead_code()
    return trace


def _summands(graph: fx.Graph, node: fx.Node) -> list[fx.Node]:
    """The parts whose sum is `node`; a view or cast of a sum is the sum of the views or casts."""
    if node.op != "call_function" or not is_backward(node):
        return [node]
    plain = len(node.args) == 2 and not node.kwargs and all(isinstance(argument, fx.Node) for argument in node.args)
    if node.target is aten.add.Tensor and plain:
        return [part for argument in node.all_input_nodes for part in _summands(graph, argument)]
    if not (is_view(node) or node.target in LINEAR) or len(node.all_input_nodes) != 1:
        return [node]
    source = node.all_input_nodes[0]
    parts = _summands(graph, source)
    if len(parts) == 1:
        return [node]
    return [_same_of(graph, node, source, part) for part in parts]


def _same_of(graph: fx.Graph, node: fx.Node, source: fx.Node, part: fx.Node) -> fx.Node:
    """The operation `node`, of `part` instead of `source`."""
    with graph.inserting_before(node):
        copy = graph.node_copy(node, lambda n: part if n is source else n)
    copy.meta = dict(node.meta, stage=stage_of(part))
    return copy
