"""Case 7c: an optimizer steps between a forward and its backward. What the backward reads is what its forward had.

The oracle keeps every version of every weight (`pdcompiler/oracle.py`), so a saved value that an update reached would differ.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pdcompiler
from pdcompiler.core.asynchronous import Asynchronous
from pdcompiler.testing import assert_close_by_tensor, asynchronous_steps
from tests.cases.against_loop import drawn, seeded

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1),
}
MINIBATCHES = 9


class Block(nn.Module):
    """Saves views of its weight, of its input, and a product of both; a normed weight is made of the version at hand."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(6, 6), nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.linear.weight / self.linear.weight.norm()
        return torch.tanh(F.linear(x, weight, self.linear.bias) * self.scale) + self.linear(x)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("semantics", ["stash", "vertical-sync"])
@pytest.mark.parametrize("autocast", [False, True])
def test_case_7c_an_update_between_a_forward_and_its_backward(name: str, semantics: Any, autocast: bool) -> None:
    model = seeded(lambda: nn.Sequential(Block(), Block(), Block()))
    model = model.float() if autocast else model
    type = torch.float32 if autocast else torch.float64
    minibatches = [(drawn(4, 6, seed=k).to(type), drawn(4, 6, seed=50 + k).to(type)) for k in range(MINIBATCHES)]
    # Without its cache: autocast keeps casts of weights until it is left, which the oracle's updates would not reach.
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False) if autocast else contextlib.nullcontext():
        expected = asynchronous_steps(
            list(model), minibatches, optimizer=OPTIMIZERS[name], loss_fn=F.mse_loss, semantics=semantics, model=model
        )
        pipe = pdcompiler.compile(
            model, 3, loss_fn=F.mse_loss, partition=["1", "2"], optimizer=OPTIMIZERS[name],
            schedule=Asynchronous("pipedream", vertical_sync=semantics == "vertical-sync"),
        )  # fmt: skip
        results = [pipe.step(x, target=target) for x, target in minibatches] + pipe.drain()
    losses = [result.loss for result in results if result is not None]
    tolerance = 1e-5 if autocast else 1e-12
    for number, (loss, other) in enumerate(zip(losses, expected.losses, strict=True)):
        assert loss is not None
        assert_close_by_tensor(loss, other.to(loss.dtype), tolerance, f"loss {number}")
    for key, value in expected.final_weights.items():
        assert_close_by_tensor(dict(pipe.named_parameters())[key].detach(), value, tolerance, key)
