"""Gradients become `.grad` as they are where nobody else holds their memory, else as copies. Hooks fire; `.grad` is added to."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from pdcompiler.core.storage import is_alone
from pdcompiler.gradients import add_gradients
from tests.cases.against_loop import drawn


def parameters(names: str) -> dict[str, nn.Parameter]:
    """Of three rows and two columns each."""
    return {name: nn.Parameter(torch.zeros(3, 2, dtype=torch.float64)) for name in names}


def grad_of(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def test_what_nobody_else_holds_is_not_copied() -> None:
    held, gradients = parameters("ab"), {"a": drawn(3, 2), "b": drawn(2, 3).t()}
    places = {name: value.data_ptr() for name, value in gradients.items()}
    add_gradients(held, gradients)
    assert grad_of(held["a"]).data_ptr() == places["a"]
    assert grad_of(held["b"]).is_contiguous(), "of another layout than the parameter: copied"


@pytest.mark.parametrize("share", [lambda value: value, lambda value: value.view(6).view(3, 2), lambda value: value[:]])
def test_what_shares_its_memory_is_copied(share: Callable[[Tensor], Tensor]) -> None:
    """As the gradients of two parameters that were added do, or that of one added to an activation."""
    held, value = parameters("ab"), drawn(3, 2)
    wanted = value.clone()
    add_gradients(held, {"a": value, "b": share(value)})
    with torch.no_grad():
        grad_of(held["a"]).mul_(2)
    assert torch.equal(grad_of(held["a"]), 2 * wanted)
    assert torch.equal(grad_of(held["b"]), wanted)


def test_an_activation_that_is_a_view_of_a_gradient_stays_as_it_is() -> None:
    held, value = parameters("a"), drawn(3, 2)
    activation, wanted = value.t(), value.t().clone()
    add_gradients(held, {"a": value})
    with torch.no_grad():
        grad_of(held["a"]).mul_(2)
    assert torch.equal(activation, wanted)


def test_parts_of_one_storage_that_are_known_to_be_apart_are_not_copied() -> None:
    held, whole = parameters("ab"), drawn(12)
    parts = dict(zip("ab", (part.view(3, 2) for part in whole.split(6)), strict=True))
    add_gradients(held, parts, own="ab")
    assert grad_of(held["b"]).data_ptr() == whole.data_ptr() + 6 * whole.element_size()


def test_grad_is_added_to_and_hooks_fire_once() -> None:
    held, fired = parameters("a"), list[str]()
    held["a"].register_hook(lambda gradient: fired.append("of the gradient"))  # type: ignore[no-untyped-call]
    held["a"].register_post_accumulate_grad_hook(lambda parameter: fired.append("after it"))
    first = held["a"].grad = drawn(3, 2, seed=1)
    wanted = first + drawn(3, 2)
    add_gradients(held, {"a": drawn(3, 2)})
    assert grad_of(held["a"]) is first and torch.equal(first, wanted)
    assert fired == ["of the gradient", "after it"]


def test_views_and_sparse_tensors_are_not_alone() -> None:
    value = drawn(3, 2)
    assert is_alone(value)
    view = value.view(6)
    assert not is_alone(value) and not is_alone(view)
    del view
    assert is_alone(value) and not is_alone(value.to_sparse())
