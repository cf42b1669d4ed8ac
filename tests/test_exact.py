"""Every model of the zoo, through the reference backend: loss, outputs, every gradient and every buffer are plain PyTorch's.

One trace serves all numbers of stages and both schedules. A sample runs every time, all of it in `make test-all`.
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

SAMPLE = ("gpt2", "t5", "resnet", "unet", "vgg16", "mlp")
ALL = tuple(itertools.product((2, 3, 4), ("gpipe", "1f1b")))


def check_exact(name: str, plans: Iterable[tuple[int, str]]) -> None:
    """Raises AssertionError, with the plan, at the first difference."""
    example = ZOO[name]()
    with mock.patch.object(traces, "trace_model", TracedOnce()):
        for world_size, schedule in plans:
            try:
                assert_transparent(
                    example.model, *example.args, target=example.target, loss_fn=example.loss_fn, world_size=world_size,
                    schedule=schedule, microbatches=4, tolerance=example.tolerance, **example.kwargs,
                )  # fmt: skip
            except Exception as error:
                error.add_note(f"{name} on {world_size} ranks, {schedule}")
                raise


@pytest.mark.parametrize("name", SAMPLE)
def test_a_sample_of_the_plans_is_exact(name: str) -> None:
    check_exact(name, [(2, "1f1b"), (4, "gpipe")])


@pytest.mark.full
@pytest.mark.parametrize("name", ZOO)
def test_every_plan_is_exact(name: str) -> None:
    check_exact(name, ALL)
