"""What becomes one layer, and that the best plan stays the same."""

from __future__ import annotations

from dataclasses import replace

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcompiler.core.machine import Machine
from pdcompiler.core.plan import Training
from pdcompiler.core.workload import Value, Workload
from pdcompiler.passes.partition.evaluate import evaluate
from pdcompiler.passes.partition.fold import fold, fold_workload, inseparable
from pdcompiler.workload_strategies import machines, trainings, workloads
from tests.planning import best_by_force


def test_a_free_layer_goes_with_its_only_neighbour() -> None:
    free = numpy.array([0.0, 1.0, 0.0, 1.0])
    edges = [(0, 1), (1, 2), (1, 3)]
    weight_and_view = [((0, 1), 9.0), ((1, 2, 3), 9.0)]
    assert fold(4, edges, weight_and_view, weights=numpy.where(free > 0, numpy.inf, 0)) == ((0, 1, 2), (3,))


def test_a_free_layer_between_two_goes_where_less_crosses() -> None:
    edges, free = [(0, 1), (1, 2)], numpy.array([numpy.inf, 0.0, numpy.inf])
    assert fold(3, edges, [((0, 1), 8.0), ((1, 2), 2.0)], weights=free) == ((0, 1), (2,))
    assert fold(3, edges, [((0, 1), 2.0), ((1, 2), 8.0)], weights=free) == ((0,), (1, 2))


def test_a_layer_that_costs_less_than_its_border_is_absorbed() -> None:
    edges, values = [(0, 1), (1, 2)], [((0, 1), 8.0), ((1, 2), 2.0)]
    assert fold(3, edges, values, weights=numpy.array([9.0, 6.0, 9.0])) == ((0, 1), (2,))
    assert fold(3, edges, values, weights=numpy.array([9.0, 6.1, 9.0])) == ((0,), (1,), (2,))


def test_a_layer_with_neighbours_on_both_sides_stays() -> None:
    edges = [(0, 2), (1, 2), (2, 3), (2, 4)]
    values = [((0, 2), 1.0), ((1, 2), 1.0), ((2, 3, 4), 0.0)]
    weights = numpy.array([numpy.inf, numpy.inf, 0.0, numpy.inf, numpy.inf])
    assert len(fold(5, edges, values, weights=weights)) == 5


def test_a_group_takes_what_stands_between() -> None:
    edges = [(0, 1), (1, 2), (2, 3), (0, 4), (4, 5)]
    assert fold(6, edges, [], together=[(0, 2), (4, 5)]) == ((0, 1, 2), (3,), (4, 5))


@pytest.mark.parametrize(
    ("limit", "spare", "pairs"), [(10.0, False, [(0, 1)]), (10.1, False, []), (7.0, True, [(0, 1)]), (7.1, True, [])]
)
def test_layers_that_no_plan_below_a_limit_parts(limit: float, spare: bool, pairs: list[tuple[int, int]]) -> None:
    seconds, values = numpy.array([1.0, 4.0, 0.0]), [((0, 1), 2.0), ((0, 1, 2), 4.0)]
    found = inseparable(((0,), (1,), (2,)), values, seconds, limit, spare)
    assert found == pairs


def test_a_part_is_inseparable_by_what_all_its_layers_take() -> None:
    seconds, values = numpy.array([3.0, 3.0, 1.0]), [((1, 2), 4.0)]
    assert inseparable(((0,), (1,), (2,)), values, seconds, 10.0) == []
    assert inseparable(((0, 1), (2,)), values, seconds, 10.0) == [(0, 2)]


def test_the_folded_workload_has_the_sums() -> None:
    costs = [numpy.array([float(10**k) for k in range(4)]) * scale for scale in (1, 2, 3, 4)]
    values = (Value(0, (1, 2), 5.0), Value(1, (3,), 6.0), Value(2, (3,), 7.0))
    whole = Workload(tuple("abcd"), costs[0][None], costs[0][None], *costs[1:], values, ((0, 2),), rows=3)
    folded, parts = fold_workload(whole)
    assert parts == ((0, 2), (1,), (3,))
    assert folded.names == ("a", "b", "d")
    assert folded.forward.tolist() == [[101.0, 10.0, 1000.0]]
    assert folded.parameters.tolist() == [202.0, 20.0, 2000.0]
    assert folded.working.tolist() == [400.0, 40.0, 4000.0]
    assert folded.values == (Value(0, (1,), 5.0), Value(1, (2,), 6.0), Value(0, (2,), 7.0))
    assert (folded.together, folded.rows) == ((), 3)


@st.composite
def with_free_layers(draw: st.DrawFn) -> Workload:
    """About half of the layers cost nothing, and two may have to stand together."""
    drawn = draw(workloads(most_layers=6))
    keep = numpy.array([float(draw(st.booleans())) for _ in range(drawn.layers)])
    names = ("forward", "backward", "parameters", "saved", "working")
    free = replace(drawn, **{name: getattr(drawn, name) * keep for name in names})
    group = tuple(sorted(draw(st.sets(st.integers(0, drawn.layers - 1), min_size=2, max_size=2)))) if drawn.layers > 1 else ()
    return replace(free, together=(group,) if group and draw(st.booleans()) else ())


@given(with_free_layers(), machines(most_devices=3), trainings())
def test_the_best_plan_is_as_good(workload: Workload, machine: Machine, training: Training) -> None:
    folded, parts = fold_workload(workload)
    whole, _ = best_by_force(workload, machine, training)
    seconds, plan = best_by_force(folded, machine, training)
    assert seconds == pytest.approx(whole)
    if plan is not None:
        stages = [replace(s, layers=tuple(sorted(i for part in s.layers for i in parts[part]))) for s in plan.stages]
        unfolded = evaluate(replace(plan, stages=tuple(stages)), workload, machine, training)
        assert unfolded.seconds == pytest.approx(seconds)
        assert unfolded.fits
