"""Start reductions as soon as their values are there, so that they travel while the rank computes.

    before                                                  after
    g0, rest = stage0_backward_piece0(...)                  g0, rest = stage0_backward_piece0(...)
    g1 = stage0_backward_piece1(..., rest)                  pending = start_all_reduce(g0, ranks=(0, 1))
    sums = all_reduce(g0, ranks=(0, 1))                     g1 = stage0_backward_piece1(..., rest)
    sums_1 = all_reduce(g1, ranks=(0, 1))                   pending_1 = start_all_reduce(g1, ranks=(0, 1))
                                                            sums = finish_all_reduce(pending)
                                                            sums_1 = finish_all_reduce(pending_1)

Starts stay in the order of the reductions, which is the same on all ranks, and no rank waits at one; a reduction is finished
where it stood. Not here: which values are reduced together.
"""

from __future__ import annotations

from torch import fx

from pdcompiler.core import ops
from pdcompiler.core.ir import RankProgram


def overlap_reductions(program: RankProgram) -> RankProgram:
    """See the module's docstring. A reduction is left alone where the rank has nothing to compute meanwhile."""
    order = {node: place for place, node in enumerate(program.graph.nodes)}
    calls = [place for node, place in order.items() if node.op == "call_module"]
    latest: fx.Node | None = None
    for node in [node for node in order if node.target is ops.all_reduce]:
        after = max((*node.all_input_nodes, *(() if latest is None else (latest,))), key=order.__getitem__)
        latest = node
        if any(order[after] < call < order[node] for call in calls):
            latest = _start(program.graph, node, after)
            order[latest] = order[after]
    return program


def _start(graph: fx.Graph, reduction: fx.Node, after: fx.Node) -> fx.Node:
    """Insert the start; the reduction itself becomes the finish."""
    with graph.inserting_after(after):
        start = graph.create_node(
            "call_function", ops.start_all_reduce, reduction.args, dict(reduction.kwargs), name=f"pending_{reduction.name}"
        )
    start.meta = dict(reduction.meta)
    reduction.target, reduction.args, reduction.kwargs = ops.finish_all_reduce, (start,), {}
    return start
