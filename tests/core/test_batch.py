"""A batch: which dimension carries the rows, where its microbatches begin and end, and what is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from pdcompiler.core.batch import Batch, BatchDims, find_rows, read_batch
from pdcompiler.core.errors import CompileError
from pdcompiler.core.structure import Structure
from pdcompiler.testing import split_rows


class Model(nn.Module):
    def forward(self, x: Any, pair: Any = None, *, mask: Any = None, scale: float = 1.0) -> Any:
        return x


class Greedy(nn.Module):
    def forward(self, x: Any, *others: Any, **more: Any) -> Any:
        return x


class OwnTarget(nn.Module):
    def forward(self, x: Any, target: Any) -> Any:
        return x


def read(*args: Any, target: Any = None, model: nn.Module | None = None, dims: BatchDims | None = None, **kwargs: Any) -> Batch:
    return read_batch(model or Model(), args, kwargs, target, dims)


def sized(**shapes: tuple[int, ...]) -> dict[str, Tensor]:
    """Tensors of these shapes."""
    return {name: torch.zeros(shape) for name, shape in shapes.items()}


@given(rows=st.integers(1, 60), microbatches=st.integers(1, 20))
def test_spans_share_out_the_rows(rows: int, microbatches: int) -> None:
    spans = Batch({}, Structure("plain", type(None)), {}, rows, False).spans(microbatches)
    assert len(spans) == min(rows, microbatches)
    assert [row for start, stop in spans for row in range(start, stop)] == list(range(rows))
    sizes = [stop - start for start, stop in spans]
    assert min(sizes) >= 1 and max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)
    assert tuple(sizes) == split_rows(rows, microbatches)


def test_spans_of_7_rows() -> None:
    batch = read(torch.zeros(7, 2))
    assert batch.spans(4) == [(0, 2), (2, 4), (4, 6), (6, 7)]
    assert batch.spans(1) == [(0, 7)] and len(batch.spans(9)) == 7


def test_rows_are_the_size_that_most_tensors_have_first() -> None:
    dims, rows = find_rows(sized(table=(3, 8), x=(5, 3), y=(5,), mask=(1, 5, 5), scale=()), {})
    assert (dims, rows) == ({"table": None, "x": 0, "y": 0, "mask": None, "scale": None}, 5)


def test_batch_dims_say_where_the_rows_are() -> None:
    tensors = sized(x=(9, 4, 2), position=(3, 4, 9), mask=(4, 4), y=(4,))
    dims, rows = find_rows(tensors, {"x": 1, "position": -2, "mask": None})
    assert (dims, rows) == ({"x": 1, "position": 1, "mask": None, "y": 0}, 4)


def test_batch_dims_of_a_container_hold_for_all_within() -> None:
    tensors = {"pair[0]": torch.zeros(2, 6), "pair[1].a": torch.zeros(3, 6), "pairs": torch.zeros(6)}
    assert find_rows(tensors, {"pair": 1}) == ({"pair[0]": 1, "pair[1].a": 1, "pairs": 0}, 6)
    assert find_rows(tensors, {"pair[0]": 1, "pair": None}) == ({"pair[0]": 1, "pair[1].a": None, "pairs": 0}, 6)


@pytest.mark.parametrize(
    ("tensors", "dims", "message"),
    [
        (sized(x=(4,)), {"y": 0}, "batch_dims names ['y'], the inputs are ['x']"),
        (sized(x2=(4,)), {"x": 0}, "batch_dims names ['x'], the inputs are ['x2']"),
        (sized(x=(4,)), {"x": 1}, "batch_dims: x has 1 dimensions, there is no dimension 1"),
        (sized(x=(4,)), {"x": -2}, "batch_dims: x has 1 dimensions, there is no dimension -2"),
        (sized(x=(4, 3), y=(2, 3)), {"x": 0, "y": 0}, "the inputs disagree in the number of rows: {'x': 4, 'y': 2}"),
        (sized(x=()), {}, "no input has rows to split"),
        (sized(x=(4, 3)), {"x": None}, "no input has rows to split"),
        ({}, {}, "no input has rows to split"),
        (sized(x=(0, 3)), {}, "the batch has no rows"),
    ],
)
def test_rows_that_can_not_be_found_are_refused(tensors: dict[str, Tensor], dims: BatchDims, message: str) -> None:
    with pytest.raises(CompileError, match="^" + re.escape(message)):
        find_rows(tensors, dims)


def test_batch_dims_may_name_an_input_that_a_call_leaves_out() -> None:
    assert read(torch.zeros(4, 2), dims={"mask": None, "target": 0}).dims == {"x": 0}
    with pytest.raises(CompileError, match=r"^batch_dims names \['masks'\], the inputs are \['x'\]"):
        read(torch.zeros(4, 2), dims={"masks": None})


def test_tensors_are_named_as_the_model_names_its_arguments() -> None:
    leaf = torch.zeros(4, 2)
    batch = read(leaf, (leaf, {"a": leaf}), mask=leaf, scale=2.0, target=[leaf])
    assert list(batch.tensors) == ["x", "pair[0]", "pair[1].a", "mask", "target[0]"]
    args, kwargs, target = batch.structure.rebuild([1, 2, 3, 4, 5])
    assert (args, kwargs, target) == ((1, (2, {"a": 3})), {"mask": 4, "scale": 2.0}, [5])
    assert batch.has_target and not read(leaf).has_target
    assert list(read(leaf, leaf, leaf, more=leaf, model=Greedy()).tensors) == ["x", "others[0]", "others[1]", "more"]


def test_the_loss_functions_target_gives_way_to_the_models_own() -> None:
    leaf = torch.zeros(4, 2)
    assert list(read(leaf, leaf, target=leaf, model=OwnTarget()).tensors) == ["x", "target", "loss_target"]


def test_too_many_positional_arguments_are_refused() -> None:
    with pytest.raises(CompileError, match=r"Model\.forward takes 2 positional arguments, got 3"):
        read(torch.zeros(4), torch.zeros(4), torch.zeros(4))


def test_two_inputs_of_one_name_are_refused() -> None:
    leaf = torch.zeros(4)
    with pytest.raises(CompileError, match=r"two inputs are called others\[0\]"):
        read(leaf, leaf, model=Greedy(), **{"others[0]": leaf})


def test_a_target_that_does_not_go_with_the_rows_is_refused() -> None:
    with pytest.raises(CompileError, match=r"no part of the target goes with the 4 rows of the inputs: target \[5, 2\]"):
        read(torch.zeros(4, 2), target=torch.zeros(5, 2))
    assert read(torch.zeros(4, 2), target=torch.zeros(5, 2), dims={"target": None}).dims["target"] is None


def test_the_signature_holds_all_but_the_number_of_rows() -> None:
    def signature(rows: int = 4, width: int = 2, dtype: torch.dtype = torch.float32, scale: Any = 2.0, **options: Any) -> Any:
        return read(torch.zeros(rows, width, dtype=dtype), scale=scale, **options).signature()

    same = signature()
    assert hash(same) is not None and same == signature(rows=7)
    others = [
        signature(width=3), signature(dtype=torch.float64), signature(scale=3.0), signature(scale=2), signature(dims={"x": 1}),
        signature(target=torch.zeros(4)), signature(mask=torch.zeros(4)), signature(mask=None),
    ]  # fmt: skip
    assert len({same, *others}) == 1 + len(others)
