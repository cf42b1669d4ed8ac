"""Project the program onto each rank: a transfer becomes a send here and a receive there.

    the program                               rank 0                                  rank 1
    h = stage0_forward(w0, x)   # rank 0      h = stage0_forward(w0, x)
    t = transfer(h, to=1)       # rank 1      send(h, to=1, channel="0->1")           h = recv(frm=0, channel="0->1", ...)
    y = stage1_forward(w1, t)   # rank 1                                              y = stage1_forward(w1, h)

Both halves stand where the transfer stood in the one global order, so no cycle of waiting is possible, even where a send waits
for its receive. A reduction over ranks becomes one call on each of them, of its own value.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from torch import fx, nn

from pdcompiler.core import ops
from pdcompiler.core.ir import Program, RankProgram, ValueType, describe, eliminate_dead_code, name_of, rank_of, replaced, type_of


def split_ranks(program: Program) -> tuple[RankProgram, ...]:
    """One program per rank, see the module's docstring."""
    own: list[list[fx.Node]] = [[] for _ in range(program.ranks)]
    for node in program.graph.nodes:
        for rank in _ranks_of(node, program.ranks):
            own[rank].append(node)
    return tuple(_Projection(program, rank).run(nodes) for rank, nodes in enumerate(own))


def _ranks_of(node: fx.Node, ranks: int) -> Iterable[int]:
    """Those whose program a node stands in."""
    if node.op in ("placeholder", "output"):
        return range(ranks)
    if node.target is ops.transfer:
        return {rank_of(node.args[0]), rank_of(node)}  # type: ignore[arg-type]
    return node.kwargs["ranks"] if node.target is ops.all_reduce else (rank_of(node),)  # type: ignore[return-value]


class _Projection:
    def __init__(self, program: Program, rank: int) -> None:
        self.program, self.rank = program, rank
        self.graph = fx.Graph()
        self.copies: dict[fx.Node, Any] = {}

    def run(self, nodes: Iterable[fx.Node]) -> RankProgram:
        results: Any = self.program.graph.output_node().args[0]
        for node in nodes:
            if node.op == "placeholder":
                self._keep(node)
            elif node.op == "output":
                describe(self.graph.output(replaced(results[self.rank], self.copies)), rank=self.rank)
            elif node.target is ops.transfer:
                self._transfer(node)
            elif node.target is ops.all_reduce:
                self._reduce(node)
            elif node not in self.copies:
                self._keep(node)
        eliminate_dead_code(self.graph)
        for node in list(self.graph.nodes):
            if node.op == "placeholder" and not node.users:
                self.graph.erase_node(node)
        root = nn.Module()
        for node in self.graph.nodes:
            if node.op == "call_module" and not hasattr(root, str(node.target)):
                root.add_module(str(node.target), self.program.root.get_submodule(str(node.target)))
        return RankProgram(self.rank, self.graph, root)

    def _keep(self, node: fx.Node) -> None:
        args, kwargs = replaced(node.args, self.copies), replaced(node.kwargs, self.copies)
        name = name_of(node) if node.op == "call_function" else str(node.target)
        if node.op == "call_module" and node.meta["microbatch"] is not None:
            name = f"{name}_{node.meta['microbatch']}"
        self._add(node, node.op, node.target, tuple(args), dict(kwargs), name)

    def _transfer(self, node: fx.Node) -> None:
        value: Any = node.args[0]
        frm, to = rank_of(value), rank_of(node)
        channel, type = f"{frm}->{to}", type_of(node)
        if self.rank == frm:
            note = {key: node.meta[key] for key in ("stage", "microbatch", "phase", "type")}
            sent = self.graph.call_function(ops.send, (self.copies[value],), {"to": to, "channel": channel})
            describe(sent, rank=frm, **note)
        else:
            assert isinstance(type, ValueType)
            what = {"frm": frm, "channel": channel, "shape": tuple(type.shape), "dtype": type.dtype}
            self._add(node, "call_function", ops.recv, (), what, name_of(node))

    def _reduce(self, node: fx.Node) -> None:
        ranks: Any = node.kwargs["ranks"]
        values: Any = node.args[0]
        own = ranks.index(self.rank)
        part = replaced(values[own], self.copies)
        copy = self._add(node, "call_function", ops.all_reduce, (part,), {"ranks": ranks}, name_of(node))
        copy.meta["rank"] = self.rank
        for user in node.users:
            if user.target is operator.getitem and user.args[1] == own:
                self.copies[user] = copy

    def _add(self, node: fx.Node, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> fx.Node:
        copy = self.graph.create_node(op, target, args, kwargs, name=name)
        copy.meta = dict(node.meta)
        self.copies[node] = copy
        return copy
