"""Make every value that crosses ranks cross by a `transfer`.

    before                       after
    h = relu(x)     # rank 0     h = relu(x)              # rank 0
    y = neg(h)      # rank 1     t = transfer(h, to=1)    # rank 1
                                 y = neg(t)               # rank 1

A value is transferred once to each rank that needs it, right after the call that made it; what only a rank's results need (the
loss, outputs) goes at the end, out of the way of activations and gradients. Placeholders are on every rank and never cross.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from typing import Any

from torch import fx

from pdcompiler.core import ops
from pdcompiler.core.ir import Program, describe, name_of, nodes_in, rank_of, replaced


def insert_transfers(program: Program) -> Program:
    """See the module's docstring."""
    graph = program.graph
    output = graph.output_node()
    results: dict[int, Any] = dict(output.args[0])  # type: ignore[arg-type]
    wanted: dict[fx.Node, set[int]] = defaultdict(set)
    for rank, result in results.items():
        for node in nodes_in(result):
            wanted[node].add(rank)
    for node in list(graph.nodes):
        if node.op in ("placeholder", "output") or node.target is ops.all_reduce:
            continue
        readers = {rank_of(user) for user in node.users if user.op != "output" and user.target is not ops.all_reduce}
        for rank in sorted((readers | wanted[node]) - {rank_of(node)}):
            copy = _transfer(graph, node, rank, before=_after_call(node) if rank in readers else output)
            node.replace_all_uses_with(copy, lambda user, rank=rank, copy=copy: _reads(user, rank, copy))
            results[rank] = replaced(results[rank], {node: copy})
    output.args = (results,)  # type: ignore[assignment]
    return program


def _reads(user: fx.Node, rank: int, copy: fx.Node) -> bool:
    return user is not copy and user.op != "output" and user.target is not ops.all_reduce and rank_of(user) == rank


def _after_call(node: fx.Node) -> fx.Node:
    """The node before which a value's transfer stands: behind the value, the other results of its call, and their transfers."""
    following = node.next
    while following.target is ops.transfer or (
        following.target is operator.getitem and following.all_input_nodes[0] in node.all_input_nodes[:1]
    ):
        following = following.next
    return following


def _transfer(graph: fx.Graph, node: fx.Node, to: int, before: fx.Node) -> fx.Node:
    with graph.inserting_before(before):
        copy = graph.create_node("call_function", ops.transfer, (node,), {"to": to}, name=name_of(node))
    copy.meta = dict(node.meta)
    return describe(copy, rank=to, stage=node.meta["stage"], microbatch=node.meta["microbatch"], phase=node.meta["phase"],
                    type=node.meta["type"])
