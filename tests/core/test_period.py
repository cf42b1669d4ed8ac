"""Time per tick: the table of ASYNCHRONOUS, a plain walk over the same order, laws over random orders and costs."""

import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcompiler import CompileError
from pdcompiler.core import period as module
from pdcompiler.core.depths import least_depths
from pdcompiler.core.period import Seconds, ideal, period
from pdcompiler.core.ticks import Ticks, Work, pipedream_depths

eighths = st.integers(0, 16).map(lambda n: n / 8)


def proportional(replicas: tuple[int, ...]) -> Seconds:
    """F = 1, B = 2 per minibatch and replica: an ideal period of 3."""
    return Seconds(tuple(1.0 * count for count in replicas), tuple(2.0 * count for count in replicas))


TABLE = [
    ((1, 1, 1, 1), (3, 2, 1, 0), 3.0, None),
    ((2, 1), (2, 0), 3.0, None),
    ((3, 1), (3, 0), 3.0, None),
    ((15, 1), (15, 0), 3.0, None),
    ((2, 2, 2), (4, 2, 0), 3.0, None),
    ((1, 2), (2, 0), 3.75, (3, 0)),
    ((1, 3), (3, 0), 4.0, (5, 0)),
    ((2, 3), (4, 0), 4.0, (6, 0)),
    ((2, 3, 1), (4, 3, 0), 7.5, (10, 3, 0)),
    ((3, 2, 1), (3, 2, 0), 6.0, (9, 2, 0)),
    ((1, 2, 3), (5, 4, 0), 4.5, (9, 6, 0)),
]


@pytest.mark.parametrize(("replicas", "depths", "expected", "deeper"), TABLE)
def test_depth_is_a_choice(
    replicas: tuple[int, ...], depths: tuple[int, ...], expected: float, deeper: tuple[int, ...] | None
) -> None:
    ticks = Ticks(replicas, pipedream_depths(replicas))
    assert ticks.depths == depths and period(ticks, proportional(replicas)) == pytest.approx(expected, rel=1e-12)
    least = least_depths(ticks, proportional(replicas))
    assert least == (deeper or depths)
    assert period(Ticks(replicas, least), proportional(replicas)) == pytest.approx(3.0, rel=1e-12)


