"""Cases 8 and 9: what crosses without a gradient or gets none, and hooks on gradients."""

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
from pdcompiler.testing import assert_close_by_tensor, plain_step
from tests.cases.against_loop import EXACT, SCHEDULES, AgainstLoop, begins, drawn, drawn_integers, layers, seeded
from tests.cases.every_cut import check_every_cut, messages
from tests.cases.test_gradients import Tied
from tests.models import token_loss

each_schedule = pytest.mark.parametrize("schedule", SCHEDULES)


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
