"""A training run as users write it: GPT-2 with dropout, AdamW in groups, clipping, a warm-up, 16 bits, odd last batches.

On any ranks and schedules the losses are those of a plain loop over the same microbatches that draws from the same seeds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn

import pdcompiler
from pdcompiler.core.random_ops import microbatch_seeds
from pdcompiler.plain_draws import seeded_draws
from tests.processes.pool import Group

pytestmark = pytest.mark.processes

hf: Any = transformers
STEPS, ROWS, LENGTH, VOCABULARY, MICROBATCHES, WARM_UP = 30, 8, 12, 60, 4, 5
CONFIG = hf.GPT2Config(n_layer=4, n_embd=32, n_head=2, n_positions=16, vocab_size=VOCABULARY, use_cache=False)


def model() -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return hf.GPT2LMHeadModel(CONFIG).train()


def batches() -> Iterator[Tensor]:
    """Numbers that count up. Every fifth batch, as the last of an epoch, has five rows."""
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        first = torch.randint(VOCABULARY, (5 if step % 5 == 4 else ROWS, 1), generator=generator)
        yield (first + torch.arange(LENGTH)) % VOCABULARY


def optimizer_of(named: Iterable[tuple[str, nn.Parameter]]) -> tuple[torch.optim.Optimizer, Any]:
    """AdamW with weight decay on matrices alone, and a warm-up of the learning rate."""
    named = list(named)
    matrices, others = [p for _, p in named if p.dim() > 1], [p for _, p in named if p.dim() < 2]
    groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, weight_decay=0.1)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARM_UP))


def autocast(dtype: torch.dtype) -> Any:
    return contextlib.nullcontext() if dtype is torch.float32 else torch.autocast("cpu", dtype)


@cache
def plain(dtype: torch.dtype) -> list[float]:
    """The losses of the loop, in one process."""
    own = model()
    optimizer, warm_up = optimizer_of(own.named_parameters())
    losses = []
    for step, ids in enumerate(batches()):
        loss = torch.zeros(())
        for part, seed in zip(ids.tensor_split(MICROBATCHES), microbatch_seeds(0, step, MICROBATCHES), strict=True):
            with seeded_draws(own, seed), autocast(dtype):
                weighted = own(input_ids=part, labels=part).loss * (len(part) / len(ids))
            weighted.backward()
            loss += weighted.detach()
        nn.utils.clip_grad_norm_(own.parameters(), 0.5)
        optimizer.step()
        warm_up.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def trained(schedule: str, dtype: torch.dtype) -> list[float]:
    """The same on the ranks that there are."""
    pipe = pdcompiler.compile(model(), dist.get_world_size(), schedule=schedule, microbatches=MICROBATCHES)
    losses: list[float] = []
    optimizer: Any = None
    for ids in batches():
        with autocast(dtype):
            result = pipe.step(input_ids=ids, labels=ids)
        if optimizer is None:
            optimizer, warm_up = optimizer_of(pipe.named_parameters())
        pipe.clip_grad_norm_(0.5, deterministic=True)
        optimizer.step()
        warm_up.step()
        optimizer.zero_grad()
        assert result is not None and result.loss is not None
        losses.append(result.loss.item())
    return losses


QUICK = [(2, "1f1b", torch.float32), (3, "zb-h1", torch.bfloat16)]
ALL = [
    (ranks, schedule, dtype)
    for ranks in (1, 2, 3, 4)
    for schedule in ("gpipe", "1f1b", "interleaved", "zb-h1")
    for dtype in (torch.float32, torch.bfloat16)
]


@pytest.mark.parametrize(
    ("ranks", "schedule", "dtype"), [*QUICK, *(pytest.param(*plan, marks=pytest.mark.full) for plan in ALL if plan not in QUICK)]
)
def test_thirty_steps_are_plain_pytorchs(pool: Callable[[int], Group], ranks: int, schedule: str, dtype: torch.dtype) -> None:
    """float32: within 1e-6 over 10 steps, 1e-4 over 30. bfloat16: within its rounding, 1e-3 and 2e-2."""
    near, far = (1e-6, 1e-4) if dtype is torch.float32 else (1e-3, 2e-2)
    expected = plain(dtype)
    for number, losses in enumerate(pool(ranks).run(trained, schedule, dtype)):
        assert losses[:10] == pytest.approx(expected[:10], rel=near), f"rank {number}"
        assert losses == pytest.approx(expected, rel=far), f"rank {number}"
    assert expected[-1] < 0.95 * expected[0], "it learns"
