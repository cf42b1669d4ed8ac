"""Clipping on gloo: every rank has the norm of all, tied and replicated parameters counted once."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import pdcompiler
from pdcompiler.testing import plain_step
from tests.cases.against_loop import drawn, layers
from tests.processes.pool import Group
from tests.test_clipping import clipped

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(("ranks", "norm_type"), [(2, 2.0), (3, float("inf"))])
def test_on_gloo(pool: Callable[[int], Group], ranks: int, norm_type: float) -> None:
    pool(ranks).run(clipped, ranks, norm_type)


def norm_in_order(norm_type: float) -> None:
    """Of 7 rows in 4 microbatches; gradients are added in their order, so they are the loop's to the last bit."""
    model, x, target = layers(5, 6), drawn(7, 6), drawn(7, 6, seed=1)
    pipe = pdcompiler.compile(model, dist.get_world_size(), microbatches=4, loss_fn=F.mse_loss)
    expected = plain_step(model, (x,), {}, target=target, loss_fn=F.mse_loss, rows_of_microbatches=(2, 2, 2, 1)).gradients
    pipe.step(x, target=target)
    wanted = nn.utils.get_total_norm([gradient for gradient in expected.values() if gradient is not None], norm_type)
    assert torch.equal(pipe.clip_grad_norm_(0.1, norm_type, deterministic=True), wanted)


@pytest.mark.parametrize(("ranks", "norm_type"), [(2, 1.0), (4, 2.0)])
def test_in_the_models_order_it_is_one_processes(pool: Callable[[int], Group], ranks: int, norm_type: float) -> None:
    pool(ranks).run(norm_in_order, norm_type)


def overflow_on_one_rank() -> tuple[float, bool]:
    """The scale afterwards, and whether this rank's weights are as they were. Only rank 1's gradient is infinite."""
    pipe = pdcompiler.compile(layers(4, 6), dist.get_world_size(), microbatches=2, loss_fn=F.mse_loss, partition=["2"])
    pipe.prepare(drawn(4, 6), target=drawn(4, 6, seed=1))
    own = list(pipe.parameters())
    before = [parameter.detach().clone() for parameter in own]
    optimizer, scaler = torch.optim.SGD(own, lr=0.1), torch.amp.GradScaler("cpu", init_scale=16.0)
    if dist.get_rank() == 1:
        own[0].grad = torch.full_like(own[0], float("inf"))
    pipe.step(drawn(4, 6), target=drawn(4, 6, seed=1), scaler=scaler)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale(), all(torch.equal(a, b) for a, b in zip(own, before, strict=True))


def test_case_21_an_overflow_on_one_rank_skips_the_step_on_all(pool: Callable[[int], Group]) -> None:
    assert pool(2).run(overflow_on_one_rank) == [(8.0, True)] * 2
