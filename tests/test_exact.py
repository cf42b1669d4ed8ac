"""Every model of the zoo, through the reference backend: loss, outputs, every gradient and every buffer are plain PyTorch's.

One trace serves all numbers of stages and all schedules. A sample runs every time, all of it in `make test-all`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from unittest import mock

import pytest

from pdcompiler import traces
from pdcompiler.testing import assert_transparent
from tests.cases.every_cut import TracedOnce
from tests.models import ZOO

BOTH = ((2, "1f1b", 4), (4, "gpipe", 4))
SAMPLE: dict[str, tuple[tuple[int, str, int], ...]] = {
    "gpt2": ((2, "zb-v", 3),),
    "resnet": (*BOTH, (2, "interleaved", 3)),
    "unet": (*BOTH, (2, "dualpipe-v", 4)),
    "vgg16": BOTH,
    "mlp": (*BOTH, (3, "zb-h2", 7)),
}
"""Ranks, schedule, microbatches."""
NEWER = ("zb-h1", "zb-h2", "interleaved", "zb-v", "dualpipe-v")
ALL = tuple(itertools.product((2, 3, 4), ("gpipe", "1f1b"), (4,)))
MORE = (*itertools.product((2, 3, 4), NEWER, (1, 3, 8)), *itertools.product((2, 3, 4), ("gpipe", "1f1b"), (1, 3, 8)))


def check_exact(name: str, plans: Iterable[tuple[int, str, int]]) -> None:
    """Raises AssertionError, with the plan, at the first difference."""
    example = ZOO[name]()
    with mock.patch.object(traces, "trace_model", TracedOnce()):
        for world_size, schedule, microbatches in plans:
            if schedule == "dualpipe-v" and microbatches < 2 * world_size:
                continue  # refused by name, see test_named_against_torch.py
            try:
                assert_transparent(
                    example.model, *example.args, target=example.target, loss_fn=example.loss_fn, world_size=world_size,
                    schedule=schedule, microbatches=microbatches, tolerance=example.tolerance, **example.kwargs,
                )  # fmt: skip
            except Exception as error:
                error.add_note(f"{name} on {world_size} ranks, {schedule}, {microbatches} microbatches")
                raise


@pytest.mark.parametrize("name", SAMPLE)
def test_a_sample_of_the_plans_is_exact(name: str) -> None:
    check_exact(name, SAMPLE[name])


@pytest.mark.full
@pytest.mark.parametrize("name", ZOO)
def test_every_plan_is_exact(name: str) -> None:
    check_exact(name, ALL)


@pytest.mark.full
@pytest.mark.parametrize("name", ZOO)
def test_every_schedule_is_exact(name: str) -> None:
    """A model that can't be cut into so many stages is tried with the ranks that it can be cut for."""
    several = ("interleaved", "zb-v", "dualpipe-v")
    most = 2 * ZOO[name]().stage_count_max
    check_exact(name, [plan for plan in MORE if plan[0] * (2 if plan[1] in several else 1) <= most])
