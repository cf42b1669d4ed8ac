"""Part a stage's backward in two: what an earlier stage waits for, and the weights' gradients, for which only the end does.

    before                                                   after
    stage1_backward(weights, saved, d_y) -> d_x, gradients   stage1_backward_input(weights, saved, d_y) -> d_x, kept
        d_h = mul(d_y, saved[0])                                 d_h = mul(d_y, saved[0])
        d_x = mm(d_h, weights[0])                                d_x = mm(d_h, weights[0])
        d_w = mm(t(d_h), saved[1])                           stage1_backward_weight(kept) -> gradients
                                                                 d_w = mm(t(kept[0]), kept[1])

The first part is what the gradients of the stage's inputs need; `kept` is what the second reads of it, and what it reads of
`saved` and of the gradients that came in, so that all else is free in between. Integers and views of weights are made again.
Where the second part begins later, at a minimum cut over the bytes of `kept`, a sum over rows may be made early (of RMSNorm's two
activations one small vector is left); that is done where it saves a tenth of them or more. Products stay in the second part. A
backward that gives no input's gradient, or no weight's, is left whole. A convolution's backward, one operation for both, becomes
two. Not here: when each part runs (the schedule).
"""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import networkx
import torch
from torch import fx

from pdcompiler.core.ir import BackwardParts, Function, Staged, ValueType, is_integer, type_of
from pdcompiler.core.rewriting import is_taken, nodes_in, replaced, unpack
from pdcompiler.core.value_type import estimate
from pdcompiler.core.values import is_product, is_view

WORTH_IT = 0.9
"""The minimum cut is taken where it leaves at most this part of what is kept without it."""
AT_HAND = ("weights", "buffers", "rows", "loss_weight", "seed")
"""What both parts take: it is there at any time."""


def split_weight_gradients(staged: Staged, rows: int) -> Staged:
    """Give each stage whose backward falls apart its two parts. rows: of a microbatch, for the bytes."""
    for stage in staged.stages:
        if stage.backward is not None:
            stage.parts = split(stage.backward, (*AT_HAND, *stage.batch), rows)
    return staged


def split(backward: Function, at_hand: Sequence[str], rows: int) -> BackwardParts | None:
    """The two parts of one backward; None where it is left whole. at_hand: the names that both may take."""
    graph = _without_double_products(backward.module.graph)
    outputs: Any = graph.output_node().args[0]
    given = dict(zip(backward.gives, outputs, strict=True))
    gradients = given.pop("gradients", ())
    splitter = _Splitter(graph, backward.module, at_hand, rows)
    first = splitter.with_items(splitter.ancestors(given.values()))
    if not given or all(node in first for node in gradients):
        return None
    early = first | splitter.worth_early(first, gradients)
    kept, early_kept = splitter.kept(first, gradients), splitter.kept(early, gradients)
    plain, least = splitter.nbytes(kept), splitter.nbytes(early_kept)
    if least > WORTH_IT * plain:
        early, early_kept, least = first, kept, plain
    results = {**given, **({"kept": tuple(early_kept)} if early_kept else {})}
    weight = splitter.build("Weight", {"gradients": tuple(gradients)}, early_kept)
    return BackwardParts(splitter.build("Input", results), weight, least, plain)


def _without_double_products(graph: fx.Graph) -> fx.Graph:
    """A copy in which no product makes the gradients of an input and of a weight at once."""
    graph = copy.deepcopy(graph)
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.convolution_backward.default):
        mask: Any = node.args[-1]
        if mask[0] and any(mask[1:]):
            with graph.inserting_after(node):
                second = graph.node_copy(node)
            second.args = (*node.args[:-1], [False, *mask[1:]])
            node.args = (*node.args[:-1], [True, False, False])
            for item in [user for user in node.users if user.args[1] != 0]:
                item.replace_input_with(node, second)
    return graph


