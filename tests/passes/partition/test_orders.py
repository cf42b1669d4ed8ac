"""Topological orders, and the graph of all orders near one."""

from __future__ import annotations

from itertools import combinations, permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcompiler.core.lattice import Graph, make_graph
from pdcompiler.passes.partition.ideals import ideals
from pdcompiler.passes.partition.orders import depth_first_orders, near, order_toward


@st.composite
def graphs(draw: st.DrawFn, most_layers: int = 7) -> Graph:
    layers = draw(st.integers(1, most_layers))
    edges = [pair for pair in combinations(range(layers), 2) if draw(st.booleans())]
    return make_graph(layers, edges, edges, [1.0] * len(edges))


def is_order(graph: Graph, order: tuple[int, ...]) -> bool:
    place = {layer: k for k, layer in enumerate(order)}
    later = all(place[a] < place[b] for b, row in enumerate(graph.rows("before")) for a in row)
    return sorted(order) == list(range(graph.layers)) and later


@given(graphs(), st.integers(0, 3))
def test_orders_are_topological_and_always_the_same(graph: Graph, seed: int) -> None:
    orders = list(depth_first_orders(graph, 6, seed))
    assert len(orders) == 6
    assert orders[0] == tuple(range(graph.layers))
    assert all(is_order(graph, order) for order in orders)
    assert orders == list(depth_first_orders(graph, 6, seed))


def test_a_branch_is_followed_to_its_end() -> None:
    branches = make_graph(7, [(0, 1), (1, 2), (2, 3), (0, 4), (4, 5), (5, 6)], [], [])
    _, *orders = depth_first_orders(branches, 9)
    assert set(orders) == {(0, 1, 2, 3, 4, 5, 6), (0, 4, 5, 6, 1, 2, 3)}


@given(graphs(most_layers=6), st.integers(1, 6))
def test_near_holds_all_orders_in_which_no_layer_passes_one_that_is_far(graph: Graph, width: int) -> None:
    _, order = depth_first_orders(graph, 2)
    limited = near(graph, order, width)
    numbered = [tuple(order[place] for place in found) for found in permutations(range(graph.layers)) if is_order(limited, found)]
    place = {layer: k for k, layer in enumerate(order)}
    for found in permutations(range(graph.layers)):
        moves = [(a, b) for a, b in combinations(found, 2) if place[b] + width <= place[a]]
        assert (found in numbered) == (is_order(graph, found) and not moves)
    assert sorted(map(len, limited.rows("member"))) == sorted(map(len, graph.rows("member")))


@pytest.mark.parametrize(("width", "states"), [(1, 7), (2, 12), (6, 2**6)])
def test_states_near_an_order(width: int, states: int) -> None:
    lattice = ideals(near(make_graph(6, [], [], []), range(6), width))
    assert lattice is not None
    assert lattice.states == states


@given(graphs(), st.data())
def test_an_order_toward_ranks(graph: Graph, data: st.DataObject) -> None:
    rank = data.draw(st.permutations(range(graph.layers)))
    order = order_toward(graph, rank)
    assert is_order(graph, order)
    before = graph.rows("before")
    for k, layer in enumerate(order):
        ready = [other for other in order[k:] if set(before[other]) <= set(order[:k])]
        assert layer == min(ready, key=rank.__getitem__)
