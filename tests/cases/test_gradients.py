"""Cases 1, 6 and 7: gradients are added to, None stays None, uses meet again. Cases 7b, 12 and 12b: `test_functions.py`; 8 and 9:
`test_hooks.py`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pdcompiler
from pdcompiler import CompileError
from pdcompiler.testing import assert_close_by_tensor, plain_step, split_rows
from tests.cases.against_loop import EXACT, SCHEDULES, AgainstLoop, drawn, drawn_integers, layers, seeded
from tests.cases.every_cut import check_every_cut
from tests.models import token_loss

each_schedule = pytest.mark.parametrize("schedule", SCHEDULES)


class Tied(nn.Module):
    """Tokens of any length; the embedding is the head's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.second(self.first(self.embed(ids)).tanh()).tanh())
        return logits


@each_schedule
@pytest.mark.parametrize("world_size", [2, 3])
def test_case_1_steps_without_zeroing_add_up(schedule: str, world_size: int) -> None:
    """A peer rescales `.grad` in place, so that two steps give 1.25 x one step instead of 2 x; here 3, of two lengths."""
    model = seeded(Tied)
    pipe = pdcompiler.compile(model, world_size, schedule=schedule, microbatches=4, loss_fn=token_loss)
    total: dict[str, Tensor] = {}
    for number, length in enumerate([5, 3, 5]):
        ids, target = drawn_integers(11, 8, length, seed=number), drawn_integers(11, 8, length, seed=9 + number)
        expected = plain_step(model, (ids,), {}, target=target, loss_fn=token_loss, rows_of_microbatches=split_rows(8, 4))
        pipe.step(ids, target=target)
        for name, parameter in model.named_parameters():
            gradient = expected.gradients[name]
            assert gradient is not None
            total[name] = total[name] + gradient if number else gradient
            assert_close_by_tensor(parameter.grad, total[name], EXACT, f"{name} after step {number}")


@each_schedule
def test_case_1_a_step_adds_to_what_the_user_put_there(schedule: str) -> None:
    """A step that overwrites or rescales `.grad` loses what was there; plain PyTorch adds to the same tensor."""
    model = layers(3)
    x, target = drawn(6, 4), drawn(6, 4, seed=1)
    expected = plain_step(model, (x,), {}, target=target, loss_fn=F.mse_loss, rows_of_microbatches=(2, 2, 2)).gradients
    pipe = pdcompiler.compile(model, 3, schedule=schedule, microbatches=3, loss_fn=F.mse_loss)
    own = {name: torch.full_like(parameter, 0.5) for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.grad = own[name]
    pipe.step(x, target=target)
    for name, parameter in model.named_parameters():
        assert parameter.grad is own[name], name
        assert_close_by_tensor(parameter.grad - 0.5, expected[name], 1e-10, name)
    pipe.zero_grad(set_to_none=False)
    assert not any(gradient.any() for gradient in own.values())
    pipe.step(x, target=target)
    for name, gradient in own.items():
        assert_close_by_tensor(gradient, expected[name], EXACT, f"{name}, zeroed")


class EqualGradients(nn.Module):
    """Both biases get one and the same gradient, and `scale`, which is added to the loss, the loss's own weight."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.one, self.other = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))
        self.scale = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x).tanh() + self.one + self.other, self.scale


def loss_with_scale(outputs: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return F.mse_loss(outputs[0], target) + outputs[1]


def test_case_1_no_two_gradients_share_memory() -> None:
    """A gradient stored by reference and then added to would change another parameter's."""
    model = seeded(EqualGradients)
    pipe = pdcompiler.compile(model, 2, microbatches=1, loss_fn=loss_with_scale)
    x, target = drawn(6, 4), drawn(6, 4, seed=1)
    expected = plain_step(model, (x,), {}, target=target, loss_fn=loss_with_scale, rows_of_microbatches=(6,)).gradients
    pipe.step(x, target=target)
    model.one.grad.mul_(0)  # type: ignore[union-attr]
    assert_close_by_tensor(model.other.grad, expected["other"], EXACT, "other")
    model.zero_grad()
    pipe.step(x, target=target)
    for name, parameter in model.named_parameters():
        assert_close_by_tensor(parameter.grad, expected[name], EXACT, name)


class Unused(nn.Module):
    """Before, between and behind what is used: a parameter, a module whose result nobody reads, and one never called."""

    def __init__(self) -> None:
        super().__init__()
        self.dead = nn.Parameter(torch.ones(3))
        self.first = nn.Linear(4, 4)
        self.ignored = nn.Linear(4, 4)
        self.middle = nn.Linear(4, 4)
        self.never = nn.Linear(2, 2)
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        self.ignored(hidden)
        result: Tensor = self.last(self.middle(hidden).tanh() + self.ignored(hidden).detach())
        return result


def test_case_6_unused_parameters_have_no_gradient() -> None:
    """A None among the gradients must not shift those behind it to the wrong parameter."""
    model = seeded(Unused)
    check_every_cut(model, drawn(6, 4), drawn(6, 4, seed=1), F.mse_loss, at_most=9)
    without = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    assert without == {"dead", "ignored.weight", "ignored.bias", "never.weight", "never.bias"}


class Criterion(nn.Module):
    """A loss with weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(4, 4)

    def forward(self, outputs: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(self.project(outputs), target)


def test_case_6_a_trainable_tensor_of_nobody_is_refused() -> None:
    """A closure's or an unregistered parameter would be a constant of the program: no gradient, silently."""
    criterion = seeded(Criterion)
    pipe = pdcompiler.compile(layers(2), 2, loss_fn=lambda outputs, target: criterion(outputs, target))
    with pytest.raises(CompileError, match=r"depends on a trainable tensor of shape \[4, 4\] that is no parameter of the model"):
        pipe.step(drawn(6, 4), target=drawn(6, 4, seed=1))

    def distilled(outputs: Tensor, target: Tensor) -> Tensor:
        with torch.no_grad():
            taught = criterion.project(target)
        return F.mse_loss(outputs, taught)

    AgainstLoop(layers(2), 2, loss_fn=distilled).step(drawn(6, 4), target=drawn(6, 4, seed=1))


class MeetAgain(nn.Module):
    """A weight used twice on one path, and chunks of one value that meet again."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(4, 8)
        self.gate = nn.Linear(4, 4)
        self.twice = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.wide(x).chunk(2, -1)
        hidden = self.gate(left).tanh() * right + left
        result: Tensor = self.twice(torch.tanh(self.twice(hidden))) + right
        return result


def test_case_7_uses_that_meet_again() -> None:
    """`l(tanh(l(x)))` and the parts of a chunk: each use adds its gradient, wherever the stages begin."""
    check_every_cut(seeded(MeetAgain), drawn(6, 4), drawn(6, 4, seed=1), F.mse_loss)
