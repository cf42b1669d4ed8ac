"""The table of candidate stages of a branching workload, from the definitions."""

from __future__ import annotations

import numpy
import pytest
from hypothesis import given

from pdcompiler.core.lattice import graph_of
from pdcompiler.core.spans import Spans
from pdcompiler.core.workload import Value, Workload
from pdcompiler.passes.partition.fold import fold_workload
from pdcompiler.passes.partition.ideals import ideals
from pdcompiler.passes.partition.lattice_spans import lattice_spans
from pdcompiler.passes.partition.spans import chain_spans
from pdcompiler.workload_strategies import workloads


def spans_of(workload: Workload) -> Spans:
    lattice = ideals(graph_of(workload))
    assert lattice is not None
    spans = lattice_spans(workload, lattice)
    assert spans is not None
    return spans


def row(spans: Spans, pair: int) -> list[float]:
    columns = (spans.parameters, spans.saved, spans.working, spans.entering, spans.leaving, spans.messages)
    kinds = (*spans.forward, *spans.backward)
    return [float(column[pair]) for column in (*kinds, *columns)]


def from_definitions(workload: Workload, layers: tuple[int, ...]) -> list[float]:
    inside, own = set(layers), list(layers)
    entering = [v.bytes for v in workload.values if v.producer not in inside and inside & set(v.consumers)]
    leaving = [v.bytes for v in workload.values if v.producer in inside and set(v.consumers) - inside]
    times = [float(each[own].sum()) for each in (*workload.forward, *workload.backward)]
    sums = [float(workload.parameters[own].sum()), float(workload.saved[own].sum()), float(workload.working[own].max())]
    return [*times, *sums, sum(entering), sum(leaving), len(entering) + len(leaving)]


@given(workloads(kinds=2))
def test_each_stage_is_what_the_definitions_say(workload: Workload) -> None:
    spans = spans_of(workload)
    for state in range(spans.states - 1):
        for pair in range(spans.start[state], spans.start[state + 1]):
            assert row(spans, pair) == pytest.approx(from_definitions(workload, spans.layers(pair)))
            assert spans.end[pair] > state


@given(workloads(most_layers=6))
def test_every_stage_is_there_once(workload: Workload) -> None:
    spans = spans_of(workload)
    edges = workload.edges()
    subsets = [{i for i in range(workload.layers) if n >> i & 1} for n in range(2**workload.layers)]
    downsets = [s for s in subsets if all(a in s for a, b in edges if b in s)]
    expected = sorted(tuple(sorted(big - small)) for small in downsets for big in downsets if small < big)
    assert sorted(spans.layers(pair) for pair in range(len(spans.end))) == expected
    assert spans.states == len(downsets)


@given(workloads(chain=True))
def test_a_chain_has_the_table_of_a_chain(workload: Workload) -> None:
    joined = [*workload.values, *(Value(i, (i + 1,), 0.0) for i in range(workload.layers - 1))]
    workload = Workload(
        workload.names, workload.forward, workload.backward, workload.parameters, workload.saved, workload.working, tuple(joined)
    )
    chain, lattice = chain_spans(workload), spans_of(workload)
    assert chain.start.tolist() == lattice.start.tolist()
    assert chain.end.tolist() == lattice.end.tolist()
    for pair in range(len(chain.end)):
        assert row(chain, pair) == pytest.approx(row(lattice, pair))


def test_layers_of_a_folded_workload_are_those_of_the_whole() -> None:
    free, one = numpy.zeros((1, 3)), numpy.array([[1.0, 0.0, 1.0]])
    whole = Workload(("a", "view", "b"), one, free, *([numpy.zeros(3)] * 3), (Value(0, (1,), 5.0), Value(1, (2,), 5.0)))
    folded, parts = fold_workload(whole)
    lattice = ideals(graph_of(folded))
    assert lattice is not None
    spans = lattice_spans(folded, lattice, parts)
    assert spans is not None
    assert parts == ((0, 1), (2,))
    assert [spans.layers(pair) for pair in range(3)] == [(0, 1), (0, 1, 2), (2,)]


def test_too_many_pairs_give_no_table() -> None:
    nothing = numpy.zeros(8)
    workload = Workload(tuple("abcdefgh"), nothing[None], nothing[None], nothing, nothing, nothing, ())
    lattice = ideals(graph_of(workload))
    assert lattice is not None and lattice.states == 2**8
    assert lattice_spans(workload, lattice, most_pairs=3**8 - 2**8 - 1) is None
    assert lattice_spans(workload, lattice, most_pairs=3**8 - 2**8) is not None
