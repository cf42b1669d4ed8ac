"""The timing model: drawings, closed forms, and laws over random schedules and costs."""

import textwrap
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcompiler import CompileError, Schedule
from pdcompiler.core import timing as module
from pdcompiler.core.errors import DeadlockError
from pdcompiler.core.schedule import Action
from pdcompiler.core.timing import Timing, draw, timing
from pdcompiler.passes.schedules.named import SCHEDULES

seconds = st.integers(0, 100).map(lambda n: n / 8)
positive = st.integers(1, 100).map(lambda n: n / 8)  # eighths add up exactly


def drawn(text: str) -> str:
    return "\n".join(line.rstrip() for line in textwrap.dedent(text).strip("\n").splitlines())


@pytest.mark.parametrize(("place", "overlap"), [(0, True), (1, False)])
def test_the_docstring_draws_what_happens(place: int, overlap: bool) -> None:
    drawings = [part for part in (module.__doc__ or "").split("\n\n") if part.startswith("    ")]
    options = {"forward_transfer": [1], "backward_transfer": [1], "overlap": overlap}
    result = timing(SCHEDULES["1f1b"](2, 3), forward=[1, 1], backward=[2, 2], **options)
    assert draw(result) == drawn(drawings[place])


def test_figures() -> None:
    result = timing(SCHEDULES["1f1b"](2, 3), forward=[1, 1], backward=[2, 2])
    assert result.finish == 12 and result.busy == (9, 9) and result.bubble == (3, 3)
    assert result.starts[Action("B", 1, 0)] == 2 and result.ends[Action("B", 1, 0)] == 4


def test_a_backward_in_two_parts_lets_the_stage_before_begin_earlier() -> None:
    """The first backward of stage 1 whole, the second in two parts, of which W takes a second of three."""
    schedule = Schedule.parse("F0 F1 B0 B1\nF0 B0 F1 B1 W1")
    assert draw(timing(schedule, forward=[1, 1], backward=[1, 3], weight=[1, 1])) == drawn("""
        F0F1      B0    B1
          F0B0....F1B1..W1
    """)
    assert timing(schedule, forward=[1, 1], backward=[2, 2]).ends[Action("B", 1, 1)] == 6, "W is half of it"
    with pytest.raises(CompileError, match=r"weight\[1\] is 4 s, more than backward\[1\], of which it is a part: 3 s"):
        timing(schedule, forward=[1, 1], backward=[1, 3], weight=[1, 4])


REPLICATED = Schedule.parse("""
    F0@0 F2@0 B0@0 B2@0
    F1@0 F3@0 B1@0 B3@0
    F0@1 B0@1 F1@1 B1@1 F2@1 B2@1 F3@1 B3@1
""")


def test_replicas_share_the_microbatches_and_add_up_their_gradients() -> None:
    """Each replica of the first stage takes 2 of 4; the sum waits for the last backward of both."""
    result = timing(REPLICATED, forward=[2, 1], backward=[2, 1], reduce=[1.5, 0])
    everything = tuple(tuple(replace(interval, occupies=True) for interval in rank) for rank in result.ranks)
    assert draw(replace(result, ranks=everything), unit=0.5) == drawn("""
        F0@0....F2@0....B0@0....        B2@0....        ======
        F1@0....F3@0....        B1@0....        B3@0....======
                F0@1B0@1F1@1B1@1F2@1B2@1F3@1B3@1
    """)
    assert result.finish == 13.5 and result.busy == (8, 8, 8)
    assert timing(REPLICATED, forward=[2, 1], backward=[2, 1], reduce=[1.5, 0], overlap=False).busy == (9.5, 9.5, 8)


def test_two_stages_on_one_rank_send_nothing() -> None:
    schedule = Schedule.parse("F0@0 F0@1 B0@1 B0@0")
    for overlap in (True, False):
        options = {"forward_transfer": [9], "backward_transfer": [9], "overlap": overlap}
        assert timing(schedule, forward=[1, 2], backward=[3, 4], **options).finish == 10


def test_an_evaluation_has_only_forwards() -> None:
    schedule = SCHEDULES["gpipe"](2, 3)
    forwards = schedule.without(action for action in schedule if action.phase == "B")
    assert timing(forwards, forward=[1, 2], backward=[0, 0]).finish == 7


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "too few": ({"forward": [1]}, "forward has 1 numbers, the schedule needs 2"),
    "negative": ({"backward": [1, -2]}, r"backward\[1\] is -2, expected seconds of at least 0"),
    "not a number": ({"reduce": [float("nan"), 0]}, r"reduce\[0\] is nan"),
    "too many borders": ({"forward_transfer": [1, 1]}, "forward_transfer has 2 numbers, the schedule needs 1"),
}


@pytest.mark.parametrize("case", WRONG)
def test_costs_that_do_not_fit(case: str) -> None:
    options, message = WRONG[case]
    with pytest.raises(CompileError, match=message):
        timing(SCHEDULES["1f1b"](2, 2), **{"forward": [1, 1], "backward": [1, 1], **options})


