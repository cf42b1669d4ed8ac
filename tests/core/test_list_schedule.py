"""Orders found by walking: complete, free of deadlock, within their limits; refused, by rank, where a limit is too low."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcompiler import CompileError
from pdcompiler.core.list_schedule import Task, list_schedule
from pdcompiler.core.schedule import Schedule
from pdcompiler.core.timing import timing
from pdcompiler.passes.schedules.named import one_f_one_b


def test_whole_backwards_and_the_limits_of_1f1b_give_1f1b() -> None:
    for ranks in range(1, 6):
        for microbatches in range(1, 12):
            limits = tuple(ranks - rank for rank in range(ranks))
            task = Task(tuple(range(ranks)), microbatches, limits, split=False)
            assert list_schedule(task, "1f1b") == one_f_one_b(ranks, microbatches)


def test_a_rank_fills_its_wait_for_a_slow_stage_with_weights_gradients() -> None:
    """Stage 1 takes three times as long; rank 0 holds three microbatches at most."""
    seconds = {"F": [1.0, 3.0], "B": [1.0, 3.0], "W": [1.0, 3.0]}
    found = list_schedule(Task((0, 1), 4, (3, 2), seconds=seconds), "own")  # type: ignore[arg-type]
    assert found == Schedule.parse("F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3\nF0 B0 F1 B1 W0 F2 B2 W1 F3 B3 W2 W3")


def test_a_message_is_waited_for() -> None:
    """B0 comes two seconds after it was made: until then rank 0 runs another forward."""
    own = Task((0, 1), 2, (2, 2), transfer=(2.0,))
    assert str(list_schedule(own, "own").ranks[0][:3]) == str(Schedule.parse("F0 F1 B0").ranks[0])


@given(st.data())
def test_any_task_is_ordered_within_its_limits(data: st.DataObject) -> None:
    ranks, microbatches, split = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6)), data.draw(st.booleans())
    rank_of = tuple([*range(ranks), *data.draw(st.lists(st.integers(0, ranks - 1), max_size=4))])
    own = [rank_of.count(rank) for rank in range(ranks)]
    limits = tuple(data.draw(st.integers(count, 3 * count)) for count in own)
    costs = st.lists(st.integers(1, 5).map(float), min_size=len(rank_of), max_size=len(rank_of))
    seconds = {phase: data.draw(costs) for phase in ("F", "B", "W")}
    task = Task(rank_of, microbatches, limits, split=split, seconds=seconds, transfer=[0.5] * (len(rank_of) - 1))  # type: ignore[arg-type]
    try:
        schedule = list_schedule(task, "own").check()
    except CompileError as error:
        assert "may hold" in str(error) and max(rank_of.count(rank) for rank in range(ranks)) > 1
        return
    for rank, actions in enumerate(schedule.ranks):
        held = 0
        for action in actions:
            held += {"F": 1, "B": 0 if split else -1, "W": -1}[action.phase]
            assert held <= limits[rank]
    whole = [b + w for b, w in zip(seconds["B"], seconds["W"], strict=True)] if split else seconds["B"]
    walked = timing(schedule, forward=seconds["F"], backward=whole, weight=seconds["W"] if split else [0.0] * len(rank_of))
    assert walked.finish >= max(
        microbatches * sum(seconds["F"][s] + whole[s] for s, on in enumerate(rank_of) if on == rank) for rank in range(ranks)
    )


def test_a_limit_that_is_too_low_is_refused_with_its_rank() -> None:
    told = r"rank 0 may hold 1 microbatches of its stages \[0, 2\] at once.*\n.*at least 2 there"
    with pytest.raises(CompileError, match=told):
        list_schedule(Task((0, 1, 0), 3, (1, 3)), "own")
