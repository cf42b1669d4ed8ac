"""A training run is the plain loop: steps whose rows change, gradients that are added, clipped and given to an optimizer.

After every step weights, buffers and the norm are plain PyTorch's, which draws dropout from the same seeds.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor, nn

import pdcompiler
from pdcompiler.core.random_ops import microbatch_seeds
from pdcompiler.testing import Run, assert_close_by_tensor, plain_step, split_rows, training_runs

SHARED = [HealthCheck.too_slow]


def check(run: Run) -> None:
    case = run.case
    model, plain = case.model(), case.model()
    pipe = pdcompiler.compile(
        model, case.world_size, loss_fn=run.batch(0, 0).loss_fn, schedule=case.schedule, microbatches=case.microbatches,
        partition=list(case.partition),
    )  # fmt: skip
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, plain)]
    for step, batches in enumerate(run.steps):
        for number in range(len(batches)):
            batch = run.batch(step, number)
            sizes = split_rows(batches[number], case.microbatches)
            seeds = microbatch_seeds(0, pipe.steps, len(sizes))
            expected = plain_step(
                plain, batch.args, batch.kwargs, target=batch.target, loss_fn=batch.loss_fn, rows_of_microbatches=sizes,
                seeds=seeds,
            )  # fmt: skip
            take(plain, expected.gradients, expected.buffers)
            result: Any = pipe.step(*batch.args, target=batch.target, **batch.kwargs)
            assert_close_by_tensor(result.loss, expected.loss, 1e-10, f"loss of step {step}, batch {number}")
        if run.clip is not None:
            norm = nn.utils.clip_grad_norm_(plain.parameters(), run.clip)
            assert_close_by_tensor(pipe.clip_grad_norm_(run.clip), norm, 1e-10, f"norm of step {step}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for (name, value), other in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
            assert_close_by_tensor(value, other, 1e-10, f"{name} after step {step}")


def take(plain: nn.Module, gradients: dict[str, Tensor | None], buffers: dict[str, Tensor]) -> None:
    """Add a step's gradients to the plain model's, and give it the buffers."""
    for name, parameter in plain.named_parameters():
        gradient = gradients[name]
        if gradient is not None:
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
    for name, buffer in plain.named_buffers():
        buffer.copy_(buffers[name])


@settings(max_examples=4, suppress_health_check=SHARED)
@given(training_runs())
def test_a_sample_of_random_training_runs_is_the_plain_loop(run: Run) -> None:
    check(run)


@pytest.mark.full
@settings(max_examples=1000, suppress_health_check=SHARED)
@given(training_runs())
def test_1000_random_training_runs_are_the_plain_loop(run: Run) -> None:
    check(run)
