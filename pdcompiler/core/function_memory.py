"""What a stage's function needs in memory on its way, and in which memory it gives its results, without running it.

    a = mm(x, w)      + a
    b = view(a)       a's memory
    c = tanh(b)       + c                 peak: a and c
    return c, saved=(a,)                  gives: new memory c; new memory a

What it is given (weights, saved values, inputs) is its caller's: it counts nothing here, and results may lie in it. Not here:
what a program holds around it (`backends/live_bytes.py`), nor what an operator needs inside.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

from torch import fx

from pdcompiler.core.cost import compile_expressions
from pdcompiler.core.flops import tensors
from pdcompiler.core.node_meta import is_integer, type_of
from pdcompiler.core.value_type import ValueType
from pdcompiler.core.values import is_view


@dataclass(frozen=True)
class Given:
    """Memory of an argument, by its place, or of an item of it."""

    argument: int
    item: int | None = None


Value = Any
"""Whose memory: a piece's number, Given, a tuple of such, or None (no tensor, or a constant)."""


@dataclass(frozen=True)
class Needs:
    """peak: bytes of new memory at the fullest.   node: that runs then.   sizes: of each piece of new memory.   gives: of each
    result, whose memory it is."""

    peak: int
    node: str
    sizes: tuple[int, ...]
    gives: tuple[Value, ...]


def needs_of(graph: fx.Graph, rows: int) -> Needs:
    """Of a function's graph, for so many rows. Values are free after their last reader, as in the generated code."""
    walk = _Walk()
    nodes = list(graph.nodes)
    sizes = _sizes(nodes, rows)
    last = {source: node for node in nodes for source in node.all_input_nodes}
    for node in nodes:
        walk.run(node, sizes)
        for source in [*node.all_input_nodes, *([] if node.users else [node])]:
            if last.get(source, node) is node:
                walk.count(walk.values.pop(source), -1)
    return Needs(walk.peak, walk.at, tuple(walk.sizes), walk.gives)


def _sizes(nodes: list[fx.Node], rows: int) -> dict[fx.Node, list[int]]:
    """Of the tensors that each node makes."""
    made = {node: [t.nbytes() for t in tensors(type_of(node))] for node in nodes if node.op == "call_function"}
    numbers = iter(compile_expressions(tuple(size for sizes in made.values() for size in sizes))(rows).tolist())
    return {node: [int(next(numbers)) for _ in sizes] for node, sizes in made.items()}


class _Walk:
    def __init__(self) -> None:
        self.values: dict[fx.Node, Value] = {}
        self.sizes: list[int] = []
        self.counts: list[int] = []
        self.arguments = self.total = self.peak = 0
        self.at = ""
        self.gives: tuple[Value, ...] = ()

    def run(self, node: fx.Node, sizes: dict[fx.Node, list[int]]) -> None:
        """Give a node its memory."""
        if node.op == "placeholder":
            self.values[node] = Given(self.arguments)
            self.arguments += 1
        elif node.op == "output":
            self.gives = tuple(map(self._named, node.args[0]))  # type: ignore[arg-type]
            self.values[node] = self.gives
        else:
            self.values[node] = None if node.op == "get_attr" or is_integer(node) else self._memory(node, sizes)
        self.count(self.values[node], 1)
        if self.total > self.peak:
            self.peak, self.at = self.total, node.name

    def _memory(self, node: fx.Node, sizes: dict[fx.Node, list[int]]) -> Value:
        if is_view(node):
            return self._seen(node)
        pieces, type = (self._new(size) for size in sizes[node]), type_of(node)
        if isinstance(type, tuple):
            return tuple(next(pieces) if isinstance(part, ValueType) else None for part in type)
        return next(pieces, None)

    def _seen(self, node: fx.Node) -> Value:
        """What a view looks at; of a tuple the item."""
        source = node.all_input_nodes[0]
        value = self.values[source]
        if node.target is not operator.getitem:
            return value
        if isinstance(value, Given) and value.item is None and type_of(source) is None:
            return Given(value.argument, node.args[1])  # type: ignore[arg-type]
        return value[node.args[1]] if isinstance(value, tuple) else value  # type: ignore[index]

    def _new(self, size: int) -> int:
        self.sizes.append(size)
        self.counts.append(0)
        return len(self.sizes) - 1

    def count(self, value: Value, by: int) -> None:
        """Hold memory once more, or once less."""
        if isinstance(value, int):
            was = self.counts[value]
            self.counts[value] += by
            if (was > 0) != (self.counts[value] > 0):
                self.total += by * self.sizes[value]
        elif isinstance(value, tuple):
            for item in value:
                self.count(item, by)

    def _named(self, argument: Any) -> Value:
        if isinstance(argument, fx.Node):
            return self.values[argument]
        return tuple(map(self._named, argument)) if isinstance(argument, (tuple, list)) else None
