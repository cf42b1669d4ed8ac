"""Laws of the named schedules, for every number of stages and microbatches up to 6 x 12, and of any schedule's text."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcompiler.core.schedule import Schedule
from pdcompiler.passes.schedules.named import SCHEDULES
from pdcompiler.testing import any_schedules

SIZES = list(itertools.product(range(1, 7), range(1, 13)))
EACH = [pytest.param(name, id=name) for name in SCHEDULES]


@pytest.mark.parametrize("name", EACH)
def test_a_named_schedule_checks_and_has_an_order(name: str) -> None:
    for stages, microbatches in SIZES:
        schedule = SCHEDULES[name](stages, microbatches).check()
        assert (schedule.name, schedule.stages, schedule.microbatches) == (name, stages, microbatches)
        assert schedule.replicas == {stage: (stage,) for stage in range(stages)}
        assert_is_an_order_of(schedule)


@pytest.mark.parametrize("name", EACH)
def test_backwards_stand_in_the_order_of_the_microbatches(name: str) -> None:
    for size in SIZES:
        for actions in SCHEDULES[name](*size).ranks:
            for phase in ("F", "B"):
                assert [a.microbatch for a in actions if a.phase == phase] == list(range(size[1])), (size, phase)


def test_in_flight_is_what_the_schedules_promise() -> None:
    for stages, microbatches in SIZES:
        one_f_one_b, gpipe = SCHEDULES["1f1b"](stages, microbatches), SCHEDULES["gpipe"](stages, microbatches)
        for stage in range(stages):
            assert one_f_one_b.in_flight(stage) == min(stages - stage, microbatches), (stages, microbatches, stage)
            assert gpipe.in_flight(stage) == microbatches, (stages, microbatches, stage)


@pytest.mark.parametrize("name", EACH)
def test_the_text_of_a_named_schedule_parses_back(name: str) -> None:
    for size in SIZES:
        schedule = SCHEDULES[name](*size)
        assert "@" not in str(schedule)
        assert Schedule.parse(str(schedule)) == schedule


@given(any_schedules())
def test_any_projection_of_an_order_checks_and_parses_back(schedule: Schedule) -> None:
    assert Schedule.parse(str(schedule.check())) == schedule
    assert_is_an_order_of(schedule)


@given(any_schedules(), st.data())
def test_a_schedule_without_some_microbatches_keeps_the_order_of_the_others(schedule: Schedule, data: st.DataObject) -> None:
    gone = data.draw(st.sets(st.integers(0, schedule.microbatches - 1), max_size=schedule.microbatches - 1))
    backwards_too = data.draw(st.booleans())
    rest = schedule.without(a for a in schedule if a.microbatch in gone and (backwards_too or a.phase != "F"))
    for actions, before in zip(rest.ranks, schedule.ranks, strict=True):
        assert list(actions) == [a for a in before if a in actions]
    assert_is_an_order_of(rest)


def assert_is_an_order_of(schedule: Schedule) -> None:
    """`order` holds each rank's actions in its order, every one after those that it needs."""
    order = schedule.order()
    for rank, actions in enumerate(schedule.ranks):
        assert tuple(action for at, action in order if at == rank) == actions
    place = {action: index for index, (_, action) in enumerate(order)}
    for action, index in place.items():
        for need in action.needs(schedule.stages):
            assert place.get(need, -1) < index, (need, action)
