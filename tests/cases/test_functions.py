"""Cases 7, 7b, 12 and 12b: backwards that users write themselves, auxiliary losses, detach, no_grad and checkpoints."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import pdcompiler
from pdcompiler import CompileError
from tests.cases.against_loop import SCHEDULES, AgainstLoop, drawn, seeded
from tests.cases.every_cut import check_every_cut
from tests.models import ZOO, Example

each_schedule = pytest.mark.parametrize("schedule", SCHEDULES)
x, target = drawn(6, 4), drawn(6, 4, seed=1)


class StraightThrough(torch.autograd.Function):
    """Rounds; its gradient is not that of rounding, which is 0."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return 3 * gradient


class Clipped(torch.autograd.Function):
    """The identity; its gradient is no linear function of the loss's, so the microbatch's weight has to come first."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient.clamp(-0.01, 0.01)


class Layers(nn.Module):
    """What the models of this file are made of."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)


class Quantised(Layers):
    """Straight-through rounding, clipped gradients, a scale made under no_grad, and a detached skip."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = StraightThrough.apply(4 * self.first(x))
        with torch.no_grad():
            scale = self.second(hidden).norm(dim=-1, keepdim=True)
        hidden = Clipped.apply(self.second(hidden) / scale) + hidden.detach()
        result: Tensor = self.last(hidden)
        return result


def test_case_7_and_12b_custom_functions_detach_and_no_grad() -> None:
    """Tracers built on torch.export drop a custom backward, silently: gradient 0 instead of 58.4."""
    model = seeded(Quantised)
    check_every_cut(model, x, target, F.mse_loss)
    assert model.first.weight.grad.abs().max() > 1e-4


@each_schedule
def test_case_12b_a_clipped_gradient_of_uneven_microbatches(schedule: str) -> None:
    """A weight applied after the backward, not before it, would clip another gradient; 7 rows in 4 microbatches."""
    AgainstLoop(seeded(Quantised), 3, schedule, loss_fn=F.mse_loss).step(drawn(7, 4), target=drawn(7, 4, seed=1))


class Checkpointed(Layers):
    """A user's checkpoint in the middle."""

    def __init__(self, use_reentrant: bool = False) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(lambda h: self.second(h.tanh()).tanh(), self.first(x), use_reentrant=self.use_reentrant)
        result: Tensor = self.last(hidden)
        return result


def test_case_12b_checkpoint_is_exact_and_says_that_it_saves_nothing() -> None:
    """A user-written checkpoint leaves no mark in a joint graph: right values, but the memory saving is gone; a warning."""
    with pytest.warns(UserWarning, match=r"torch\.utils\.checkpoint inside the model: values are right"):
        check_every_cut(seeded(Checkpointed), x, target, F.mse_loss)


def test_case_12b_a_reentrant_checkpoint_is_refused_with_the_way_out() -> None:
    """It runs an autograd engine inside the backward, which can't be recorded."""
    pipe = pdcompiler.compile(Checkpointed(use_reentrant=True).double(), 2, loss_fn=F.mse_loss)
    with warnings.catch_warnings(), pytest.raises(CompileError, match="use_reentrant=False"):
        warnings.simplefilter("ignore")  # autograd's own, about the anomaly
        pipe.step(x, target=target)


class Inject(torch.autograd.Function):
    """Gives `auxiliary` the gradient of `0.1 * auxiliary`, whatever the loss: how routers are balanced."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, auxiliary: Tensor) -> Tensor:
        ctx.save_for_backward(auxiliary)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return gradient, 0.1 * torch.ones_like(ctx.saved_tensors[0])


class Router(Layers):
    """Gates that the loss reaches too; or, detached, gates whose only gradient is the injected one."""

    def __init__(self, detached: bool = False) -> None:
        super().__init__()
        self.detached = detached

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        gates = self.second(hidden.detach() if self.detached else hidden).softmax(-1)
        auxiliary = gates.mean(0).square().sum()
        hidden = Inject.apply(hidden * (gates.detach() if self.detached else gates), auxiliary)
        result: Tensor = self.last(hidden)
        return result


@pytest.mark.parametrize("detached", [False, True])
def test_case_7b_an_injected_gradient_is_that_of_the_loop(detached: bool) -> None:
    """It depends on no loss: backward operations may not be told from the loss's weight. With a warning."""
    with pytest.warns(UserWarning, match="a gradient that does not depend on the loss enters the backward") as told:
        check_every_cut(seeded(lambda: Router(detached)), x, target, F.mse_loss)
    assert f"({__file__}:" in str(told[0].message), "the line of Inject.backward"


