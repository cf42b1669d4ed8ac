"""Fewer layers, the same best plan: layers that some best plan holds on one stage become one.

    together     groups that must not be parted, and cycles that they make: a and c on one stage need b between them there too
    absorbed     a layer with one neighbour before it (or one behind) goes with that one, where parting them never pays:
                 its own weight and the values that would be cut instead are no more than the values between the two

Absorbing is exact because neither stage gets slower: the one that loses the layer no longer pays for the values between the two,
and the one that takes it pays at most as much for others. A weight in bytes is 0 for a layer that costs nothing, infinite for
others: then it holds for every machine and schedule. Not here: what is likely, but not certain, to be on one stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import combinations, pairwise

import networkx
import numpy

from pdcompiler.core.workload import Floats, Value, Workload

Parts = tuple[tuple[int, ...], ...]
"""For each folded layer, the layers that it holds."""
MOST_MEMBERS = 32
"""Of larger values only neighbours are looked at."""


def fold_workload(workload: Workload) -> tuple[Workload, Parts]:
    """The workload of the folded layers, and which layers they hold."""
    columns = (*workload.forward, *workload.backward, workload.parameters, workload.saved, workload.working)
    weights = numpy.where(sum(columns) > 0, numpy.inf, 0.0)
    values = [((value.producer, *value.consumers), value.bytes) for value in workload.values]
    parts = fold(workload.layers, workload.edges(), values, workload.together, weights)
    return merge(workload, parts), parts


def merge(workload: Workload, parts: Parts) -> Workload:
    """Each part as one layer, under its first layer's name. Seconds and bytes are sums, working memory is the largest."""
    place = {layer: k for k, part in enumerate(parts) for layer in part}
    starts = numpy.cumsum([0, *map(len, parts[:-1])])
    order = numpy.array([layer for part in parts for layer in part], dtype=numpy.int64)

    def sums(array: Floats) -> Floats:
        return numpy.asarray(numpy.add.reduceat(array[..., order], starts, axis=-1))

    values = []
    for value in workload.values:
        readers = tuple(sorted({place[reader] for reader in value.consumers} - {place[value.producer]}))
        if readers:
            values.append(Value(place[value.producer], readers, value.bytes))
    return Workload(
        tuple(workload.names[part[0]] for part in parts), sums(workload.forward), sums(workload.backward),
        sums(workload.parameters), sums(workload.saved), numpy.maximum.reduceat(workload.working[order], starts),
        tuple(values), rows=workload.rows,
    )  # fmt: skip


def fold(
    layers: int, edges: Iterable[tuple[int, int]], values: Sequence[tuple[Sequence[int], float]],
    together: Iterable[Sequence[int]] = (), weights: Floats | None = None,
) -> Parts:  # fmt: skip
    """The parts, in a topological order. edges: which must run before which; only within groups may they have cycles.
    values: the layers of each, and what is charged for it.   weights: what a stage pays for taking a layer."""
    part = _whole_groups(layers, edges, together)
    graph = _Parts.of(part, edges, values, numpy.full(layers, numpy.inf) if weights is None else weights)
    waiting = sorted(graph.layers)
    while waiting:
        own = waiting.pop()
        other = graph.absorbs(own) if own in graph.layers else None
        if other is not None:
            waiting += sorted(graph.join(own, other))
    return graph.in_order()


def inseparable(
    parts: Parts, values: Sequence[tuple[Sequence[int], float]], seconds: Floats, limit: float, spare: bool = False
) -> list[tuple[int, int]]:
    """Pairs of layers that every plan whose slowest stage takes less than `limit` has on one stage: apart, either's stage would
    have its part and all values that both are members of. spare: one of the two may stand where transfers cost nothing."""
    place = {layer: k for k, part in enumerate(parts) for layer in part}
    own = [float(seconds[list(part)].sum()) for part in parts]
    shared: dict[tuple[int, int], float] = {}
    for layers, cost in values:
        members = sorted({place[layer] for layer in layers})
        pairs = combinations(members, 2) if len(members) <= MOST_MEMBERS else pairwise(members)
        for pair in pairs:
            shared[pair] = shared.get(pair, 0.0) + cost
    heavier = min if spare else max
    return [(parts[a][0], parts[b][0]) for (a, b), cost in shared.items() if cost + heavier(own[a], own[b]) >= limit]


