"""Schedules without flushes give exactly the delayed updates that they name, the oracle's: for all models, replicas, depths."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from pdcompiler.testing import AsynchronousCase, asynchronous_cases
from tests.streams import assert_equal, run

SAMPLE, ALL = 8, 600


def check(case: AsynchronousCase) -> None:
    """All weights, buffers and losses; and which versions were really used."""
    seen = run(case)
    assert_equal(case, seen)
    assert seen.weights.keys() == set(range(len(case.kinds)))
    assert seen.buffers.keys() == dict(case.model().named_buffers()).keys()
    assert seen.forwards.keys() == {(stage, t) for stage in range(len(case.kinds)) for t in range(case.count)}


@settings(max_examples=SAMPLE)
@given(asynchronous_cases(whole_batches=True, most_stages=4))
def test_weights_after_every_update_are_the_oracles(case: AsynchronousCase) -> None:
    check(case)


@pytest.mark.full
@settings(max_examples=ALL)
@given(asynchronous_cases(whole_batches=True))
def test_weights_after_every_update_are_the_oracles_in_many_cases(case: AsynchronousCase) -> None:
    check(case)