class _Splitter:
    """One backward's graph. owner: holds its constants."""

    def __init__(self, graph: fx.Graph, owner: fx.GraphModule, at_hand: Sequence[str], rows: int) -> None:
        self.owner, self.at_hand, self.rows = owner, at_hand, rows
        self.nodes = list(graph.nodes)
        self.order = {node: place for place, node in enumerate(self.nodes)}

    def ancestors(self, wanted: Iterable[fx.Node], stop: Iterable[fx.Node] = ()) -> set[fx.Node]:
        """What values are made of, they themselves among it; not what lies behind `stop`."""
        found, end, waiting = set[fx.Node](), set(stop), list(wanted)
        while waiting:
            node = waiting.pop()
            if node not in found:
                found.add(node)
                waiting += [] if node in end else node.all_input_nodes
        return found

    @staticmethod
    def with_items(nodes: set[fx.Node]) -> set[fx.Node]:
        """What takes apart what an operation gives stands with it."""
        made = [node for node in nodes if node.op == "call_function"]
        return nodes | {user for node in made for user in node.users if user.target is operator.getitem}

    def is_cheap(self, node: fx.Node) -> bool:
        """What each part makes for itself: integers, constants, what is at hand and its views."""
        if node.op in ("placeholder", "get_attr"):
            return node.op == "get_attr" or node.target in self.at_hand
        if is_integer(node):
            return True
        return is_view(node) and all(self.is_cheap(source) for source in node.all_input_nodes)

    def kept(self, first: set[fx.Node], gradients: Iterable[fx.Node]) -> list[fx.Node]:
        """What the second part reads of the first, in order."""
        found, seen, waiting = set[fx.Node](), set[fx.Node](), list(gradients)
        while waiting:
            node = waiting.pop()
            if node in seen or self.is_cheap(node):
                continue
            seen.add(node)
            if node in first or is_taken(node):
                found.add(node)
            else:
                waiting += node.all_input_nodes
        return sorted(found, key=self.order.__getitem__)

    def nbytes(self, values: Iterable[fx.Node]) -> float:
        """Of the memory that stays while values are kept: views of one value are counted once."""
        bases = dict.fromkeys(self._base(node) for node in values)
        return math.fsum(self._size(node) for node in bases)

    def _base(self, node: fx.Node) -> fx.Node:
        while is_view(node) and not is_taken(node) and node.target is not operator.getitem:
            node = node.all_input_nodes[0]
        return node

    def _size(self, node: fx.Node) -> float:
        type = type_of(node)
        return estimate(type.nbytes(), self.rows) if isinstance(type, ValueType) else 0.0

    def worth_early(self, first: set[fx.Node], gradients: Sequence[fx.Node]) -> set[fx.Node]:
        """What should be made early, so that the least has to be kept: the near side of a minimum cut. A value that is kept is an
        edge of the bytes of its memory, an operation that gives several can't be; what is early makes what it reads early too;
        products and what reads them stay."""
        network = networkx.DiGraph()
        late = self.ancestors(gradients, first) - first
        for node in sorted(late | first & {s for n in late for s in n.all_input_nodes}, key=self.order.__getitem__):
            if self.is_cheap(node):
                continue
            size = {"capacity": self._size(self._base(node))} if isinstance(type_of(node), ValueType) else {}
            network.add_edge((node, "in"), (node, "out"), **size)
            if node in first or is_taken(node):
                network.add_edge("early", (node, "in"))
                continue
            for source in node.all_input_nodes:
                if not self.is_cheap(source):
                    network.add_edge((source, "out"), (node, "in"))
                    network.add_edge((node, "in"), (source, "in"))
            if is_product(node):
                network.add_edge((node, "in"), "late")
        for node in gradients:
            network.add_edge((node, "out"), "late")
        if "early" not in network:
            return set()
        _, (near, _) = networkx.minimum_cut(network, "early", "late")
        return {node for node in late if (node, "in") in near}

    def build(self, name: str, given: Mapping[str, Any], kept: Sequence[fx.Node] = ()) -> Function:
        """A function that gives values by name, in the graph's own order. kept: those that it is given as one tuple."""
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        needed = self.ancestors(nodes_in(tuple(given.values())), kept) - set(kept)
        placeholders = [node for node in self.nodes if node.op == "placeholder" and node in needed]
        for node in placeholders:
            copies[node] = graph.node_copy(node)
        if kept:
            unpack(graph, copies, "kept", {node: place for place, node in enumerate(kept)}, backward=True)
        for node in self.nodes:
            if node in needed and node not in copies:
                copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(tuple(replaced(list(given.values()), copies)))
        root = {str(node.target): getattr(self.owner, str(node.target)) for node in graph.nodes if node.op == "get_attr"}
        module = fx.GraphModule(root, graph, f"{type(self.owner).__name__}{name}")
        takes = [str(node.target) for node in placeholders] + (["kept"] if kept else [])
        return Function(module, tuple(takes), tuple(given))