def _whole_groups(layers: int, edges: Iterable[tuple[int, int]], together: Iterable[Sequence[int]]) -> list[int]:
    """The first layer of the part of each layer."""
    graph = networkx.DiGraph(edges)
    graph.add_nodes_from(range(layers))
    for group in together:
        ring = sorted(set(group))
        graph.add_edges_from(zip(ring, ring[1:] + ring[:1], strict=True))
    part = list(range(layers))
    for component in networkx.strongly_connected_components(graph):
        first = min(component)
        for layer in component:
            part[layer] = first
    return part


@dataclass
class _Parts:
    """Parts under construction, each known by one number. layers: of each.   before, after: its neighbours.   touch: the values
    that it makes or reads, of those that are in several parts.   members: the parts of each value."""

    layers: dict[int, list[int]]
    weight: dict[int, float]
    before: dict[int, set[int]]
    after: dict[int, set[int]]
    touch: dict[int, set[int]]
    members: list[set[int]]
    cost: list[float] = field(default_factory=list)

    @staticmethod
    def of(
        part: Sequence[int], edges: Iterable[tuple[int, int]], values: Sequence[tuple[Sequence[int], float]], weights: Floats
    ) -> _Parts:
        names = sorted(set(part))
        members = [{part[layer] for layer in layers} for layers, _ in values]
        made = _Parts(
            {name: [] for name in names}, dict.fromkeys(names, 0.0), {name: set() for name in names},
            {name: set() for name in names}, {name: set() for name in names}, members, [cost for _, cost in values],
        )  # fmt: skip
        for layer, name in enumerate(part):
            made.layers[name].append(layer)
            made.weight[name] += float(weights[layer])
        for first, second in edges:
            if part[first] != part[second]:
                made.after[part[first]].add(part[second])
                made.before[part[second]].add(part[first])
        for value, ends in enumerate(members):
            for name in ends if len(ends) > 1 else ():
                made.touch[name].add(value)
        return made

    def absorbs(self, own: int) -> int | None:
        """The neighbour that takes a part, if one does."""
        for neighbours in (self.before[own], self.after[own]):
            if len(neighbours) == 1 and self.weight[own] < numpy.inf:
                (other,) = neighbours
                between = sum(self.cost[value] for value in self.touch[own] if self.members[value] == {own, other})
                instead = sum(self.cost[value] for value in self.touch[own] if other not in self.members[value])
                if self.weight[own] + instead <= between:
                    return other
        return None

    def join(self, own: int, other: int) -> set[int]:
        """Make `own` a part of `other`; the parts for which that may change something."""
        self.layers[other] += self.layers.pop(own)
        self.weight[other] += self.weight.pop(own)
        for value in self.touch.pop(own):
            self.members[value] = self.members[value] - {own} | {other}
            if len(self.members[value]) > 1:
                self.touch[other].add(value)
            else:
                self.touch[other].discard(value)
        for near, back in ((self.before, self.after), (self.after, self.before)):
            for neighbour in near.pop(own) - {other}:
                back[neighbour] = back[neighbour] - {own} | {other}
                near[other].add(neighbour)
            near[other].discard(own)
        return {other} | self.before[other] | self.after[other]

    def in_order(self) -> Parts:
        """Topological; of those that may come next, the one whose first layer is the first."""
        unmet = {name: len(before) for name, before in self.before.items()}
        ready = [(min(self.layers[name]), name) for name, count in unmet.items() if count == 0]
        heapify(ready)
        order = []
        while ready:
            _, name = heappop(ready)
            order.append(tuple(sorted(self.layers[name])))
            for later in self.after[name]:
                unmet[later] -= 1
                if unmet[later] == 0:
                    heappush(ready, (min(self.layers[later]), later))
        return tuple(order)
