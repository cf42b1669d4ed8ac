"""Cases 2 to 4: tied, shared and reparametrised parameters. Bit-equality of a tied weight's holders in processes of their own
stands in tests/processes/; case 5 in `test_frozen.py`."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.parametrizations import weight_norm

import pdcompiler
from pdcompiler.core import ops
from pdcompiler.testing import assert_close_by_tensor, plain_step, split_rows
from tests.cases.against_loop import EXACT, SCHEDULES, drawn, drawn_integers, seeded
from tests.cases.every_cut import check_every_cut, messages
from tests.models import gpt2, token_loss

each_schedule = pytest.mark.parametrize("schedule", SCHEDULES)
x, target = drawn(6, 4), drawn(6, 4, seed=1)
ids, next_ids = drawn_integers(11, 6, 5), drawn_integers(11, 6, 5, seed=1)


def logits_loss(outputs: Any, target: Tensor) -> Tensor:
    """In float64, unlike the model's own."""
    return token_loss(outputs.logits, target)


def groups(named: Any) -> list[dict[str, Any]]:
    """Weight decay for matrices only, chosen by name as users do."""
    named = dict(named)
    plain = [p for name, p in named.items() if name.endswith("bias") or "ln_" in name]
    return [{"params": [p for p in named.values() if p.dim() > 1]}, {"params": plain, "weight_decay": 0.0}]


