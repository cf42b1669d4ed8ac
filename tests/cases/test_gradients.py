"""Cases 1 and 6 to 9: gradients are added to, None stays None, uses meet again, hooks fire once. Custom Functions and auxiliary
losses (7b, 12, 12b) stand in `test_functions.py`."""

from __future__ import annotations

import copy
from collections import Counter
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pdcompiler
from pdcompiler import CompileError
from pdcompiler.core import ops
from pdcompiler.testing import assert_close_by_tensor, plain_step, split_rows
from tests.cases.against_loop import EXACT, SCHEDULES, AgainstLoop, begins, drawn, drawn_integers, layers, seeded
from tests.cases.every_cut import check_every_cut, messages
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


class SignMask(nn.Module):
    """The mask is made of an activation, so it has to cross; it is float and has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        mask = (hidden.detach() > 0).to(hidden.dtype)
        result: Tensor = self.second(hidden.tanh()) * mask
        return result


@each_schedule
def test_case_8_a_float_mask_crosses_without_gradient(schedule: str) -> None:
    """A peer expects a gradient for every float that crossed."""
    model = seeded(SignMask)
    checked = AgainstLoop(model, 2, schedule, loss_fn=F.mse_loss, partition=["second"])
    checked.pipe.step(drawn(8, 4), target=drawn(8, 4, seed=1))
    upstream = [node for rank, node in messages(checked.pipe, ops.send) if node.kwargs["to"] < rank]
    assert Counter(node.meta["phase"] for node in upstream) == {"B": 4, "F": 1}, "a gradient for each microbatch, and the loss"
    check_every_cut(model, drawn(6, 4), drawn(6, 4, seed=1), F.mse_loss)


@each_schedule
def test_case_8_no_gradient_in_some_microbatches(schedule: str) -> None:
    """Microbatches that do not count send no gradient; the others' must meet their own."""
    x, target = drawn(8, 4), drawn(8, 4, seed=1)
    target[2:4] = float("nan")
    checked = AgainstLoop(
        layers(3), 3, schedule, loss_fn=F.mse_loss, loss_weight=lambda part: float(not part["target"].isnan().any()),
        partition=begins(3, 3),
    )  # fmt: skip
    checked.step(x, target=target, weights=[1 / 3, 0.0, 1 / 3, 1 / 3])


class SkipsForOneRow(nn.Module):
    """With a single row, `extra` is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.extra, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        result: Tensor = self.last(hidden + self.extra(hidden) if len(x) > 1 else hidden)
        return result


def test_case_8_a_parameter_that_only_some_microbatches_use_is_refused() -> None:
    """Python decides by the number of rows: microbatches of 2, 1 and 1 rows give different sets of gradients."""
    pipe = pdcompiler.compile(seeded(SkipsForOneRow), 2, microbatches=3, loss_fn=F.mse_loss)
    with pytest.raises(CompileError, match="other gradients or buffers for 1 rows than for 2"):
        pipe.step(drawn(4, 4), target=drawn(4, 4, seed=1))
    AgainstLoop(seeded(SkipsForOneRow), 2, microbatches=3, loss_fn=F.mse_loss).step(drawn(3, 4), target=drawn(3, 4, seed=1))


@each_schedule
def test_case_9_hooks_fire_once_a_step(schedule: str) -> None:
    """`register_post_accumulate_grad_hook` sees the whole step's gradient, once, on every stage; also of a tied weight."""
    model = seeded(Tied)
    counts: Counter[str] = Counter()
    seen: dict[str, Tensor] = {}

    def note(parameter: Tensor, name: str) -> None:
        assert parameter.grad is not None
        counts[name] += 1
        seen[name] = parameter.grad.clone()

    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(partial(note, name=name))
    pipe = pdcompiler.compile(model, 3, schedule=schedule, microbatches=4, loss_fn=token_loss)
    ids, target = drawn_integers(11, 8, 5), drawn_integers(11, 8, 5, seed=1)
    plain = copy.deepcopy(model)  # a copied parameter has no hooks
    for step in (1, 2):
        pipe.step(ids, target=target)
        assert counts == {name: step for name, _ in model.named_parameters()}
    expected = plain_step(plain, (ids,), {}, target=target, loss_fn=token_loss, rows_of_microbatches=(2, 2, 2, 2)).gradients
    for name, gradient in seen.items():
        assert expected[name] is not None
        assert_close_by_tensor(gradient, 2 * expected[name], EXACT, name)  # type: ignore[operator]


@each_schedule
def test_case_9_the_optimizer_may_step_in_the_hook(schedule: str) -> None:
    """The usual reason for such hooks: update and free each gradient as soon as it is there."""
    model, plain = layers(3), layers(3)
    x, target = drawn(6, 4), drawn(6, 4, seed=1)
    pipe = pdcompiler.compile(model, 3, schedule=schedule, microbatches=3, loss_fn=F.mse_loss)

    def update(parameter: Tensor, own: torch.optim.Optimizer) -> None:
        own.step()
        own.zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(partial(update, own=torch.optim.SGD([parameter], lr=0.1)))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(3):
        pipe.step(x, target=target)
        F.mse_loss(plain(x), target).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    for (name, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert parameter.grad is None
        assert_close_by_tensor(parameter.detach(), other.detach(), EXACT, name)
