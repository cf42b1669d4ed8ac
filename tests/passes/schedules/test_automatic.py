"""`auto` beside the named schedules, beside every order there is, and beside the bounds: of random costs, messages and room."""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Iterator
from dataclasses import replace

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdcompiler import CompileError, Schedule
from pdcompiler.core.order_search import finish, has_room
from pdcompiler.core.order_table import Table, least_seconds, order_of, schedule_of, table_of
from pdcompiler.core.schedule import Action
from pdcompiler.core.schedule_problem import ScheduleProblem
from pdcompiler.passes.schedules.automatic import automatic
from pdcompiler.passes.schedules.named import one_f_one_b, replicated
from pdcompiler.testing import random_problem, schedule_problems

CLOSE = 1 + 1e-9


def seconds_of(order: numpy.ndarray, table: Table) -> float:
    ends, place = numpy.empty(len(table.rank)), numpy.empty(len(table.room), dtype=numpy.int64)
    return finish(table, order, ends, place)


@settings(max_examples=10)
@given(schedule_problems())
def test_every_rank_has_room_microbatches_keep_their_order_and_no_named_one_is_faster(
    drawn: tuple[ScheduleProblem, list[Schedule]],
) -> None:
    problem, named = drawn
    found = automatic(problem, named).check()
    assert problem.fits(found)
    for actions in found.ranks:
        lanes = {(action.phase, action.stage) for action in actions}
        for lane in lanes:
            own = [action for action in actions if (action.phase, action.stage) == lane]
            assert own == sorted(own)
    taken = problem.timing(found).finish
    assert least_seconds(table_of(problem)) <= taken * CLOSE
    assert all(taken <= problem.timing(schedule).finish * (1 + 1e-6) for schedule in named)


@settings(max_examples=50)
@given(schedule_problems(), st.booleans())
def test_the_native_times_and_room_are_those_of_the_one_timing_model(
    drawn: tuple[ScheduleProblem, list[Schedule]], overlap: bool
) -> None:
    problem, named = drawn[0], drawn[1]
    problem = replace(problem, overlap=overlap)
    table = table_of(problem)
    for schedule in named:
        order = order_of(schedule, table, problem)
        again = schedule_of(order, table, problem, "again")
        assert seconds_of(order, table) == pytest.approx(problem.timing(again).finish, rel=1e-12)
        assert problem.timing(again).finish <= problem.timing(schedule).finish * CLOSE
        assert all(has_room(table, order, rank) for rank in range(problem.ranks)) == problem.fits(again)


def compared(seeds: range) -> Iterator[tuple[float, float]]:
    """By how much the best named schedule takes longer than `auto`, which does not know it, and than any schedule can take."""
    for seed in seeds:
        problem, named = random_problem(seed, uneven=seed % 5 > 0)
        best, found = min(problem.timing(schedule).finish for schedule in named), automatic(problem)
        assert problem.fits(found.check())
        yield best / problem.timing(found).finish - 1, best / least_seconds(table_of(problem)) - 1


@pytest.mark.parametrize("seeds", [range(10), pytest.param(range(500), marks=pytest.mark.full)])
def test_without_knowing_them_it_is_as_fast_as_the_best_named_one(seeds: range) -> None:
    """On 95 of 100 tables; and on uneven ones, where 5 % are to be had by the lower bound, it has them in the median (decision
    0022 says why there)."""
    gains = list(compared(seeds))
    assert sum(gain < -1e-9 for gain, _ in gains) <= 0.05 * len(gains)
    uneven = [gain for seed, (gain, possible) in zip(seeds, gains, strict=True) if seed % 5 > 0 and possible >= 0.05]
    assert statistics.median(uneven) >= 0.05


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 3), (3, 2)])
def test_it_is_within_2_percent_of_the_best_of_all_orders(ranks: int, microbatches: int) -> None:
    orders = [list(every_order(stage, microbatches)) for stage in range(ranks)]
    assert [len(own) for own in orders] == [{3: 42, 2: 5}[microbatches]] * ranks
    tried = 0
    for seed in range(12):
        problem, _ = random_problem(seed, sizes=(ranks, microbatches))
        if problem.stages == ranks:
            tried += 1
            assert problem.timing(automatic(problem)).finish <= 1.02 * fastest(problem, orders)
    assert tried >= 4