@pytest.mark.parametrize(
    ("world_size", "schedule"), [(2, "1f1b"), (3, "gpipe"), pytest.param(4, "1f1b", marks=pytest.mark.full)]
)
def test_case_2_tied_embedding_through_sgd_and_adamw(world_size: int, schedule: str) -> None:
    """A peer's copies of a tied weight drift apart by 0.13, silently: 3 SGD steps, then 20 of AdamW with weight decay."""
    example = gpt2()
    model, plain = example.model, copy.deepcopy(example.model)
    given, labels = example.kwargs["input_ids"], example.kwargs["labels"]
    pipe = pdcompiler.compile(model, world_size, schedule=schedule, microbatches=4, loss_fn=logits_loss)
    pipe.prepare(given, target=labels)
    tied = dict(pipe.named_parameters())["transformer.wte.weight"]
    holders = pipe.partition.owners()["transformer.wte.weight"]
    assert holders[0] == 0 and holders[-1] == world_size - 1 and tied is model.get_parameter("lm_head.weight")
    ours: torch.optim.Optimizer = torch.optim.SGD(groups(pipe.named_parameters()), lr=0.1, weight_decay=0.1)
    theirs: torch.optim.Optimizer = torch.optim.SGD(groups(plain.named_parameters()), lr=0.1, weight_decay=0.1)
    for step in range(23):
        if step == 3:
            ours = torch.optim.AdamW(groups(pipe.named_parameters()), lr=3e-3, weight_decay=0.1)
            theirs = torch.optim.AdamW(groups(plain.named_parameters()), lr=3e-3, weight_decay=0.1)
        pipe.step(given, target=labels)
        for part, part_labels in zip(given.split(2), labels.split(2), strict=True):
            (logits_loss(plain(part), part_labels) / 4).backward()  # type: ignore[no-untyped-call]
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    for (name, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert_close_by_tensor(parameter.detach(), other.detach(), EXACT, name)


class Shared(nn.Module):
    """One Linear runs at the beginning, in the middle and at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.shared = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.shared(self.second(self.shared(self.first(self.shared(x)).tanh())).tanh())
        return result


class SharedInSequence(nn.Sequential):
    """The same module at three places of a Sequential, so its calls are in different stages."""

    def __init__(self) -> None:
        shared = nn.Linear(4, 4)
        super().__init__(shared, nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), shared, nn.Tanh(), shared)


class UsedByTheRoot(nn.Module):
    """A weight that the model's own forward uses at three places; once as it is, once transposed, once as a value of both."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(F.linear(x, self.weight)).tanh()
        hidden = self.second(hidden @ self.weight).tanh()
        return F.linear(hidden, self.weight @ self.second.weight)


class OneUseDetached(Shared):
    """Of the shared module's three uses, only the last gives a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            hidden = self.shared(x)
        hidden = self.first(hidden).tanh() + F.linear(hidden, self.shared.weight.detach())
        result: Tensor = self.shared(self.second(hidden).tanh())
        return result


class Reparametrised(nn.Module):
    """Weight norm: weights that are made of parameters; `first` is used at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = weight_norm(nn.Linear(4, 4)), weight_norm(nn.Linear(4, 4))
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.first(self.second(self.first(x).tanh()).tanh()) * self.scale
        return result


@pytest.mark.parametrize("build", [Shared, SharedInSequence, UsedByTheRoot, OneUseDetached, Reparametrised])
def test_case_3_a_weight_of_several_stages(build: Callable[[], nn.Module]) -> None:
    """Each stage that uses a weight adds its part, wherever the stages begin, also between a weight and what is made of it."""
    check_every_cut(seeded(build), x, target, F.mse_loss)


class Tied(nn.Module):
    """The head is the embedding: by its weight, transposed, or as a contiguous copy."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.second(self.first(self.embed(ids)).tanh()).tanh()
        return F.linear(hidden, self.embed.weight) + hidden @ self.embed.weight.t().contiguous()


def test_case_3_a_head_tied_without_a_second_name() -> None:
    """`F.linear(h, self.embed.weight)`: one name, several stages, no module call of the owner's."""
    check_every_cut(seeded(Tied), ids, next_ids, token_loss)


@each_schedule
def test_case_3_tied_under_autocast(schedule: str) -> None:
    """Casts of a tied weight are values of each stage; its gradients are summed in the weight's own type, not in bfloat16."""
    model = seeded(Tied).float()
    with torch.autocast("cpu", torch.bfloat16):
        expected = plain_step(model, (ids,), {}, target=next_ids, loss_fn=token_loss, rows_of_microbatches=(2, 2, 2))
        pipe = pdcompiler.compile(model, 3, schedule=schedule, microbatches=3, loss_fn=token_loss)
        result = pipe.step(ids, target=next_ids)
    assert len(pipe.partition.owners()["embed.weight"]) > 1
    assert result.loss is not None
    assert_close_by_tensor(result.loss, expected.loss.to(result.loss.dtype), 1e-6, "loss")
    for name, parameter in model.named_parameters():
        assert_close_by_tensor(parameter.grad, expected.gradients[name], 2**-7, name)  # bfloat16 has 8 bits


class TiedTwice(nn.Module):
    """Two tied sets: the embedding with the head, and one Linear at three places."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 4), nn.Linear(4, 11, bias=False)
        self.head.weight = self.embed.weight
        self.shared = Shared()

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.shared(self.embed(ids)).tanh())
        return logits


def test_case_3_groups_by_name_hold_a_tied_weight_alike() -> None:
    """A holder that knew the weight as `head.weight` would put it in another group than the one that calls it `embed.weight`."""
    model = seeded(TiedTwice)
    pipe = pdcompiler.compile(model, 3, example_args=(ids,), loss_fn=token_loss, partition=["shared.first", "shared.second"])
    first, middle, last = (set(stage.parameters) for stage in pipe.partition.stages)
    assert "embed.weight" in first & last and {"shared.shared.weight", "shared.shared.bias"} <= first & middle & last
    assert "head.weight" not in first | last
    assert [name for name, _ in pipe.named_parameters()].count("embed.weight") == 1
    assert set(pipe.state_dict()) == set(model.state_dict()) and "head.weight" in pipe.state_dict()


class OutputsAndPenalty(nn.Module):
    """Returns parameters, views of them and a penalty on all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.offset = nn.Linear(4, 4), nn.Linear(4, 4), nn.Parameter(torch.randn(()))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        penalty = sum((p.norm() for p in self.parameters()), torch.zeros((), dtype=x.dtype))
        result = self.second(self.first(x).tanh())
        return result, penalty + self.offset, self.first.weight, self.first.weight.t()[1:], self.second.bias, x


def penalised(outputs: tuple[Tensor, ...], target: Tensor) -> Tensor:
    return F.mse_loss(outputs[0], target) + 0.1 * outputs[1]


def test_case_3_parameters_as_outputs_and_in_the_loss() -> None:
    """Regularisation reads every weight once more, on the stage of the loss or on the weight's own."""
    check_every_cut(seeded(OutputsAndPenalty), x, target, penalised)


def test_case_3_a_loss_function_that_reads_parameters() -> None:
    """`loss_fn` closes over the model: its weights are the step's, not constants of the trace."""
    model = seeded(Shared)

    def loss_fn(outputs: Tensor, target: Tensor, of: nn.Module = model) -> Tensor:
        return F.mse_loss(outputs, target) + 0.1 * of.first.weight.square().sum()  # type: ignore[operator, union-attr]

    pipe = pdcompiler.compile(model, 2, microbatches=3, loss_fn=loss_fn)
    for _ in range(2):
        plain = copy.deepcopy(model)
        loss_fn(plain(x), target, plain).backward()  # type: ignore[no-untyped-call]
        model.zero_grad()
        pipe.step(x, target=target)
        for (name, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert_close_by_tensor(parameter.grad, other.grad, EXACT, name)
            parameter.data.mul_(0.5)


@each_schedule
@pytest.mark.parametrize("microbatches", [1, 4])
def test_case_4_one_reduction_per_tied_set_and_step(schedule: str, microbatches: int) -> None:
    """A reduction for each microbatch, or for each parameter apart, costs messages; a norm must count a tied weight once."""
    model = seeded(TiedTwice)
    partition = ["shared.first", "shared.second"]
    pipe = pdcompiler.compile(model, 3, schedule=schedule, microbatches=microbatches, loss_fn=token_loss, partition=partition)
    pipe.step(ids, target=next_ids)
    holders = {name: stages for name, stages in pipe.partition.owners().items() if len(stages) > 1}
    assert holders == {"embed.weight": (0, 2), "shared.shared.weight": (0, 1, 2), "shared.shared.bias": (0, 1, 2)}
    started = [*messages(pipe, ops.all_reduce), *messages(pipe, ops.start_all_reduce)]
    reductions = Counter((rank, node.kwargs["ranks"]) for rank, node in started)
    assert reductions == {(0, (0, 2)): 1, (2, (0, 2)): 1, **{(rank, (0, 1, 2)): 1 for rank in range(3)}}
    sizes = split_rows(6, microbatches)
    expected = plain_step(model, (ids,), {}, target=next_ids, loss_fn=token_loss, rows_of_microbatches=sizes).gradients
    whole = torch.stack([gradient.norm() for gradient in expected.values() if gradient is not None]).norm()
    assert_close_by_tensor(clip_grad_norm_(pipe.parameters(), 0.01), whole, EXACT, "norm")
    pipe.eval_step(ids)
    assert not messages(pipe, ops.all_reduce) and not messages(pipe, ops.start_all_reduce)
