"""Cut a stage's last backward where the gradients of one reduction are made, so that it travels while the rest is computed.

    before                                                          after
    d_x, g = stage0_backward(weights, saved, d_h)                   g0, rest = stage0_backward_piece0(weights, saved, d_h)
    total = accumulate(earlier, g)                                  t0 = accumulate((earlier[1],), g0);  d_w1 = t0[0]
    d_w0, d_w1 = total                                              d_x, g1 = stage0_backward_piece1(weights, saved, rest)
    sums = all_reduce(((d_w1,), ...), ranks=(0, 1))                 t1 = accumulate((earlier[0],), g1);  d_w0 = t1[0]
    sums_1 = all_reduce(((d_w0,), ...), ranks=(0, 1))               sums = all_reduce(...);  sums_1 = all_reduce(...)

Pieces are consecutive parts of the graph, in its own order, so that every number stays as it was; `rest` are the values that
later pieces read. A backward is left whole where its gradients go to fewer than two reductions, or are not added last. Not here:
which gradients are reduced together (`insert_reductions`), and that reductions start early (`overlap_reductions`).
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from pdcompiler.core import ops
from pdcompiler.core.ir import Program, describe, nodes_in, replaced
from pdcompiler.core.rewriting import is_taken, unpack

Groups = tuple[tuple[int, ...], ...]
"""For each piece: which of the gradients it gives."""


def split_backward(program: Program) -> Program:
    """See the module's docstring."""
    order = {node: place for place, node in enumerate(program.graph.nodes)}
    modules: dict[tuple[str, Groups], list[Piece]] = {}
    for call in [node for node in program.graph.nodes if node.op == "call_module"]:
        last = _last(call, order)
        if last is None:
            continue
        whole: Any = program.root.get_submodule(str(call.target))
        groups = last.groups(order)
        if len(last.parts) < len(whole.graph.output_node().args[0][last.place]):
            continue
        key = (str(call.target), groups)
        if key not in modules:
            modules[key] = list(_pieces(whole, last.place, groups))
        pieces = modules[key]
        if len(pieces) > 1:
            _Rewrite(program, call, last, pieces).run()
    return program


@dataclass(frozen=True)
class Last:
    """A backward whose gradients are reduced. place: of the gradients among what it gives.   total: their sum over microbatches,
    or they themselves.   earlier: the sum so far, if there is one.   parts: those of the total that are read, by place."""

    place: int
    gradients: fx.Node
    total: fx.Node
    earlier: fx.Node | None
    parts: dict[int, fx.Node]

    def groups(self, order: dict[fx.Node, int]) -> Groups:
        """By reduction, in the program's order; the rest with the last."""
        found: dict[fx.Node, list[int]] = {}
        rest: list[int] = []
        for k, part in self.parts.items():
            reduction = next((user for user in part.users if user.target is ops.all_reduce), None)
            (rest if reduction is None else found.setdefault(reduction, [])).append(k)
        groups = [found[node] for node in sorted(found, key=order.__getitem__)]
        if groups:
            groups[-1] += rest
        return tuple(tuple(group) for group in groups)


def _last(call: fx.Node, order: dict[fx.Node, int]) -> Last | None:
    """What becomes of a call's gradients, if they are complete with it."""
    gradients = next((user for user in call.users if user.meta.get("name", "").startswith("gradients_")), None)
    if gradients is None:
        return None
    total, earlier = gradients, None
    readers = [user for user in gradients.users if user.op != "output"]
    if len(readers) == 1 and readers[0].target is ops.accumulate and readers[0].args[1] is gradients:
        (total,) = readers
        earlier = total.args[0]
        if not isinstance(earlier, fx.Node) or (order[earlier] > order[call] and earlier.all_input_nodes):
            return None
        readers = [user for user in total.users if user.op != "output"]
    if not readers or any(user.target is not operator.getitem for user in readers):
        return None
    parts = {int(part.args[1]): part for part in readers}  # type: ignore[arg-type]
    return Last(int(gradients.args[1]), gradients, total, earlier, parts)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Piece:
    """module: takes the placeholders that it reads, by place, then the rest of the piece before; gives the gradients of its
    group, the values of the whole that `gives` names by place, and what later pieces read.   has_rest: whether it takes and gives
    a rest."""

    module: fx.GraphModule
    takes: tuple[int, ...]
    group: tuple[int, ...]
    gives: tuple[int, ...]
    has_rest: tuple[bool, bool]


def _pieces(whole: fx.GraphModule, place: int, groups: Groups) -> Iterator[Piece]:
    """Cut the graph; nothing where that leaves one piece."""
    nodes = list(whole.graph.nodes)
    order = {node: k for k, node in enumerate(nodes)}
    outputs: Any = whole.graph.output_node().args[0]
    gradients: Sequence[fx.Node] = outputs[place]
    ends = list(itertools.accumulate((max(order[gradients[k]] for k in group) + 1 for group in groups), max))
    joined = [k for k in range(len(groups)) if k + 1 == len(groups) or ends[k] < ends[k + 1]]
    start, first, rest = 0, 0, tuple[fx.Node, ...]()
    for k in joined if len(joined) > 1 else ():
        is_last = k + 1 == len(groups)
        end = len(nodes) if is_last else ends[k]
        cut = _Cut(whole, order, (start, end), rest)
        gives = {i: node for i, node in enumerate(outputs) if i != place and cut.makes(node, is_last)}
        group = tuple(itertools.chain(*groups[first : k + 1]))
        later = {source for node in nodes[end:-1] for source in node.all_input_nodes}
        later.update(gradients[i] for i in itertools.chain(*groups[k + 1 :]))
        rest = tuple(node for node in nodes[:end] if node in later and not _is_source(node))
        yield cut.build([gradients[i] for i in group], group, gives, rest)
        start, first = end, k + 1


