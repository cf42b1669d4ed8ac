"""Weights with several holders: gradients summed over them, every holder's bits the same after every optimizer step."""

import copy
from collections.abc import Callable, Iterable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import pdcompiler
from pdcompiler.pipeline import Pipeline
from pdcompiler.testing import assert_close_by_tensor, plain_step, split_rows
from tests.models import ZOO, Example
from tests.processes.checks import compile_example
from tests.processes.pool import Group

pytestmark = pytest.mark.processes

Optimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1)


def train(pipe: Pipeline, example: Example, plan: list[tuple[Optimizer, int]]) -> list[dict[str, bytes]]:
    """Steps beside plain PyTorch, weights compared after each; gives the bits of this rank's weights after each step."""
    plain = copy.deepcopy(example.model)
    history = []
    pipe.prepare(*example.args, target=example.target, **example.kwargs)
    for make, steps in plan:
        ours, theirs = make(pipe.parameters()), make(plain.parameters())
        for _ in range(steps):
            gradients = plain_step(
                plain, example.args, example.kwargs, target=example.target, loss_fn=example.loss_fn,
                rows_of_microbatches=split_rows(8, 4),
            ).gradients  # fmt: skip
            for name, parameter in plain.named_parameters():
                parameter.grad = gradients[name]
            theirs.step()
            pipe.zero_grad()
            pipe.step(*example.args, target=example.target, **example.kwargs)
            ours.step()
            expected = dict(plain.named_parameters())
            for name, parameter in pipe.named_parameters():
                assert_close_by_tensor(parameter.detach(), expected[name].detach(), example.tolerance, name)
            history.append({name: parameter.detach().numpy().tobytes() for name, parameter in pipe.named_parameters()})
    return history


def train_gpt2() -> list[dict[str, bytes]]:
    example = ZOO["gpt2"]()
    return train(compile_example(example), example, [(sgd, 3), (adamw, 20)])


def test_gpt2_with_sgd_and_then_adamw_is_plain_pytorchs(pool: Callable[[int], Group]) -> None:
    """The embedding is the head's weight; a copy that drifts apart would still train."""
    first, last = pool(2).run(train_gpt2)
    assert len(first) == len(last) == 23
    assert [step["transformer.wte.weight"] for step in first] == [step["transformer.wte.weight"] for step in last]
    assert set(first[0]) & set(last[0]) == {"transformer.wte.weight"}


class SharedLinear(nn.Module):
    """One Linear on three stages, with a layer of its own on each."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(4, 4)
        self.own = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, hidden: Tensor) -> Tensor:
        for own in self.own:
            hidden = torch.tanh(self.shared(own(hidden)))
        return hidden


def train_shared() -> list[dict[str, bytes]]:
    torch.manual_seed(0)
    model = SharedLinear().double()
    rows, target = torch.randn(8, 4, dtype=torch.float64), torch.randn(8, 4, dtype=torch.float64)
    example = Example("shared", model, (rows,), target=target, loss_fn=F.mse_loss)
    cuts = ["own.1", "own.2"]
    pipe = pdcompiler.compile(model, dist.get_world_size(), loss_fn=F.mse_loss, microbatches=4, partition=cuts)
    return train(pipe, example, [(sgd, 3), (adamw, 5)])


def test_a_layer_on_three_stages_stays_one_layer(pool: Callable[[int], Group]) -> None:
    histories = pool(3).run(train_shared)
    for steps in zip(*histories, strict=True):
        assert {name for step in steps for name in step if name.startswith("shared")} == {"shared.weight", "shared.bias"}
        assert len({step["shared.weight"] for step in steps}) == 1
        assert len({step["shared.bias"] for step in steps}) == 1
