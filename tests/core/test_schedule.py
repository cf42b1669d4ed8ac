"""Schedules as text: the drawings in the code are true, and what is no schedule is refused with the place."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable

import pytest

from pdcompiler.core import schedule as core
from pdcompiler.core.errors import CompileError, DeadlockError
from pdcompiler.core.schedule import Action, Schedule, parse_action, show
from pdcompiler.passes.schedules.named import SCHEDULES, interleaved, one_f_one_b, replicated
from pdcompiler.passes.schedules.v_shaped import dualpipe_v, zb_v

ACTIONS = re.compile(r"( *[FBW]\d+(@\d+)?)+ *")


def drawing(text: str | None) -> Schedule:
    """The schedule that a docstring draws: its lines that hold nothing but actions."""
    assert text is not None
    return Schedule.parse("\n".join(line for line in text.splitlines() if ACTIONS.fullmatch(line)))


@pytest.mark.parametrize("make", [pytest.param(make, id=name) for name, make in SCHEDULES.items()])
def test_a_named_schedule_draws_itself(make: Callable[[int, int], Schedule]) -> None:
    assert drawing(make.__doc__) == make(3, 4)


@pytest.mark.parametrize("make", [interleaved, zb_v, dualpipe_v])
def test_a_schedule_of_two_stages_a_rank_draws_itself(make: Callable[[int, int], Schedule]) -> None:
    assert drawing(make.__doc__) == make(2, 4)


def test_a_schedule_of_replicated_stages_draws_itself() -> None:
    assert drawing(replicated.__doc__) == replicated("1f1b", (2, 1), 4)


@pytest.mark.parametrize("pipelines", [1, 2, 3])
@pytest.mark.parametrize("name", list(SCHEDULES))
def test_microbatch_i_runs_on_replica_i_mod_replicas_of_every_stage(name: str, pipelines: int) -> None:
    """For all replicas 1 to 3 of one to three stages: complete, free of deadlock, and round robin."""
    for replicas in [counts for stages in (1, 2, 3) for counts in itertools.product((1, 2, 3), repeat=stages)]:
        for microbatches in (pipelines * max(replicas), 7 * pipelines + 1):
            schedule = replicated(name, replicas, microbatches, pipelines).check()
            where = {action: rank for rank, actions in enumerate(schedule.ranks) for action in actions}
            for stage, ranks in schedule.replicas.items():
                assert len(ranks) == pipelines * replicas[stage]
                assert all(where[Action("F", stage, m)] == ranks[m % len(ranks)] for m in range(microbatches))


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_replicas_of_a_middle_stage_do_not_wait_for_its_neighbours_for_ever(name: str) -> None:
    """Their orders are of pipelines of other depths: where a stage falls behind in its own, another waits for it."""
    for replicas in [(1, 2, 1), (1, 3, 1), (1, 1, 2, 1), (2, 1, 3, 1), (1, 2, 3, 5), (5, 1, 2, 1)]:
        for microbatches in range(max(replicas), 26):
            replicated(name, replicas, microbatches).check()


def test_whole_pipelines_stand_on_ranks_of_their_own() -> None:
    assert replicated("gpipe", (2, 1), 6, pipelines=2).replicas == {0: (0, 3, 1, 4), 1: (2, 5)}


def test_the_drawing_of_the_text_form_is_1f1b() -> None:
    first, second = (core.__doc__ or "").split("A backward may be in two parts")
    assert drawing(first) == one_f_one_b(3, 4)
    assert drawing(second).check().split == {(0, 0), (0, 1), (1, 0), (1, 1)}


def test_1f1b_of_more_stages_than_microbatches() -> None:
    assert one_f_one_b(3, 1) == Schedule.parse("F0 B0 \n F0 B0 \n F0 B0")


def test_empty_lines_and_remarks_are_passed_over() -> None:
    assert Schedule.parse("\n# two ranks\nF0 B0  # the first\n\n  F0   B0\n") == one_f_one_b(2, 1)


def test_several_stages_on_a_rank_are_written_with_the_stage() -> None:
    schedule = Schedule.parse("F0@0 F0@2 B0@2 B0@0\nF0@1 B0@1").check()
    assert schedule.replicas == {0: (0,), 1: (1,), 2: (0,)}
    assert str(schedule) == "F0@0 F0@2 B0@2 B0@0\nF0@1 B0@1"


def test_an_action_as_text() -> None:
    assert parse_action("B12", rank=3) == Action("B", 3, 12)
    assert parse_action("F0@7", rank=3) == Action("F", 7, 0)
    assert [show(Action("F", 7, 0), with_stage) for with_stage in (False, True)] == ["F0", "F0@7"]


def test_the_name_does_not_count_in_comparisons() -> None:
    assert len({one_f_one_b(1, 2), Schedule.parse("F0 B0 F1 B1", "mine")}) == 1
    assert one_f_one_b(1, 2) != Schedule.parse("F0 F1 B0 B1")


@pytest.mark.parametrize("word", ["X0", "F", "f0", "F-1", "F0@", "F0@x", "F0,", "F0@1@2"])
def test_what_is_no_action_is_refused_with_its_rank(word: str) -> None:
    with pytest.raises(CompileError, match=rf"^schedule, rank 1: '{re.escape(word)}' is no action; expected F, B or W"):
        Schedule.parse(f"F0 B0\nF0 {word}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the schedule is empty"),
        ("F0@0 B0@0\nF0@0 B0@0", "rank 1, position 0: F0@0 stands twice, on rank 0 too"),
        ("F0@0 B1@0\nF1@0 B0@0", "rank 0, position 1: B1@0 stands before its forward"),
        ("F0@0 B0@0 F1@0\nB1@0", "rank 1, position 0: B1@0: its forward is on rank 0, where what it saved is"),
        ("F0 F0 B0", "rank 0, position 1: F0@0 stands twice"),
        ("F0 B0 B0", "rank 0, position 2: B0@0 stands twice"),
        ("B0 F0", "rank 0, position 0: B0@0 stands before its forward"),
        ("F0 W0 B0", "rank 0, position 1: W0@0 stands before its backward (B)"),
        ("F0@0 B0@0\nF1@0 B1@0 W0@0", "rank 1, position 2: W0@0: its backward (B) is on rank 0, where what it saved is"),
        ("F0 B0 W0 W0", "rank 0, position 3: W0@0 stands twice"),
        ("F0 B0 F1", "the schedule lacks B1 on stage 0, expected on rank 0 after position 2, its forward"),
        ("F0 B0 F2 B2", "the schedule lacks F1 on stage 0, expected on rank 0"),
        ("F0 F1 B0 B1\nF0 B0", "the schedule lacks F1 on stage 1, expected on rank 1"),
        ("F0@0 B0@0\nF0@2 B0@2", "the schedule lacks F0 on stage 1, which no rank runs"),
        ("F0 B0 F1 B2", "rank 0, position 3: B2@0 has no forward"),
        ("F0 W0", "rank 0, position 1: W0@0 has no backward (B)"),
    ],
)
def test_what_is_no_schedule_is_refused_with_the_place(text: str, message: str) -> None:
    with pytest.raises(CompileError) as caught:
        Schedule.parse(text).check()
    assert str(caught.value) == message


@pytest.mark.parametrize("action", [Action("F", -1, 0), Action("F", 0, -1), Action("X", 0, 1)])  # type: ignore[arg-type]
def test_an_action_of_no_stage_microbatch_or_phase_is_refused(action: Action) -> None:
    schedule = Schedule(((*one_f_one_b(1, 1).ranks[0], action),))
    with pytest.raises(CompileError) as caught:
        schedule.check()
    told = f"rank 0, position 2: {show(action, True)} is no action; expected F, B or W, a microbatch from 0 and a stage from 0"
    assert str(caught.value) == told


def test_ranks_that_wait_for_each_other_are_refused_with_what_each_waits_for() -> None:
    with pytest.raises(DeadlockError) as caught:
        Schedule.parse("F0 B0 F1 B1\nF1 B1 F0 B0").check()
    assert str(caught.value) == (
        "the schedule waits for itself:\n  rank 0, position 1: B0@0 waits for B0@1\n  rank 1, position 0: F1@1 waits for F1@0"
    )


def test_what_was_left_out_is_not_waited_for() -> None:
    schedule = one_f_one_b(2, 2)
    forward_only = schedule.without(action for action in schedule if action.phase == "B")
    assert [show(action, True) for _, action in forward_only.order()] == ["F0@0", "F1@0", "F0@1", "F1@1"]
    assert forward_only.in_flight(0) == 2
