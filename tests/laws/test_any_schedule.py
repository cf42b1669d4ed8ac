"""Any schedule is exact: random models, cut and run in a random order on any ranks, backwards whole or in two parts.

Stages of a rank need not be neighbours, and a rank may have any number of them.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdcompiler.core.schedule import Schedule
from pdcompiler.testing import Case, any_schedules, assert_transparent, cases

SHARED = [HealthCheck.too_slow]


@st.composite
def scheduled_cases(draw: st.DrawFn) -> tuple[Case, Schedule]:
    case = draw(cases())
    return case, draw(any_schedules(case.world_size, case.microbatches, in_order=True))


def check(case: Case, schedule: Schedule) -> None:
    batch = case.batch()
    assert_transparent(
        case.model(), *batch.args, target=batch.target, loss_fn=batch.loss_fn, world_size=len(schedule.ranks), schedule=schedule,
        microbatches=case.microbatches, partition=case.partition, tolerance=1e-12, **batch.kwargs,
    )  # fmt: skip


@settings(max_examples=5, suppress_health_check=SHARED)
@given(scheduled_cases())
def test_a_sample_of_random_schedules_is_exact(drawn: tuple[Case, Schedule]) -> None:
    check(*drawn)


@pytest.mark.full
@settings(max_examples=300, suppress_health_check=SHARED)
@given(scheduled_cases())
def test_300_random_schedules_are_exact(drawn: tuple[Case, Schedule]) -> None:
    check(*drawn)
