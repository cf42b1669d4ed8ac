"""Cases 10, 11 and 21: what stands around a step in a training loop. Clipping, weights by valid tokens, 16 bits, GradScaler."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pdcompiler
from pdcompiler import CompileError
from pdcompiler.core import ops
from pdcompiler.core.ir import type_of
from pdcompiler.testing import assert_close_by_tensor
from tests.cases.against_loop import EXACT, AgainstLoop, drawn, drawn_integers, layers, seeded
from tests.cases.every_cut import messages

SCHEDULES = ("gpipe", "1f1b", "zb-h1", "zb-h2")


def of_valid_tokens(batch: dict[str, Tensor]) -> Tensor:
    return (batch["target"] != -100).sum()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_case_11_targets_ignored_unevenly(schedule: str) -> None:
    """With weights by valid tokens the gradients are the full batch's; in the third microbatch all targets are ignored."""
    model, x, target = layers(4, 6), drawn(8, 5, 6), drawn_integers(6, 8, 5)
    target[0, 1:], target[3], target[4:6] = -100, -100, -100

    def loss_fn(outputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(outputs.flatten(0, 1), labels.flatten(), ignore_index=-100)

    pipe = pdcompiler.compile(model, 2, loss_fn=loss_fn, schedule=schedule, microbatches=4, loss_weight=of_valid_tokens)
    plain = copy.deepcopy(model)
    result = pipe.step(x, target=target)
    expected = loss_fn(plain(x), target)
    expected.backward()  # type: ignore[no-untyped-call]
    assert result is not None and result.loss is not None
    assert_close_by_tensor(result.loss, expected.detach(), EXACT, "loss")
    for (name, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert_close_by_tensor(parameter.grad, other.grad, EXACT, name)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.5, float("inf")])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_case_10_the_norm_is_the_whole_models(schedule: str, norm_type: float) -> None:
    """And so is what is left of each gradient; with the norm in one process's order, to the last bit of the loop's."""
    model = layers(4, 6)
    checked = AgainstLoop(model, 2, schedule, loss_fn=F.mse_loss)
    checked.step(drawn(8, 6), target=drawn(8, 6, seed=1))
    plain = copy.deepcopy(model)
    for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
        other.grad = None if parameter.grad is None else parameter.grad.clone()
    norm = checked.pipe.clip_grad_norm_(0.01, norm_type, deterministic=True)
    assert torch.equal(norm, nn.utils.clip_grad_norm_(plain.parameters(), 0.01, norm_type))
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))  # type: ignore[arg-type]


def test_case_10_a_norm_that_is_none_is_refused() -> None:
    checked = AgainstLoop(layers(4, 6), 2, loss_fn=F.mse_loss)
    checked.step(drawn(8, 6), target=drawn(8, 6, seed=1))
    with pytest.raises(CompileError, match="norm_type is 0"):
        checked.pipe.clip_grad_norm_(1.0, 0)


class Mixed(nn.Module):
    """What autocast casts (products), and what it does not (a norm, a sum)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.norm(F.gelu(self.first(x))))
        return result


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_case_21_under_autocast(schedule: str, dtype: torch.dtype) -> None:
    """Losses, outputs, gradients: those of the loop under autocast; what crosses has the type that it has there."""
    model = seeded(lambda: nn.Sequential(Mixed(), Mixed(), Mixed())).float()
    checked = AgainstLoop(model, 2, schedule, loss_fn=F.mse_loss, tolerance=1e-6, partition=["1.norm"])
    with torch.autocast("cpu", dtype):
        for seed in range(2):
            checked.step(drawn(8, 8, seed=seed).float(), target=drawn(8, 8, seed=9).float())
    sent = [type_of(node.args[0]).dtype for _, node in messages(checked.pipe, ops.send) if node.kwargs["to"] == 1]
    assert set(sent) == {dtype}
    checked.step(drawn(8, 8).float(), target=drawn(8, 8, seed=9).float())  # and outside of it again
    sent = [type_of(node.args[0]).dtype for _, node in messages(checked.pipe, ops.send) if node.kwargs["to"] == 1]
    assert set(sent) == {torch.float32}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_case_21_a_model_of_16_bits(schedule: str) -> None:
    model = seeded(lambda: nn.Sequential(Mixed(), Mixed())).bfloat16()
    checked = AgainstLoop(model, 2, schedule, loss_fn=F.mse_loss, tolerance=1e-2, partition=["1"])
    checked.step(drawn(8, 8).bfloat16(), target=drawn(8, 8, seed=1).bfloat16())
    assert {type_of(node.args[0]).dtype for rank, node in messages(checked.pipe, ops.send)} == {torch.bfloat16}


def scaled_training(pipe: Any, model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> tuple[list[float], list[float]]:
    """Scales and losses of a loop with a GradScaler; pipe: None for plain PyTorch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    scales, losses = [], []
    for x, target in batches:
        if pipe is None:
            loss = F.mse_loss(model(x), target)
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        else:
            loss = pipe.step(x, target=target, scaler=scaler).loss
        scaler.unscale_(optimizer)
        (nn.utils if pipe is None else pipe).clip_grad_norm_(*([model.parameters(), 1.0] if pipe is None else [1.0]))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        losses.append(loss.item())
    return scales, losses


def test_case_21_a_gradient_scaler_skips_a_step_that_overflows() -> None:
    """Scale, losses and weights are plain PyTorch's, over a step whose gradients overflow."""
    batches = [(drawn(8, 8, seed=k).float(), drawn(8, 8, seed=9).float()) for k in range(5)]
    batches[2] = (batches[2][0], batches[2][1] * 1e38)
    model = seeded(lambda: nn.Sequential(Mixed(), Mixed())).float()
    plain = copy.deepcopy(model)
    pipe = pdcompiler.compile(model, 2, loss_fn=F.mse_loss, microbatches=1, partition=["1"])
    (scales, losses), (plain_scales, plain_losses) = scaled_training(pipe, model, batches), scaled_training(None, plain, batches)
    assert scales == plain_scales == [8.0, 16.0, 8.0, 8.0, 16.0]
    assert losses == pytest.approx(plain_losses, rel=1e-5, nan_ok=True)
    for (name, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert_close_by_tensor(parameter.detach(), other.detach(), 1e-5, name)


def test_case_21_a_gradient_scaler_without_flushes_is_refused() -> None:
    pipe = pdcompiler.compile(
        layers(4), 2, loss_fn=F.mse_loss, schedule="pipedream", optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1)
    )
    with pytest.raises(CompileError, match="pipedream updates inside of a step, where a GradScaler can't skip"):
        pipe.step(drawn(4, 4), target=drawn(4, 4), scaler=torch.amp.GradScaler("cpu"))