def every_order(stage: int, microbatches: int) -> Iterator[tuple[Action, ...]]:
    """Of a rank with one stage, each phase in the order of the microbatches."""
    yield from _continued((), {"F": 0, "B": 0, "W": 0}, stage, microbatches)


def _continued(done: tuple[Action, ...], counts: dict[str, int], stage: int, most: int) -> Iterator[tuple[Action, ...]]:
    if len(done) == 3 * most:
        yield done
    for phase, before in (("F", most), ("B", counts["F"]), ("W", counts["B"])):
        if counts[phase] < before:
            action = Action(phase, stage, counts[phase])  # type: ignore[arg-type]
            yield from _continued((*done, action), counts | {phase: counts[phase] + 1}, stage, most)


def fastest(problem: ScheduleProblem, orders: list[list[tuple[Action, ...]]]) -> float:
    table, least = table_of(problem), float("inf")
    for ranks in itertools.product(*orders):
        order = order_of(Schedule(ranks), table, problem)
        if all(has_room(table, order, rank) for rank in range(problem.ranks)):
            least = min(least, seconds_of(order, table))
    return least


def test_the_same_problem_gives_the_same_schedule_and_no_random_state_is_touched() -> None:
    problem, named = random_problem(3)
    found = automatic(problem, named)
    numpy.random.seed(7)
    random.seed(7)
    before = numpy.random.get_state()[1].tolist(), random.getstate()  # type: ignore[index, union-attr, call-overload]
    assert automatic(problem, named) == found
    assert (numpy.random.get_state()[1].tolist(), random.getstate()) == before  # type: ignore[index, union-attr, call-overload]


def test_of_equally_fast_ones_it_takes_the_one_with_the_least_memory() -> None:
    """One rank: every order takes equally long."""
    problem = ScheduleProblem(((0,),), 6, (1.0,), (2.0,), (1.0,), saved=(5.0,), kept=(2.0,))
    assert problem.peaks(automatic(problem)) == (5.0,)


def test_replicas_share_the_microbatches() -> None:
    like = replicated("1f1b", (2, 1), 6)
    problem = ScheduleProblem(
        tuple(like.replicas.values()), 6, (2.0, 1.0), (4.0, 2.0), (2.0, 1.0), (0.1,), (0.1,), (1.0, 0.0), saved=(1.0, 1.0)
    )  # fmt: skip
    found = automatic(problem, [like]).check()
    assert found.replicas == like.replicas
    assert problem.timing(found).finish <= problem.timing(like).finish


def test_room_for_less_than_one_microbatch_is_refused_with_the_least() -> None:
    with pytest.raises(CompileError, match=r"rank 1 has room for 6 bytes .* needs 7 there under any schedule"):
        ScheduleProblem(((0,), (1,)), 2, (1, 1), (2, 2), (1, 1), saved=(5, 7), kept=(1, 1), room=(6, 6))


def test_with_the_least_room_microbatches_go_one_by_one() -> None:
    problem = ScheduleProblem(((0,), (1,)), 3, (1, 1), (2, 2), (1, 1), saved=(5, 7), kept=(1, 1), room=(5, 7))
    assert automatic(problem) == Schedule.parse("F0 B0 W0 F1 B1 W1 F2 B2 W2\nF0 B0 W0 F1 B1 W1 F2 B2 W2")


def test_a_slow_stage_never_waits_once_it_has_begun() -> None:
    """Where 1f1b's second rank, three times as slow, waits for its last gradient's way back only."""
    problem = ScheduleProblem(((0,), (1,)), 5, (1, 3), (2, 6), (1, 3), saved=(1, 1), kept=(0, 0))
    found, named = (problem.timing(schedule) for schedule in (automatic(problem), one_f_one_b(2, 5)))
    assert found.finish == 1 + 5 * 9
    assert named.finish == 1 + 5 * 9 + 2