@st.composite
def orders(draw: st.DrawFn, batches: bool = True) -> Ticks:
    """PipeDream's depths or deeper ones, and for some a batch."""
    replicas = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    depths: list[int] = [0]
    for count in reversed(replicas[:-1]):
        depths.insert(0, (depths[0] // count + draw(st.integers(1, 3))) * count)
    batch = draw(st.none() | st.integers(max(1, depths[0]), depths[0] + 3)) if batches else None
    return Ticks(replicas, tuple(depths), batch)


@st.composite
def costs(draw: st.DrawFn, stages: int) -> Seconds:
    """In eighths, messages and sums of gradients perhaps free."""

    def several(count: int) -> tuple[float, ...]:
        return tuple(draw(st.lists(eighths, min_size=count, max_size=count)))

    work = several(stages), tuple(value + 0.125 for value in several(stages))
    return Seconds(*work, several(stages - 1), several(stages - 1), several(stages), draw(st.booleans()))


def walked(ticks: Ticks, seconds: Seconds, minibatches: int) -> float:
    """When the last stage is done with its last minibatch, if more follow: one entry per value, nothing reused."""
    free: dict[tuple[int, int], float] = {}
    made: dict[tuple[str, int, int], float] = {}
    messages = {"F": seconds.forward_transfer, "B": seconds.backward_transfer}
    for tick in range(minibatches + ticks.depths[0]):
        for work in ticks.tick(tick):
            ranks = [(work.stage, replica) for replica in range(ticks.replicas[work.stage])]
            if not isinstance(work, Work):
                start = max(*(free.get(rank, 0.0) for rank in ranks), made.get(("U", work.stage, work.number - 1), 0.0))
                made["U", work.stage, work.number] = start + seconds.reduce[work.stage]
                if not seconds.overlap:
                    free.update(dict.fromkeys(ranks, start + seconds.reduce[work.stage]))
                continue
            phase, stage, t, rank = work.phase, work.stage, work.minibatch, (work.stage, work.replica)
            start = free.get(rank, 0.0)
            if phase == "F" and (version := ticks.weights(stage, t)):
                start = max(start, made["U", stage, version])
            other = stage - 1 if phase == "F" else stage + 1
            if 0 <= other < ticks.stages:
                message, there = messages[phase][min(stage, other)], made[phase, other, t]
                start = max(start, there + message) if seconds.overlap else max(start, there) + message
            made[phase, stage, t] = free[rank] = start + (seconds.forward if phase == "F" else seconds.backward)[stage]
            to = stage + 1 if phase == "F" else stage - 1
            if not seconds.overlap and 0 <= to < ticks.stages:
                free[rank] += messages[phase][min(stage, to)]
    return made["B", 0, minibatches - 1]


@given(st.data())
def test_the_period_is_that_of_a_long_walk(data: st.DataObject) -> None:
    ticks = data.draw(orders())
    seconds = data.draw(costs(ticks.stages))
    many = 40 * ticks.repeat * -(-120 // (40 * ticks.repeat))
    long = (walked(ticks, seconds, 2 * many) - walked(ticks, seconds, many)) / many
    assert period(ticks, seconds) == pytest.approx(max(long, ideal(ticks, seconds)), rel=1e-9)


@given(st.data())
def test_the_period_is_no_less_than_the_work_shared_out(data: st.DataObject) -> None:
    ticks = data.draw(orders(batches=False))
    seconds = data.draw(costs(ticks.stages))
    work = zip(seconds.forward, seconds.backward, seconds.reduce, ticks.replicas, strict=True)
    assert period(ticks, seconds) >= max((f + b + reduce) / count for f, b, reduce, count in work) * (1 - 1e-12)


@given(st.data())
def test_deeper_at_the_first_stages_is_never_slower(data: st.DataObject) -> None:
    """By a common multiple of the replicas of the stages before any border."""
    ticks = data.draw(orders(batches=False))
    seconds = data.draw(costs(ticks.stages))
    for border in range(1, ticks.stages):
        more = math.lcm(*ticks.replicas[:border])
        deeper = tuple(depth + (more if stage < border else 0) for stage, depth in enumerate(ticks.depths))
        assert period(Ticks(ticks.replicas, deeper), seconds) <= period(ticks, seconds) * (1 + 1e-6)


def test_deeper_at_a_later_stage_alone_can_be_slower() -> None:
    """It leaves fewer minibatches on their way between the first stage and this one."""
    seconds = proportional((3, 1, 1))
    assert period(Ticks((3, 1, 1), (3, 1, 0)), seconds) == pytest.approx(4.0)
    assert period(Ticks((3, 1, 1), (3, 2, 0)), seconds) == pytest.approx(5.0)


@given(st.data())
def test_scaling(data: st.DataObject) -> None:
    ticks = data.draw(orders())
    seconds = data.draw(costs(ticks.stages))
    names = ("forward", "backward", "forward_transfer", "backward_transfer", "reduce")
    scaled = Seconds(*(tuple(4 * value for value in getattr(seconds, name)) for name in names), seconds.overlap)
    assert period(ticks, scaled) == pytest.approx(4 * period(ticks, seconds), rel=1e-6)


@given(st.data())
def test_least_depths_are_legal_and_no_slower(data: st.DataObject) -> None:
    replicas = data.draw(orders()).replicas
    ticks = Ticks(replicas, pipedream_depths(replicas))
    seconds = data.draw(costs(ticks.stages))
    most = tuple(depth + data.draw(st.integers(-1, 6)) for depth in ticks.depths)
    least = Ticks(replicas, least_depths(ticks, seconds, most))
    fits = all(depth <= limit for depth, limit in zip(least.depths, most, strict=True))
    assert fits or least.depths == ticks.depths
    assert period(least, seconds) <= period(ticks, seconds) * (1 + 2e-6)
    if seconds.overlap:
        free = Ticks(replicas, least_depths(ticks, seconds))
        assert period(free, seconds) <= ideal(free, seconds) * (1 + 2e-6)


def test_an_order_that_repeats_too_late_takes_the_mean_of_many_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """1,113,121 ticks until it repeats; walked that far, the mean was a hundredth off."""
    replicas = (101, 103, 107)
    ticks = Ticks(replicas, pipedream_depths(replicas))
    mean = period(ticks, proportional(replicas))
    monkeypatch.setattr(module, "MOST_WORK", 100_000_000)
    assert ticks.repeat == 101 * 103 * 107 and mean == pytest.approx(period(ticks, proportional(replicas)), rel=0.01)
    assert period(Ticks(replicas, (1010, 412, 0)), proportional(replicas)) == pytest.approx(3.0)


def test_a_sum_of_gradients_stands_in_the_way_of_a_round_but_not_of_a_batch() -> None:
    seconds = Seconds((1.0,), (2.0,), reduce=(4.0,))
    assert period(Ticks((2,), (0,)), seconds) == (3 + 4) / 2
    assert period(Ticks((2,), (0,), batch=4), seconds) == 3 / 2
    assert period(Ticks((2,), (0,), batch=4), Seconds((1.0,), (2.0,), reduce=(4.0,), overlap=False)) == (3 * 2 + 4) / 4


def test_messages_need_depth_where_they_overlap() -> None:
    """A round trip of 4 s beside 3 s of work: one more minibatch on its way hides it."""
    ticks = Ticks((1, 1), (1, 0))
    seconds = Seconds((1.0, 1.0), (2.0, 2.0), (1.0,), (1.0,))
    assert period(ticks, seconds) == 4.0 and least_depths(ticks, seconds) == (2, 0)
    assert period(Ticks((1, 1), (2, 0)), seconds) == 3.0
    assert period(ticks, Seconds((1.0, 1.0), (2.0, 2.0), (9.0,), (1.0,))) == 10.0, "16 s for two, but the border needs 10 for one"


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"backward": (1.0,)}, "backward is (1.0,), expected 2 numbers of at least 0"),
    ({"reduce": (0.0, -1.0)}, "reduce is (0.0, -1.0)"),
    ({"forward_transfer": (float("nan"),)}, "forward_transfer is (nan,), expected 1 numbers"),
]


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_wrong_seconds(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CompileError, match=re.escape(message)):
        Seconds(**{"forward": (1.0, 1.0), "backward": (1.0, 1.0), **change})


def test_seconds_of_other_stages() -> None:
    with pytest.raises(CompileError, match="the seconds are of 1 stages, the order is of 2"):
        period(Ticks((1, 1), (1, 0)), Seconds((1.0,), (1.0,)))
