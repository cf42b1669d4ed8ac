"""Plans of branching graphs with one device a stage: equal to trying all, the laws, and what others published."""

from __future__ import annotations

import importlib
import itertools
import json
from dataclasses import replace
from functools import cache
from math import inf
from pathlib import Path
from typing import Any

import numpy
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pdcompiler import branching
from pdcompiler.branching import plan_straight
from pdcompiler.core.errors import CompileError
from pdcompiler.core.straight import StraightProblem, judge_straight
from pdcompiler.passes.partition.minimax import GivenUp, fastest_slowest

ROOT = Path(__file__).parents[1]
DATA = ROOT.parent / "shared" / "data"
QUANTITIES = st.integers(0, 12).map(float)


@st.composite
def problems(draw: st.DrawFn, most_layers: int = 6, sized: bool = True) -> StraightProblem:
    """Any values between any layers; half of the problems with a spare device, and with sizes that often bind."""
    layers = draw(st.integers(1, most_layers))
    pairs = list(itertools.combinations(range(layers), 2))
    edges = tuple(pair for pair in pairs if draw(st.integers(0, 2)) == 0)
    sets = st.lists(st.integers(0, layers - 1), min_size=2, max_size=4, unique=True).map(tuple)
    values = draw(st.lists(st.tuples(sets, QUANTITIES), max_size=6)) if layers > 1 else []

    def column() -> Any:
        return numpy.array(draw(st.lists(QUANTITIES, min_size=layers, max_size=layers)))

    problem = StraightProblem(edges, tuple(values), column(), draw(st.integers(1, 3)))
    if draw(st.booleans()):
        problem = replace(problem, spare=column())
    if sized and draw(st.booleans()):
        problem = replace(problem, sizes=column(), most_size=draw(st.sampled_from([10.0, 20.0, 30.0])))
    if layers > 1 and draw(st.integers(0, 3)) == 0:
        problem = replace(problem, together=(draw(sets),))
    return problem


def best_by_force(problem: StraightProblem) -> float:
    """Every assignment of layers to stages, every stage on the spare device once; infinite where none is allowed."""

    @cache
    def seconds(own: frozenset[int], spare: bool) -> float:
        layers = sorted(own)
        if spare:
            assert problem.spare is not None
            return float(problem.spare[layers].sum())
        if problem.sizes is not None and problem.sizes[layers].sum() > problem.most_size:
            return inf
        crossing = sum(cost for members, cost in problem.values if own & set(members) and set(members) - own)
        return float(problem.seconds[layers].sum()) + crossing

    best = inf
    has_spare = problem.spare is not None
    for stages in range(1, min(problem.devices + has_spare, problem.layers) + 1):
        choices = [*([-1] if stages <= problem.devices else []), *(range(stages) if has_spare else [])]
        for where in itertools.product(range(stages), repeat=problem.layers):
            if any(where[a] > where[b] for a, b in problem.edges):
                continue
            if any(len({where[layer] for layer in group}) > 1 for group in problem.together):
                continue
            sets = [frozenset(layer for layer in range(problem.layers) if where[layer] == s) for s in range(stages)]
            best = min(best, *(max(seconds(own, s == spare) for s, own in enumerate(sets)) for spare in choices))
    return best


def seconds_of(problem: StraightProblem, **options: Any) -> float:
    """Infinite where no plan fits."""
    try:
        return plan_straight(problem, **options).seconds
    except CompileError:
        return inf


@given(problems())
@settings(max_examples=50)
def test_equal_to_trying_all(problem: StraightProblem) -> None:
    expected = best_by_force(problem)
    if expected == inf:
        with pytest.raises(CompileError, match="no plan was found that fits"):
            plan_straight(problem)
        return
    found = plan_straight(problem)
    assert found.seconds == pytest.approx(expected)
    assert found.proven
    assert judge_straight(problem, found.stages, found.spare) == pytest.approx(found.seconds)


@given(problems(sized=False))
def test_with_too_many_states_the_bound_holds(problem: StraightProblem) -> None:
    found = plan_straight(problem, most_states=1, orders=2)
    best = best_by_force(problem)
    assert found.bound <= best * (1 + 1e-9) and found.seconds >= best * (1 - 1e-9)
    assert found.proven == (found.seconds <= found.bound * (1 + 2e-9))
    assert judge_straight(problem, found.stages, found.spare) == pytest.approx(found.seconds)


@given(problems(), st.randoms(use_true_random=False))
def test_names_of_layers_do_not_matter(problem: StraightProblem, random: Any) -> None:
    new = list(range(problem.layers))
    random.shuffle(new)
    old = numpy.argsort(new)
    renamed = replace(
        problem, edges=tuple((new[a], new[b]) for a, b in problem.edges),
        values=tuple((tuple(new[layer] for layer in members), cost) for members, cost in problem.values),
        together=tuple(tuple(new[layer] for layer in group) for group in problem.together), seconds=problem.seconds[old],
        spare=None if problem.spare is None else problem.spare[old], sizes=None if problem.sizes is None else problem.sizes[old],
    )  # fmt: skip
    assert seconds_of(renamed) == pytest.approx(seconds_of(problem))


