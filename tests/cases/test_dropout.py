"""Case 24: dropout. Plain PyTorch that draws from the same seeds gives the same numbers, for any partition and schedule."""

from __future__ import annotations

import random
from typing import Any

import numpy
import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn import functional as F

import pdcompiler
from pdcompiler import CompileError
from pdcompiler.given_schedule import SEVERAL
from pdcompiler.testing import assert_transparent
from tests.cases.against_loop import AgainstLoop, drawn, layers, seeded

PLANS = [(1, "1f1b"), (2, "gpipe"), (3, "zb-h1"), (4, "1f1b"), (2, "interleaved"), (2, "dualpipe-v")]


class Draws(nn.Module):
    """Draws of many kinds, two of them of one module call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop, self.alpha, self.leaky = nn.Linear(8, 8), nn.Dropout(0.3), nn.AlphaDropout(0.2), nn.RReLU()

    def forward(self, x: Tensor) -> Tensor:
        x = self.leaky(self.alpha(self.drop(self.linear(self.drop(x)))))
        heads = x.reshape(-1, 1, 2, 4)
        x = F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.4 if self.training else 0.0).reshape(x.shape)
        mask, order = torch.bernoulli(torch.full_like(x, 0.5)), torch.randperm(8)
        return x * F.gumbel_softmax(x, dim=-1) + mask * x[:, order] + 0.1 * torch.randn_like(x)


def drawing() -> Any:
    return seeded(lambda: nn.Sequential(nn.Linear(8, 8), Draws(), nn.Tanh(), nn.Linear(8, 8), Draws()))


def losses_of(ranks: int, schedule: str, steps: int = 3, seed: int = 0) -> list[float]:
    """Of a few steps of SGD; torch's own generator moves between them."""
    model = drawing()
    stages = ranks * (2 if schedule in SEVERAL else 1)
    begins = ["1", "2", "4"] if stages == 4 else ["1", "3"][: stages - 1]
    pipe = pdcompiler.compile(model, ranks, loss_fn=F.mse_loss, microbatches=4, partition=begins, schedule=schedule, seed=seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for _ in range(steps):
        result = pipe.step(drawn(8, 8), target=drawn(8, 8, seed=1))
        assert result is not None and result.loss is not None
        found.append(result.loss.item())
        optimizer.step()
        optimizer.zero_grad()
        torch.rand(1)
    return found


def test_case_24_losses_are_the_same_for_any_partition_and_schedule() -> None:
    expected = losses_of(1, "1f1b")
    assert len(set(expected)) == 3
    for ranks, schedule in PLANS[1:]:
        assert losses_of(ranks, schedule) == expected, (ranks, schedule)
    assert losses_of(2, "1f1b", seed=1) != expected


@pytest.mark.parametrize(("ranks", "schedule"), PLANS)
def test_case_24_plain_pytorch_with_the_same_seeds_is_equal(ranks: int, schedule: str) -> None:
    """Step after step, with rows that change; nothing is drawn from torch's own generator."""
    model = drawing()
    begins = {1: [], 2: ["1"], 3: ["1", "3"], 4: ["1", "2", "4"]}[ranks * (2 if schedule in SEVERAL else 1)]
    checked = AgainstLoop(model, ranks, schedule, loss_fn=F.mse_loss, partition=begins)
    for rows in (8, 7, 8):
        x, target = drawn(rows, 8), drawn(rows, 8, seed=1)
        before = torch.get_rng_state()
        checked.pipe.verify(x, target=target)
        assert torch.equal(torch.get_rng_state(), before)
        checked.step(x, target=target)


class Quiet(nn.Module):
    """Dropout alone, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.drop = layers(4), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.drop(self.layers(self.drop(x)))
        return result


def test_case_24_an_evaluation_draws_nothing() -> None:
    checked = AgainstLoop(seeded(Quiet), 2, loss_fn=F.mse_loss, partition=["layers.2"])
    checked.step(drawn(6, 4), target=drawn(6, 4, seed=1))
    outputs = [checked.evaluate(drawn(5, 4)) for _ in range(2)]
    assert torch.equal(outputs[0], outputs[1])
    checked.pipe.eval()  # a step without dropout
    checked.step(drawn(6, 4), target=drawn(6, 4, seed=1))


class Checkpointed(nn.Module):
    """Dropout inside of a torch.utils.checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.utils.checkpoint.checkpoint(self.inner, self.first(x), use_reentrant=False)
        result: Tensor = self.last(hidden)
        return result


@pytest.mark.filterwarnings("ignore:torch.utils.checkpoint inside the model")
def test_case_24_a_checkpoints_backward_has_its_forwards_mask() -> None:
    pipe = pdcompiler.compile(seeded(Checkpointed), 2, loss_fn=F.mse_loss, partition=["last"], microbatches=2)
    x, target = drawn(4, 4), drawn(4, 4, seed=1)
    model = pipe.request.model
    pipe.step(x, target=target)
    mask = [torch.any(parameter.grad != 0) for parameter in model.parameters() if parameter.grad is not None]
    assert all(mask)
    pipe.verify(x, target=target)


def test_case_24_without_flushes_each_minibatch_has_its_own() -> None:
    """At learning rate 0 weights stay, so the losses are those of a schedule with flushes, one microbatch a step."""

    def losses(schedule: str, **options: Any) -> list[float]:
        model = seeded(Quiet)
        pipe = pdcompiler.compile(
            model, 3, loss_fn=F.mse_loss, partition=["layers.1", "layers.3"], schedule=schedule,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0), **options,
        )  # fmt: skip
        found = [pipe.step(drawn(6, 4, seed=k), target=drawn(6, 4, seed=9)) for k in range(6)] + pipe.drain()
        return [result.loss.item() for result in found if result is not None and result.loss is not None]

    assert losses("pipedream") == losses("1f1b", microbatches=1)
    assert losses("pipedream-2bw", microbatches=3) == pytest.approx(losses("1f1b", microbatches=3), rel=1e-12)


class Rolls(nn.Module):
    """A forward that draws a number outside of torch."""

    def __init__(self, roll: Any) -> None:
        super().__init__()
        self.layers, self.roll = layers(2), roll

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(x) * float(self.roll())
        return result


@pytest.mark.parametrize(("roll", "name"), [(random.random, "Python's random"), (numpy.random.rand, "numpy")])
def test_case_24_numbers_drawn_outside_of_torch_are_refused(roll: Any, name: str) -> None:
    """A trace would keep the first one for ever, silently."""
    pipe = pdcompiler.compile(seeded(lambda: Rolls(roll)), 2, loss_fn=F.mse_loss)
    with pytest.raises(CompileError, match=f"draws numbers from {name}"):
        pipe.prepare(drawn(4, 4), target=drawn(4, 4))


def test_case_24_gpt2_with_dropout() -> None:
    """In embeddings, attention and residuals, as its configuration has it."""
    import transformers

    hf: Any = transformers
    config = hf.GPT2Config(n_layer=2, n_embd=16, n_head=2, n_positions=16, vocab_size=50, use_cache=False)
    model = seeded(lambda: hf.GPT2LMHeadModel(config))
    ids = torch.randint(50, (4, 8), generator=torch.Generator().manual_seed(0))
    assert_transparent(model, input_ids=ids, labels=ids, schedule="zb-h1", microbatches=2, tolerance=1e-6)
