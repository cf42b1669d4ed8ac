"""A pipeline in this process beside the plain loop, for several steps in a row.

`assert_transparent` of pdcompiler.testing takes one step; what the cases ask for is what happens at the next one: another
number of rows, another length, gradients that are added to, buffers that go on.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import pdcompiler
from pdcompiler import Pipeline, StepResult
from pdcompiler.core.random_ops import microbatch_seeds
from pdcompiler.testing import (
    LossFunction,
    assert_close_by_tensor,
    assert_same,
    join_outputs,
    plain_eval,
    plain_step,
    rows_of,
    split_rows,
)  # fmt: skip

SCHEDULES = ("gpipe", "1f1b")
EXACT = 1e-12


class AgainstLoop:
    """A compiled model; each step and evaluation is compared with plain PyTorch on a copy of the model as it is then."""

    def __init__(
        self, model: nn.Module, world_size: int, schedule: str = "1f1b", *, microbatches: int = 4, tolerance: float = EXACT,
        loss_fn: LossFunction | None = None, batch_dims: Mapping[str, int | None] | None = None, **options: Any,
    ) -> None:
        self.model, self.microbatches, self.tolerance = model, microbatches, tolerance
        self.loss_fn, self.batch_dims = loss_fn, batch_dims
        self.pipe: Pipeline = pdcompiler.compile(
            model, world_size, schedule=schedule, microbatches=microbatches, loss_fn=loss_fn, batch_dims=batch_dims, **options
        )

    def step(self, *args: Any, target: Any = None, weights: Sequence[float] | None = None, **kwargs: Any) -> StepResult:
        """Loss, outputs, gradients and buffers of one step from zero gradients are the loop's."""
        sizes = split_rows(rows_of(self.model, args, kwargs, self.batch_dims), self.microbatches)
        expected = plain_step(
            self.model, args, kwargs, target=target, loss_fn=self.loss_fn, rows_of_microbatches=sizes, weights=weights,
            batch_dims=self.batch_dims, training=self.model.training, seeds=microbatch_seeds(0, self.pipe.steps, len(sizes)),
        )  # fmt: skip
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            whole = copy.deepcopy(self.model)(*args, **kwargs)
        self.model.zero_grad()
        result = self.pipe.step(*args, target=target, outputs="all", **kwargs)
        assert result.loss is not None
        assert_close_by_tensor(result.loss, expected.loss.to(result.loss.dtype), self.tolerance, "loss")
        assert_same(result.outputs, join_outputs(expected.outputs, whole, weights or sizes), self.tolerance, "outputs")
        for name, parameter in self.model.named_parameters():
            assert_close_by_tensor(parameter.grad, expected.gradients[name], self.tolerance, f"gradient of {name}")
        for name, buffer in self.model.named_buffers():
            assert_close_by_tensor(buffer, expected.buffers[name], self.tolerance, f"buffer {name}")
        return result

    def full_batch_gradients(self, *args: Any, target: Any = None, **kwargs: Any) -> None:
        """The gradients that the last step left are those of the whole batch at once: for losses that are means over rows."""
        rows = rows_of(self.model, args, kwargs, self.batch_dims)
        expected = plain_step(
            self.model, args, kwargs, target=target, loss_fn=self.loss_fn, rows_of_microbatches=(rows,),
            batch_dims=self.batch_dims, training=self.model.training,
        ).gradients  # fmt: skip
        for name, parameter in self.model.named_parameters():
            assert_close_by_tensor(parameter.grad, expected[name], self.tolerance, f"gradient of {name}, full batch")

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Outputs of an evaluation step are those of the whole batch at once; nothing of the model changes."""
        before = {name: value.clone() for name, value in self.model.state_dict().items()}
        outputs = self.pipe.eval_step(*args, **kwargs).outputs
        assert_same(outputs, plain_eval(self.model, args, kwargs), self.tolerance, "outputs of the evaluation")
        for name, value in self.model.state_dict().items():
            assert torch.equal(value, before[name]), f"an evaluation changed {name}"
        return outputs


def drawn(*shape: int, seed: int = 0) -> Tensor:
    """Float64 normal numbers, the same each time."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def drawn_integers(high: int, *shape: int, seed: int = 0) -> Tensor:
    """Integers below `high`, the same each time."""
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def layers(count: int, width: int = 4) -> nn.Sequential:
    """`count` times Linear and Tanh, float64, the same each time."""
    return seeded(lambda: nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(count)]))


def seeded(build: Any) -> Any:
    """A float64 model in training mode whose weights are the same each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build().double().train()


def begins(count: int, world_size: int) -> list[str]:
    """Module paths that cut `layers(count)` evenly."""
    return [str(round(count * stage / world_size)) for stage in range(1, world_size)]
