"""Schedules without flushes give exactly the delayed updates that they name, the oracle's: for all models, replicas, depths."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from pdcompiler.testing import AsynchronousCase, asynchronous_cases
from tests.streams import assert_equal, run

SAMPLE, ALL = 5, 600


def check(case: AsynchronousCase) -> None:
    """All weights, buffers and losses, where sums have one order to the last bit; and which versions were really used."""
    seen = run(case)
    assert_equal(case, seen, same_bits if case.semantics != "2bw" and in_the_same_order(case) else None)
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


@pytest.mark.full
@settings(max_examples=ALL // 4)
@given(asynchronous_cases(semantics=("stash", "vertical-sync"), most_stages=4).filter(lambda case: in_the_same_order(case)))
def test_they_are_equal_to_the_last_bit_where_sums_have_the_same_order(case: AsynchronousCase) -> None:
    seen = run(case)
    assert_equal(case, seen, same_bits)


def in_the_same_order(case: AsynchronousCase) -> bool:
    """No skip, whose gradients a pipeline adds on the way, and no statistics, which eager torch computes by another kernel."""
    return not case.skips and {kind for kinds in case.kinds for kind in kinds} <= {"linear", "gated", "layernorm"}


def same_bits(actual: Tensor, expected: Tensor, what: str) -> None:
    assert torch.equal(actual, expected), what


def test_replicas_begin_with_the_same_buffers() -> None:
    """The second one's first forward comes when the first one's has moved the model's."""
    check(AsynchronousCase((("linear", "running"),), (), (2,), (0,), "stash", None, 2, (), 1, "sgd"))