class InjectForParameter(torch.autograd.Function):
    """Gives a parameter that its forward does not read a gradient that is no operation of the backward."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor, kind: str) -> Tensor:
        ctx.save_for_backward({"weight": weight, "forward": value.detach().sum(0)}[kind])
        return 2 * value

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        return 2 * gradient, ctx.saved_tensors[0], None


class Beside(Layers):
    """A parameter beside the path of the loss."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.scale = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.second(InjectForParameter.apply(self.first(x).tanh(), self.scale, self.kind)))
        return result


@pytest.mark.parametrize("kind", ["weight", "forward"])
def test_case_7b_a_saved_value_as_the_gradient(kind: str) -> None:
    """Weight decay as a Function: the gradient is the weight itself, or a value of the forward."""
    with pytest.warns(UserWarning, match="does not depend on the loss"):
        check_every_cut(seeded(lambda: Beside(kind)), x, target, F.mse_loss, stages=(3,), at_most=6)


class ZeroGradients(Layers):
    """Rounding, a sign and a comparison have gradient zero everywhere."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        steps = self.second(hidden).round() + self.second(hidden).sign()
        result: Tensor = self.last(hidden + steps * (hidden > 0) + torch.where(hidden > 0, hidden.floor(), hidden))
        return result


def test_case_7b_zero_gradients_are_not_injected_ones() -> None:
    """They do not depend on the loss either; nobody needs to be told."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        check_every_cut(seeded(ZeroGradients), x, target, F.mse_loss, at_most=4)


@pytest.mark.parametrize("name", ["gpt2", "resnet", pytest.param("t5", marks=pytest.mark.full)])
def test_case_7b_and_12b_ordinary_models_get_no_warning(name: str) -> None:
    """A warning that everyone sees is read by nobody."""
    example: Example = ZOO[name]()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        pipe = pdcompiler.compile(example.model, 2, example_args=example.args, example_kwargs=example.kwargs, microbatches=2)
    assert pipe.partition.stages[1].parameters


class Auxiliary(Layers):
    """A mixture's router in the middle: its loss is an output, kept as an attribute, or both."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.first(x).tanh()
        gates = self.second(hidden).softmax(-1)
        self.balance = gates.mean(0).square().sum()
        result = self.last(hidden * gates)
        return {"result": result, "entropy": -(gates * gates.log()).sum(-1).mean()}


def total_loss(outputs: dict[str, Tensor], target: Tensor) -> Tensor:
    return F.mse_loss(outputs["result"], target) + 0.1 * outputs["entropy"]


def test_case_12_auxiliary_losses_of_middle_stages_join_the_total() -> None:
    """A loss made on a middle stage, wherever that begins, counts as in plain PyTorch."""
    check_every_cut(seeded(Auxiliary), x, target, total_loss)


class OwnLoss(nn.Module):
    """Adds up what its parts left behind as attributes, as mixtures of experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Auxiliary() for _ in range(3))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        for part in self.parts:
            x = part(x)["result"].tanh() + x
        return {"loss": F.mse_loss(x, labels) + 0.1 * sum(part.balance for part in self.parts), "hidden": x}


@each_schedule
@pytest.mark.parametrize("world_size", [2, 3])
def test_case_12_auxiliary_losses_kept_as_attributes(schedule: str, world_size: int) -> None:
    """They join inside the model's own loss; compiling leaves no value behind in the attribute."""
    model = seeded(OwnLoss)
    checked = AgainstLoop(model, world_size, schedule, partition=[f"parts.{i}" for i in range(1, world_size)])
    checked.step(drawn(8, 4), labels=drawn(8, 4, seed=1))
    assert not any(hasattr(part, "balance") for part in model.parts)