def _is_source(node: fx.Node) -> bool:
    """Whether every piece can take or make it by itself: what the whole takes, an item of that, a constant."""
    return node.op == "get_attr" or is_taken(node)


class _Cut:
    """One piece while it is built. rest: the values that the piece before gives."""

    def __init__(
        self, whole: fx.GraphModule, order: dict[fx.Node, int], span: tuple[int, int], rest: tuple[fx.Node, ...]
    ) -> None:
        self.whole, self.order, self.span, self.rest = whole, order, span, rest
        self.body = [node for node in order if span[0] <= order[node] < span[1] and not _is_source(node) and node.op != "output"]

    def makes(self, node: fx.Node, last: bool) -> bool:
        """Whether this piece gives a value of the whole: where it is made; one that none makes, at the end."""
        return last if _is_source(node) else self.span[0] <= self.order[node] < self.span[1]

    def build(
        self, gradients: Sequence[fx.Node], group: tuple[int, ...], gives: dict[int, fx.Node], following: tuple[fx.Node, ...]
    ) -> Piece:
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        results = [tuple(gradients), *gives.values()] + ([following] if following else [])
        read = {source for node in self.body for source in node.all_input_nodes} | set(nodes_in(results))
        sources = [node for node in self.order if node in read and _is_source(node)]
        wanted = {node if node.op == "placeholder" else node.args[0] for node in sources if node.op != "get_attr"}
        placeholders = [node for node in self.order if node.op == "placeholder"]
        taken = [node for node in placeholders if node in wanted]
        for node in taken:
            copies[node] = graph.node_copy(node)
        if self.rest:
            places = {node: k for k, node in enumerate(self.rest) if node in read or node in following}
            unpack(graph, copies, "rest", places, backward=True)
        for node in [node for node in sources if node.op != "placeholder"] + self.body:
            copies[node] = graph.node_copy(node, lambda source: copies[source])
        graph.output(tuple(replaced(results, copies)))
        root = {str(n.target): getattr(self.whole, str(n.target)) for n in graph.nodes if n.op == "get_attr"}
        module = fx.GraphModule(root, graph, f"{type(self.whole).__name__}Piece")
        takes = tuple(placeholders.index(node) for node in taken)
        return Piece(module, takes, group, tuple(gives), (bool(self.rest), bool(following)))


class _Rewrite:
    """Calls of pieces in place of one call of the whole."""

    def __init__(self, program: Program, call: fx.Node, last: Last, pieces: Sequence[Piece]) -> None:
        self.program, self.graph, self.call, self.last, self.pieces = program, program.graph, call, last, pieces
        self.note = {key: call.meta[key] for key in ("rank", "stage", "microbatch", "phase")}
        self.parts: dict[int, fx.Node] = {}

    def run(self) -> None:
        if self.last.earlier is not None and not self.last.earlier.all_input_nodes:
            self.call.prepend(self.last.earlier)
        rest: tuple[fx.Node, ...] = ()
        with self.graph.inserting_before(self.call):
            for number, piece in enumerate(self.pieces):
                arguments = (*(self.call.args[k] for k in piece.takes), *(rest if piece.has_rest[0] else ()))
                rest = self._piece(number, piece, arguments)
        self._replace()

    def _piece(self, number: int, piece: Piece, arguments: tuple[Any, ...]) -> tuple[fx.Node, ...]:
        """Call it, and name what it gives; returns the rest."""
        name = f"{self.call.target}_piece{number}"
        while getattr(self.program.root, name, piece.module) is not piece.module:
            name += "_"
        self.program.root.add_module(name, piece.module)
        call = describe(self.graph.create_node("call_module", name, arguments), **self.note)
        gradients = self._item(call, 0, self.last.gradients)
        others = [node for node in self.call.users if node is not self.last.gradients]
        for place, k in enumerate(piece.gives, 1):
            for node in [node for node in others if node.args[1] == k]:
                node.replace_all_uses_with(self._item(call, place, node))
        rest = (self._item(call, 1 + len(piece.gives), None),) if piece.has_rest[1] else ()
        total = gradients
        if self.last.earlier is not None:
            so_far = tuple(self._item(self.last.earlier, k, self.last.parts[k]) for k in piece.group if k in self.last.parts)
            total = self.graph.create_node("call_function", ops.accumulate, (so_far, gradients), name=self.last.total.name)
            total.meta = dict(self.last.total.meta)
        for place, k in enumerate(piece.group):
            self.parts[k] = self._item(total, place, self.last.parts[k])
        return rest

    def _item(self, whole: fx.Node, place: int, like: fx.Node | None) -> fx.Node:
        """One of several values. like: the node whose name and meaning it has; None: what is left for the next piece."""
        name = "rest" if like is None else like.name
        node = self.graph.create_node("call_function", operator.getitem, (whole, place), name=name)
        node.meta = {"name": "rest"} if like is None else dict(like.meta)
        return describe(node, **self.note) if like is None else node

    def _replace(self) -> None:
        """Who read the whole's values reads the pieces'."""
        for k, part in self.last.parts.items():
            part.replace_all_uses_with(self.parts[k])
            self.graph.erase_node(part)
        output = self.graph.output_node()
        every = tuple(self.parts[k] for k in sorted(self.parts))
        output.args = (replaced(output.args[0], {self.last.total: every}),)
        for node in dict.fromkeys((self.last.total, self.last.gradients, *self.call.users, self.call)):
            self.graph.erase_node(node)
