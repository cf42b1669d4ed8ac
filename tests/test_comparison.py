"""The comparison fails when it must: an assertion that lets a fault through would hide it from every other test."""

from typing import Any

import pytest
import torch
from torch import Tensor

from pdcompiler.comparison import assert_close_by_tensor, assert_same, largest_difference


def test_a_difference_is_relative_to_the_largest_element() -> None:
    assert largest_difference(torch.tensor([100.0, 1.0]), torch.tensor([100.0, 2.0])) == 0.01
    assert largest_difference(torch.tensor([0.5]), torch.tensor([0.0])) == 0.5
    assert largest_difference(torch.ones(0), torch.ones(0)) == 0.0
    assert largest_difference(torch.tensor([torch.nan, 1.0]), torch.tensor([torch.nan, 1.0])) == 0.0
    assert largest_difference(torch.tensor([torch.inf]), torch.tensor([torch.inf])) == 0.0


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        (torch.tensor([1.0, 1.0]), torch.tensor([1.0, 1.1])),
        (torch.tensor([1.0]), torch.tensor([torch.nan])),
        (torch.tensor([torch.nan]), torch.tensor([1.0])),
        (torch.tensor([torch.inf]), torch.tensor([-torch.inf])),
        (torch.tensor([torch.inf]), torch.tensor([1.0])),
        (torch.tensor([1000001]), torch.tensor([1000000])),
        (torch.tensor([True]), torch.tensor([False])),
        (torch.ones(2), torch.ones(1, 2)),
        (torch.ones(2), torch.ones(2).double()),
        (None, torch.ones(2)),
        (torch.ones(2), None),
    ],
)
def test_the_tolerance_fails_when_it_must(actual: Tensor | None, expected: Tensor | None) -> None:
    with pytest.raises(AssertionError, match=r"^weight: "):
        assert_close_by_tensor(actual, expected, 1e-5, "weight")


def test_a_failure_names_the_tensor_the_numbers_and_the_place() -> None:
    with pytest.raises(AssertionError) as failure:
        assert_close_by_tensor(torch.tensor([[2.0, 4.0]]), torch.tensor([[2.0, 3.0]]), 0.25, "head.weight")
    assert str(failure.value) == (
        "head.weight: differs by 0.333 of the largest element, allowed 0.25; worst at (0, 1): 4.0, expected 3.0"
    )


@pytest.mark.parametrize("actual", [[torch.ones(2), 1], (torch.ones(2), 2), (torch.ones(2),), (1, torch.ones(2))])
def test_structures_are_equal_or_fail(actual: Any) -> None:
    assert_same((torch.ones(2), 1), (torch.ones(2), 1), 0.0, "outputs")
    with pytest.raises(AssertionError, match=r"^outputs"):
        assert_same(actual, (torch.ones(2), 1), 0.0, "outputs")
