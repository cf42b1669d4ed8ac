"""Let values that cross stages keep their memory layout, since operations were recorded for it.

    before                              after
    wt = t(w)            # stage 0      wt = t(w)                               # stage 0
    y = addmm(b, x, wt)  # stage 1      wt_rows = permute(wt, [1, 0])           # stage 0, memory in the order of its dimensions
                                        wt_layout = permute(wt_rows, [1, 0])    # stage 1
                                        y = addmm(b, x, wt_layout)              # stage 1

Messages are row-major. But torch leaves out a `contiguous()` where the recorded value had that layout already, and some kernels
are silently wrong for another one (`_weight_norm_interface_backward`). Both permutes are views: nothing is copied.
"""

from __future__ import annotations

import torch
from torch import fx

from pdcompiler.core.cost import Cost
from pdcompiler.core.ir import Trace, ValueType, is_backward, order_of, stage_of, type_of

permute = torch.ops.aten.permute.default


def keep_layouts(trace: Trace) -> Trace:
    """See the module's docstring."""
    for node in list(trace.graph.nodes):
        order, type = order_of(node), type_of(node)
        if node.op != "call_function" or order is None or not isinstance(type, ValueType):
            continue
        abroad = sorted({stage_of(user) for user in node.users if user.op != "output"} - {stage_of(node)})
        if not abroad:
            continue
        packed = _permute(trace.graph, node, node, order, f"{node.name}_rows", stage_of(node))
        packed.meta["type"] = ValueType(tuple(type.shape[dim] for dim in order), type.dtype, type.device)
        packed.meta["order"] = None
        inverse = tuple(order.index(dim) for dim in range(len(order)))
        for stage in abroad:
            copy = _permute(trace.graph, packed, node, inverse, f"{node.name}_layout", stage)
            node.replace_all_uses_with(copy, lambda user, stage=stage: user.op != "output" and stage_of(user) == stage)
    return trace


def _permute(graph: fx.Graph, value: fx.Node, like: fx.Node, order: tuple[int, ...], name: str, stage: int) -> fx.Node:
    with graph.inserting_after(value):
        node = graph.create_node("call_function", permute, (value, list(order)), name=name)
    node.meta = dict(like.meta, stage=stage, backward=is_backward(like), cost=Cost())
    return node
