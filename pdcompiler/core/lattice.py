"""A branching workload as arrays, for native loops: its graph, and the downsets in which a stage may begin and end.

    Graph      layers, which must run before which, and the values whose transfer is charged where their layers are parted
    Lattice    states 0 (nothing is done), ..., the last (everything); from each, the states with one more layer

A chain's lattice has one more layer at each state; a branching graph's has a choice. Not here: how the states are found
(`passes/partition/ideals.py`), and what is searched in them (`passes/partition/minimax.py`, `lattice_spans.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, pairwise
from typing import NamedTuple, TypeAlias

import numpy
import numpy.typing

from pdcompiler.core.errors import CompileError
from pdcompiler.core.spans import Integers
from pdcompiler.core.workload import Floats, Workload

Words: TypeAlias = numpy.typing.NDArray[numpy.uint64]


class Graph(NamedTuple):
    """Rows of several lengths are one array with `start`, where each row begins. before, after: of each layer, the layers that
    must run before and after it.   member: of each value, the layers that make or read it; cost: what is charged to each stage
    that holds some of them but not all.   touch: of each layer, its values.   maker: of each value, its first layer."""

    before_start: Integers
    before: Integers
    after_start: Integers
    after: Integers
    member_start: Integers
    member: Integers
    touch_start: Integers
    touch: Integers
    maker: Integers
    cost: Floats

    @property
    def layers(self) -> int:
        """How many."""
        return len(self.before_start) - 1

    def rows(self, name: str) -> list[list[int]]:
        """One of "before", "after", "member", "touch", as lists."""
        start, flat = getattr(self, f"{name}_start").tolist(), getattr(self, name).tolist()
        return [flat[a:b] for a, b in pairwise(start)]


class Lattice(NamedTuple):
    """words: (states, layers / 64), bit by bit the layers that are done; a state stands after those that it contains.
    next_layer, next_state: of each state, what may be done next, in the order of layers, and where that leads."""

    words: Words
    next_start: Integers
    next_layer: Integers
    next_state: Integers

    @property
    def states(self) -> int:
        """How many."""
        return len(self.words)

    def between(self, first: int, last: int) -> tuple[int, ...]:
        """The layers done in the later state and not in the earlier."""
        return tuple(numpy.flatnonzero(_bits(self.words[last] & ~self.words[first])).tolist())

    def sums(self, per_layer: Floats) -> Floats:
        """Of the layers done in each state."""
        totals = numpy.zeros(self.states)
        for state in range(0, self.states, 4096):
            totals[state : state + 4096] = _bits(self.words[state : state + 4096])[:, : len(per_layer)] @ per_layer
        return totals


def make_graph(layers: int, edges: Iterable[tuple[int, int]], values: Sequence[Sequence[int]], costs: Sequence[float]) -> Graph:
    """edges: (earlier layer, later layer).   values: the layers of each, the maker first; one that a single layer both makes and
    reads is left out. Raises CompileError where an edge goes against the order of the layers."""
    distinct = sorted(set(edges))
    for earlier, later in distinct:
        if not 0 <= earlier < later < layers:
            raise CompileError(f"layer {later} of {layers} can't read what layer {earlier} makes")
    crossing = [(tuple(dict.fromkeys(members)), cost) for members, cost in zip(values, costs, strict=True)]
    crossing = [(members, cost) for members, cost in crossing if len(members) > 1]
    before: list[list[int]] = [[] for _ in range(layers)]
    after: list[list[int]] = [[] for _ in range(layers)]
    touch: list[list[int]] = [[] for _ in range(layers)]
    for earlier, later in distinct:
        after[earlier].append(later)
        before[later].append(earlier)
    for value, (members, _) in enumerate(crossing):
        for layer in members:
            touch[layer].append(value)
    member = _rows([members for members, _ in crossing])
    makers = numpy.array([members[0] for members, _ in crossing], dtype=numpy.int64)
    cost = numpy.array([cost for _, cost in crossing], dtype=numpy.float64)
    return Graph(*_rows(before), *_rows(after), *member, *_rows(touch), makers, cost)


def graph_of(workload: Workload) -> Graph:
    """Costs are bytes."""
    values = [(value.producer, *value.consumers) for value in workload.values]
    return make_graph(workload.layers, workload.edges(), values, [value.bytes for value in workload.values])


def chain_lattice(layers: int) -> Lattice:
    """Of the layers' own order: its prefixes."""
    done = numpy.tri(layers + 1, layers, -1, dtype=bool)
    start = numpy.minimum(numpy.arange(layers + 2), layers).astype(numpy.int64)
    every = numpy.arange(layers + 1, dtype=numpy.int64)
    return Lattice(pack(done), start, every[:-1], every[1:])


def in_new_order(graph: Graph, order: Sequence[int], more: Iterable[tuple[int, int]] = ()) -> Graph:
    """The same graph with its layers numbered by their place in another topological order; more: edges to add, between places."""
    place = {layer: k for k, layer in enumerate(order)}
    edges = [(place[a], place[b]) for b, row in enumerate(graph.rows("before")) for a in row]
    values = [[place[layer] for layer in row] for row in graph.rows("member")]
    return make_graph(graph.layers, [*edges, *more], values, graph.cost.tolist())


def pack(done: numpy.typing.NDArray[numpy.bool_]) -> Words:
    """(states, layers) to words of 64 bits; layer 0 is the lowest."""
    states, layers = done.shape
    padded = numpy.zeros((states, -(-max(layers, 1) // 64) * 64), dtype=bool)
    padded[:, :layers] = done
    return numpy.packbits(padded, axis=1, bitorder="little").view(numpy.uint64)


def _bits(words: Words) -> numpy.typing.NDArray[numpy.uint8]:
    return numpy.unpackbits(numpy.ascontiguousarray(words).view(numpy.uint8), axis=-1, bitorder="little")


def _rows(rows: Sequence[Sequence[int]]) -> tuple[Integers, Integers]:
    start = numpy.zeros(len(rows) + 1, dtype=numpy.int64)
    numpy.cumsum([len(row) for row in rows], out=start[1:])
    return start, numpy.fromiter(chain.from_iterable(rows), dtype=numpy.int64, count=int(start[-1]))
