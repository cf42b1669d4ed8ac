"""All downsets, each once, and what may be done next from each."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcompiler.core.lattice import Graph, Lattice, chain_lattice, make_graph
from pdcompiler.passes.partition.ideals import ideals


@st.composite
def graphs(draw: st.DrawFn, most_layers: int = 7) -> tuple[int, list[tuple[int, int]]]:
    """How many layers, and the edges between them."""
    layers = draw(st.integers(1, most_layers))
    return layers, [pair for pair in combinations(range(layers), 2) if draw(st.booleans())]


def graph(layers: int, edges: list[tuple[int, int]]) -> Graph:
    return make_graph(layers, edges, [], [])


def sets(lattice: Lattice) -> list[tuple[int, ...]]:
    return [lattice.between(0, state) for state in range(lattice.states)]


def test_the_drawing() -> None:
    a, b, c, d = range(4)
    lattice = ideals(graph(4, [(a, b), (a, c), (b, d), (c, d)]))
    assert lattice is not None
    assert sets(lattice) == [(), (a,), (a, b), (a, c), (a, b, c), (a, b, c, d)]
    assert lattice.next_start.tolist() == [0, 1, 3, 4, 5, 6, 6]
    assert lattice.next_layer.tolist() == [a, b, c, c, b, d]
    assert lattice.next_state.tolist() == [1, 2, 3, 4, 4, 5]


@given(graphs())
def test_equal_to_trying_all_subsets(drawn: tuple[int, list[tuple[int, int]]]) -> None:
    layers, edges = drawn
    lattice = ideals(graph(layers, edges))
    assert lattice is not None
    found = sets(lattice)
    subsets = [set(s) for size in range(layers + 1) for s in combinations(range(layers), size)]
    assert sorted(map(sorted, found)) == sorted(sorted(s) for s in subsets if all(a in s for a, b in edges if b in s))
    assert [len(s) for s in found] == sorted(len(s) for s in found)
    for state, own in enumerate(found):
        here = slice(lattice.next_start[state], lattice.next_start[state + 1])
        steps = [(layer, tuple(sorted({*own, layer}))) for layer in range(layers) if layer not in own]
        expected = [(layer, found.index(after)) for layer, after in steps if after in found]
        assert list(zip(lattice.next_layer[here], lattice.next_state[here], strict=True)) == expected


@pytest.mark.parametrize("layers", [1, 63, 64, 65, 200])
def test_a_chain_of_any_length(layers: int) -> None:
    lattice, chain = ideals(graph(layers, [(k, k + 1) for k in range(layers - 1)])), chain_lattice(layers)
    assert lattice is not None
    assert all((ours == theirs).all() for ours, theirs in zip(lattice, chain, strict=True))
    assert lattice.between(layers // 2, layers) == tuple(range(layers // 2, layers))


def test_none_where_there_are_too_many() -> None:
    wide = graph(12, [])
    assert ideals(wide, most=2**12 - 1) is None
    exactly = ideals(wide, most=2**12)
    assert exactly is not None and exactly.states == 2**12


def test_branches_longer_than_a_word() -> None:
    rows = 50
    ladder = graph(3 * rows, [(k, k + 3) for k in range(3 * rows - 3)])
    lattice = ideals(ladder)
    assert lattice is not None and lattice.states == (rows + 1) ** 3