@given(problems(), st.sampled_from([1e-6, 0.3, 1e6]))
def test_all_times_longer_by_a_factor(problem: StraightProblem, factor: float) -> None:
    scaled = replace(
        problem, values=tuple((members, cost * factor) for members, cost in problem.values), seconds=problem.seconds * factor,
        spare=None if problem.spare is None else problem.spare * factor,
    )  # fmt: skip
    assert seconds_of(scaled) == pytest.approx(factor * seconds_of(problem))


@given(problems(most_layers=7))
def test_more_never_hurts(problem: StraightProblem) -> None:
    own = seconds_of(problem) * (1 + 1e-9)
    assert seconds_of(replace(problem, devices=problem.devices + 1)) <= own
    assert seconds_of(replace(problem, most_size=problem.most_size * 1.5)) <= own
    assert seconds_of(replace(problem, values=tuple((members, cost / 2) for members, cost in problem.values))) <= own


@given(problems(sized=False))
def test_one_device_runs_everything(problem: StraightProblem) -> None:
    assume(problem.spare is None)
    assert plan_straight(replace(problem, devices=1)).seconds == pytest.approx(problem.seconds.sum())


def branches(count: int, length: int) -> StraightProblem:
    """Between one layer and another, `count` branches of `length` layers, none as slow as another."""
    layers = count * length + 2
    edges = []
    for branch in range(count):
        row = [0, *range(1 + branch * length, 1 + (branch + 1) * length), layers - 1]
        edges += list(itertools.pairwise(row))
    seconds = numpy.array([1.0 + (7 * k % 11) / 10 for k in range(layers)])
    return StraightProblem(tuple(edges), tuple(((a, b), 0.1) for a, b in edges), seconds, 8)


def test_a_graph_with_too_many_states_has_a_plan_and_a_gap() -> None:
    problem = branches(count=20, length=8)  # 9 ** 20 states
    found = plan_straight(problem, orders=8)
    assert judge_straight(problem, found.stages) == pytest.approx(found.seconds)
    assert found.bound >= problem.seconds.sum() / 8 * (1 - 1e-9)
    assert found.gap < 0.1 and not found.proven
    assert found.how == "8 orders and all near the best, of a graph with too many states"
    assert plan_straight(problem, orders=8) == found


def test_a_search_that_takes_too_long_ends_with_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    def give_up(*arguments: Any, **options: Any) -> Any:
        if arguments[1].states > problem.layers + 1:  # more than a chain has
            raise GivenUp
        return fastest_slowest(*arguments, **options)

    problem = branches(count=3, length=4)
    best = plan_straight(problem)
    monkeypatch.setattr(branching, "fastest_slowest", give_up)
    found = plan_straight(problem)
    assert best.proven and not found.proven
    assert found.bound <= best.seconds <= found.seconds


def test_sizes_that_nothing_fits_are_said() -> None:
    problem = StraightProblem((), (), numpy.ones(3), 2, sizes=numpy.array([3.0, 3.0, 1.0]), most_size=3.0)
    with pytest.raises(CompileError, match="2 devices of 3 bytes for 7 bytes, 3 of them in one layer"):
        plan_straight(problem)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seconds": numpy.array([1.0, -1.0])}, "seconds must be 2 numbers of at least 0"),
        ({"spare": numpy.ones(3)}, "spare must be 2 numbers of at least 0"),
        ({"devices": 0}, "2 layers on 0 devices"),
    ],
)
def test_bad_numbers(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CompileError, match=message):
        plan_straight(replace(StraightProblem(((0, 1),), (), numpy.ones(2), 1), **change))


@pytest.mark.parametrize(
    ("stages", "spare", "message"),
    [
        ([(0,), (1,)], -1, "do not hold each of 3 layers once"),
        ([(0,), (1,), (2,)], -1, "3 stages, but 2 devices"),
        ([(1,), (0, 2)], -1, "layer 1 on stage 0 reads layer 0 of the later stage 1"),
        ([(0, 1), (2,)], -1, r"layers \[1, 2\] must stand together"),
        ([(0,), (1, 2)], -1, "stage 1 has 8 bytes, a device 7"),
    ],
)
def test_stages_that_are_none(stages: list[tuple[int, ...]], spare: int, message: str) -> None:
    sizes = numpy.array([1.0, 4.0, 4.0])
    problem = StraightProblem(((0, 1),), (), numpy.ones(3), 2, sizes=sizes, most_size=7.0, together=((1, 2),))
    with pytest.raises(CompileError, match=message):
        judge_straight(problem, stages, spare)


def published() -> dict[str, Any]:
    path = DATA / "known_answers.json"
    return json.loads(path.read_text())["dnn-partitioning"] if path.exists() else {}


@pytest.mark.skipif(not DATA.exists(), reason=f"there is no {DATA}")
@pytest.mark.parametrize("with_spare", [False, True], ids=["accelerators", "and a CPU"])
@pytest.mark.parametrize("name", published())
def test_the_published_optimum_is_found_and_proven(name: str, with_spare: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    problem = importlib.import_module("quality_dnn_partitioning").read(DATA / "dnn-partitioning" / f"{name}.json")
    found = plan_straight(problem if with_spare else replace(problem, spare=None))
    answer = "optimum_contiguous_as_shipped" if with_spare else "optimum_no_cpu"
    assert found.seconds == pytest.approx(published()[name][answer], rel=1e-6)
    assert found.proven
