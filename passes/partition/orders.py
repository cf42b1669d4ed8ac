"""Good plans of graphs with too many states: all stages along some topological orders, then along all orders near the best.

    depth_first_orders    follows one branch to its end before the next, at random; every second one from the end backwards
    near                  the graph in which layers that stand far apart in an order stay in that order

The stages along one order are found exactly, and a chain's optimum over some dozens of them is mostly the best of all (PLANNER
0.4). All orders near one are a graph with few states, so the best plan among exponentially many neighbours is found exactly too.
Not here: a proof that there is none better; plans found so have a bound and a gap.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush

from pdcompiler.core.lattice import Graph, in_new_order


def depth_first_orders(graph: Graph, count: int, seed: int = 0) -> Iterator[tuple[int, ...]]:
    """First the graph's own, then `count` - 1 others, always the same for the same seed."""
    yield tuple(range(graph.layers))
    before, after = graph.rows("before"), graph.rows("after")
    for number in range(1, count):
        choice = random.Random(f"{seed} {number}")
        if number % 2:
            yield tuple(_depth_first(before, after, choice))
        else:
            yield tuple(_depth_first(after, before, choice)[::-1])


def near(graph: Graph, order: Sequence[int], width: int) -> Graph:
    """The graph with its layers numbered by their place in `order`, and edges between those that stand `width` or more apart:
    with 1 only that order is left, with 2 also all those in which some neighbours have changed places."""
    apart = range(width, 2 * width)  # those further apart follow
    more = [(k, k + far) for far in apart for k in range(graph.layers - far)]
    return in_new_order(graph, order, more)


def order_toward(graph: Graph, rank: Sequence[float]) -> tuple[int, ...]:
    """Of the layers that may come next, always the one with the least rank, then the first."""
    unmet = [len(row) for row in graph.rows("before")]
    after = graph.rows("after")
    ready = [(rank[layer], layer) for layer, count in enumerate(unmet) if count == 0]
    heapify(ready)
    order = []
    while ready:
        _, layer = heappop(ready)
        order.append(layer)
        for later in after[layer]:
            unmet[later] -= 1
            if unmet[later] == 0:
                heappush(ready, (rank[later], later))
    return tuple(order)


def _depth_first(before: Sequence[Sequence[int]], after: Sequence[Sequence[int]], choice: random.Random) -> list[int]:
    unmet = [len(row) for row in before]
    ready = [layer for layer, count in enumerate(unmet) if count == 0]
    choice.shuffle(ready)
    order = []
    while ready:
        layer = ready.pop()
        order.append(layer)
        freed = []
        for later in after[layer]:
            unmet[later] -= 1
            if unmet[later] == 0:
                freed.append(later)
        choice.shuffle(freed)
        ready += freed
    return order
