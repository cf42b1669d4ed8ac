"""Cases 3, 7 and 9 once more: Functions of every form, gradients inside of forward, loops over time, hooks in the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pdcompiler
from pdcompiler import CompileError
from pdcompiler.testing import assert_close_by_tensor, plain_step
from tests.cases.against_loop import EXACT, drawn, drawn_integers, seeded
from tests.cases.every_cut import check_every_cut
from tests.cases.test_functions import Layers, target, x
from tests.models import token_loss

ids, next_ids = drawn_integers(11, 6, 3), drawn_integers(11, 6, 3, seed=1)


class SeveralOutputs(torch.autograd.Function):
    """A product, an integer mask without gradient, and a sum; gradients that are not given stay None."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        larger = (a > b).long()
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(larger)
        ctx.save_for_backward(a, b)
        return a * b, larger, a + b

    @staticmethod
    def backward(ctx: Any, product: Tensor, larger: None, total: Tensor | None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        a, b = ctx.saved_tensors
        return product * b + (0 if total is None else 3 * total), product * a


class InPlace(torch.autograd.Function):
    """Doubles its input in place."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        ctx.mark_dirty(value)
        return value.mul_(2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * gradient


class NewStyle(torch.autograd.Function):
    """With setup_context."""

    @staticmethod
    def forward(value: Tensor) -> Tensor:
        return value.abs()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return 1.5 * gradient * ctx.saved_tensors[0].sign()


class ManyFunctions(Layers):
    """The three in a row, the first once with and once without a gradient of its sum."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = 1 * self.first(x)
        InPlace.apply(hidden)
        product, larger, total = SeveralOutputs.apply(hidden, self.second(hidden))
        product, _, _ = SeveralOutputs.apply(product * larger, total.tanh())
        result: Tensor = self.last(NewStyle.apply(product))
        return result


def test_case_7_functions_of_every_form() -> None:
    """Several outputs, None gradients, in place, integers, setup_context: as autograd runs them."""
    check_every_cut(seeded(ManyFunctions), x, target, F.mse_loss, at_most=9)


class GradientPenalty(Layers):
    """Asks autograd for a gradient in forward, and trains through it."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            given = x.detach().requires_grad_()
            result = self.last(self.second(self.first(given).tanh()).tanh())
            (slope,) = torch.autograd.grad(result.sum(), given, create_graph=True)
        return result, (slope.norm(dim=-1) - 1).square().mean()


def test_case_7_a_gradient_penalty() -> None:
    """A backward inside the forward, and its backward: every weight is read again, on other stages than at first."""
    check_every_cut(seeded(GradientPenalty), x, target, lambda out, wanted: F.mse_loss(out[0], wanted) + out[1], at_most=9)


class Recurrent(nn.Module):
    """A cell called once per token in the model's own loop, so that a stage may begin between two times."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell, self.head = nn.Embedding(11, 4), nn.GRUCell(4, 4), nn.Linear(4, 11)

    def forward(self, ids: Tensor) -> Tensor:
        embedded = self.embed(ids)
        hidden, outputs = torch.zeros_like(embedded[:, 0]), []
        for time in range(ids.shape[1]):
            hidden = self.cell(embedded[:, time], hidden)
            outputs.append(self.head(hidden))
        return torch.stack(outputs, 1)


def test_case_3_a_cell_shared_over_time() -> None:
    """One weight, as many uses as there are tokens, cut between and within them."""
    check_every_cut(seeded(Recurrent), ids, next_ids, token_loss, at_most=8)


class RunningWeight(Layers):
    """A buffer that forward writes, from a weight, before it reads it in the model's own forward."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        with torch.no_grad():
            self.average.mul_(0.9).add_(self.first.weight, alpha=0.1)
        return self.last(self.second(hidden).tanh()) + F.linear(x, self.average)


def test_case_3_a_buffer_made_of_a_weight() -> None:
    """The reads of the buffer and its new value stay on one stage, also where no module says which."""
    check_every_cut(seeded(RunningWeight), x, target, F.mse_loss, at_most=9)


def test_case_3_a_sparse_gradient() -> None:
    """`nn.Embedding(sparse=True)`: the gradient is sparse, as in plain PyTorch."""
    model = seeded(lambda: nn.Sequential(nn.Embedding(11, 4, sparse=True), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 11)))
    expected = plain_step(model, (ids,), {}, target=next_ids, loss_fn=token_loss, rows_of_microbatches=(2, 2, 2)).gradients
    pdcompiler.compile(model, 2, microbatches=3, loss_fn=token_loss).step(ids, target=next_ids)
    found, wanted = model[0].weight.grad, expected["0.weight"]
    assert found is not None and wanted is not None and found.is_sparse and wanted.is_sparse
    assert_close_by_tensor(found.to_dense(), wanted.to_dense(), EXACT, "embedding")


def test_case_3_a_weight_that_forward_changes_is_refused() -> None:
    """`max_norm` rescales rows of the weight in forward; an optimizer's state and other ranks would not know."""
    model = nn.Sequential(nn.Embedding(11, 4, max_norm=0.5), nn.Linear(4, 11)).double()
    with pytest.raises(CompileError, match=r"forward changes the parameter 0\.weight in place"):
        pdcompiler.compile(model, 2, loss_fn=token_loss).step(ids, target=next_ids)


class Hooked(Layers):
    """Hooks on modules and on an activation, each of which changes a value or a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.second.register_forward_hook(lambda module, inputs, output: 2 * output)
        self.last.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,))
        self.second.register_full_backward_hook(lambda module, inputs, outputs: (3 * inputs[0],))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: 0.5 * gradient)
        result: Tensor = self.last(self.second(hidden).tanh())
        return result


def test_case_9_hooks_inside_the_model_are_part_of_it() -> None:
    """What they do to values and gradients is recorded with the rest."""
    check_every_cut(seeded(Hooked), x, target, F.mse_loss, at_most=6)


def test_case_9_a_hook_on_a_parameter_sees_the_sum() -> None:
    """`register_hook` changes the whole step's gradient once, not once while tracing and again afterwards."""
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)))
    expected = plain_step(model, (x,), {}, target=target, loss_fn=F.mse_loss, rows_of_microbatches=(2, 2, 2)).gradients
    model[0].weight.register_hook(lambda gradient: 2 * gradient)
    pdcompiler.compile(model, 2, microbatches=3, loss_fn=F.mse_loss).step(x, target=target)
    wanted = expected["0.weight"]
    assert wanted is not None
    assert_close_by_tensor(model[0].weight.grad, 2 * wanted, EXACT, "hooked")
    assert_close_by_tensor(model[2].weight.grad, expected["2.weight"], EXACT, "not hooked")


class ChannelsLast(nn.Module):
    """Activations and weights that are not row-major."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 3, 3, padding=1)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, image: Tensor) -> Tensor:
        hidden = self.first(image.to(memory_format=torch.channels_last)).relu()
        assert hidden.is_contiguous(memory_format=torch.channels_last)
        result: Tensor = self.second(hidden).permute(0, 2, 3, 1).sigmoid()
        return result


def test_case_7_activations_that_are_not_row_major() -> None:
    """Some kernels are silently wrong for a layout that they were not recorded with."""
    check_every_cut(seeded(ChannelsLast), drawn(6, 3, 5, 5), drawn(6, 5, 5, 3, seed=1), F.mse_loss, at_most=6)