def test_a_schedule_that_waits_for_itself() -> None:
    with pytest.raises(DeadlockError, match=r"rank 0, position 0: B0@0 waits for F0@0"):
        timing(Schedule.parse("B0 F0\nF0 B0"), forward=[1, 1], backward=[1, 1])


# Laws


@st.composite
def timings(draw_: st.DrawFn, overlap: bool | None = None) -> tuple[Schedule, dict[str, Any]]:
    """A schedule with all costs."""
    stages = draw_(st.integers(1, 5))
    schedule = SCHEDULES[draw_(st.sampled_from(sorted(SCHEDULES)))](stages, draw_(st.integers(1, 6)))

    def numbers(count: int) -> list[float]:
        return draw_(st.lists(seconds, min_size=count, max_size=count))

    costs: dict[str, Any] = {name: numbers(stages) for name in ("forward", "backward", "reduce")}
    costs |= {name: numbers(stages - 1) for name in ("forward_transfer", "backward_transfer")}
    return schedule, {**costs, "overlap": draw_(st.booleans()) if overlap is None else overlap}


def without(costs: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in costs.items() if name not in names}


TRANSFERS = "forward_transfer", "backward_transfer"


@given(st.sampled_from(["gpipe", "1f1b"]), st.integers(1, 6), st.integers(1, 8), positive, positive)
def test_equal_stages_take_the_closed_form(name: str, stages: int, microbatches: int, f: float, b: float) -> None:
    result = timing(SCHEDULES[name](stages, microbatches), forward=[f] * stages, backward=[b] * stages)
    assert result.finish == (microbatches - 1 + stages) * (f + b)
    assert set(result.bubble) == {(stages - 1) * (f + b)}


@given(st.lists(st.tuples(seconds, seconds), min_size=1, max_size=6), st.integers(1, 8))
def test_gpipe_takes_the_closed_form_with_any_stages(costs: list[tuple[float, float]], microbatches: int) -> None:
    forward, backward = zip(*costs, strict=True)
    result = timing(SCHEDULES["gpipe"](len(costs), microbatches), forward=forward, backward=backward)
    assert result.finish == sum(forward) + sum(backward) + (microbatches - 1) * (max(forward) + max(backward))


@given(timings())
def test_intervals_are_in_order_and_dependences_hold(case: tuple[Schedule, dict[str, Any]]) -> None:
    schedule, costs = case
    result = timing(schedule, **costs)
    for intervals in result.ranks:
        occupied = [i for i in intervals if i.occupies]
        assert all(a.end <= b.start for a, b in pairwise(occupied))
    for action in schedule:
        assert all(result.ends[need] <= result.starts[action] for need in action.needs(schedule.stages))
    assert result.finish == max(i.end for intervals in result.ranks for i in intervals)


@given(timings())
def test_never_faster_than_the_bottleneck_nor_than_one_microbatch(case: tuple[Schedule, dict[str, Any]]) -> None:
    schedule, costs = case
    result = timing(schedule, **costs)
    work = [f + b for f, b in zip(costs["forward"], costs["backward"], strict=True)]
    assert result.finish >= schedule.microbatches * max(work)
    assert result.finish >= sum(work) + sum(costs["forward_transfer"]) + sum(costs["backward_transfer"])
    assert result.finish >= max(result.busy)


@given(timings(), st.integers(0, 3))
def test_all_costs_twice_as_high_take_twice_as_long(case: tuple[Schedule, dict[str, Any]], power: int) -> None:
    schedule, costs = case
    scaled = {k: v if k == "overlap" else [2**power * x for x in v] for k, v in costs.items()}
    assert timing(schedule, **scaled).finish == 2**power * timing(schedule, **costs).finish


@given(timings(), st.data(), positive)
def test_no_cost_that_rises_makes_it_faster(case: tuple[Schedule, dict[str, Any]], data: st.DataObject, more: float) -> None:
    schedule, costs = case
    name = data.draw(st.sampled_from([name for name, value in costs.items() if name != "overlap" and value]))
    place = data.draw(st.integers(0, len(costs[name]) - 1))
    raised = {**costs, name: [*costs[name][:place], costs[name][place] + more, *costs[name][place + 1 :]]}
    before, after = timing(schedule, **costs), timing(schedule, **raised)
    assert after.finish >= before.finish
    assert all(after.starts[action] >= before.starts[action] for action in schedule)


@given(timings(overlap=True))
def test_messages_and_occupied_ranks_never_help(case: tuple[Schedule, dict[str, Any]]) -> None:
    schedule, costs = case
    free, travelling = timing(schedule, **without(costs, *TRANSFERS)), timing(schedule, **costs)
    occupying = timing(schedule, **{**costs, "overlap": False})
    assert free.finish <= travelling.finish <= occupying.finish


@given(timings())
def test_free_messages_cost_nothing_in_either_mode(case: tuple[Schedule, dict[str, Any]]) -> None:
    schedule, costs = case
    both: Sequence[Timing] = [
        timing(schedule, **{**without(costs, *TRANSFERS, "reduce"), "overlap": overlap}) for overlap in (True, False)
    ]
    assert both[0] == both[1]
