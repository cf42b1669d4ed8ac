"""Clipping by the norm of all ranks' gradients is torch's own of the whole model."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import pdcompiler
from pdcompiler.testing import assert_close_by_tensor


class Tied(nn.Module):
    """First and last layer share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.layers[2].weight = self.layers[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def clipped(ranks: int, norm_type: float) -> None:
    """On the ranks that there are, a tied model and replicas: the norm and every gradient."""
    torch.manual_seed(0)
    model = Tied().double()
    plain = copy.deepcopy(model)
    x, target = torch.randn(6, 4).double(), torch.randn(6, 4).double()
    replicas: Any = (2, 1) if ranks == 3 else (1,) * ranks
    begins = ["layers.1"] if len(replicas) == 2 else []
    pipe = pdcompiler.compile(model, ranks, partition=begins, replicas=replicas, microbatches=3, loss_fn=nn.functional.mse_loss)
    pipe.step(x, target=target)
    nn.functional.mse_loss(plain(x), target).backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.01, norm_type)
    norm = pipe.clip_grad_norm_(0.01, norm_type)
    assert_close_by_tensor(norm, expected, 1e-12, "norm")
    wanted = dict(plain.named_parameters())
    for name, parameter in pipe.named_parameters():
        assert_close_by_tensor(parameter.grad, wanted[name].grad, 1e-12, name)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_in_one_process(ranks: int, norm_type: float) -> None:
    clipped(ranks, norm_type)
