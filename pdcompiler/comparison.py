"""Nested structures of tensors: walk them, and say how far apart two are.

What models take and return: tensors in tuples, lists, mappings and dataclasses, also those that torch's pytree does
not know. The tolerance is DESIGN's, per tensor, and a failure says which tensor, which element and by how much.
"""

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


def map_structure(function: Callable[..., Any], value: Any, *others: Any, path: str = "") -> Any:
    """`function(path, leaf, *leaves of the others)` at each leaf of nested tuples, lists, mappings and dataclasses."""
    all_values = (value, *others)
    assert_same_parts(path, *[_kind(each) for each in all_values])
    if isinstance(value, Tensor):
        return function(path, *all_values)
    if isinstance(value, Mapping):
        assert_same_parts(path, *[list(each) for each in all_values])
        mapping: Any = copy.copy(value)
        for key in list(value):
            mapping[key] = map_structure(function, *[each[key] for each in all_values], path=f"{path}[{key!r}]")
        return mapping
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        record = copy.copy(value)
        for name in [field.name for field in dataclasses.fields(value)]:
            parts = [getattr(each, name) for each in all_values]
            object.__setattr__(record, name, map_structure(function, *parts, path=f"{path}.{name}"))
        return record
    if isinstance(value, list | tuple):
        assert_same_parts(path, *[f"{len(each)} items" for each in all_values])
        columns = enumerate(zip(*all_values, strict=True))
        items = [map_structure(function, *column, path=f"{path}[{index}]") for index, column in columns]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return function(path, *all_values)


def detached(value: Any) -> Any:
    """The same structure with copies of its tensors, cut from autograd."""
    return map_structure(lambda _, leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, value)


def leaves(value: Any) -> list[Any]:
    """Every leaf, in order."""
    found: list[Any] = []
    map_structure(lambda _, leaf: found.append(leaf), value)
    return found


def largest_difference(a: Tensor, b: Tensor) -> float:
    """max|a-b| / max|b|, or max|a| where b is all zero. NaN is equal to NaN in the same place only."""
    if a.numel() == 0:
        return 0.0
    finite = _wide(b)[torch.isfinite(b)].abs()
    scale = finite.max().item() if finite.numel() else 0.0
    return float(_differences(a, b).max().item() / (scale or 1.0))


def assert_close_by_tensor(actual: Tensor | None, expected: Tensor | None, tolerance: float, name: str) -> None:
    """DESIGN's tolerance: max|a-b| <= tolerance * max|b|. Shapes, dtypes and None are equal; integers are exact."""
    if actual is None or expected is None:
        assert actual is expected, f"{name}: {_shown(actual)}, expected {_shown(expected)}"
        return
    shapes = _shown(actual) == _shown(expected)
    assert shapes, f"{name}: {_shown(actual)}, expected {_shown(expected)}"
    allowed = tolerance if expected.is_floating_point() or expected.is_complex() else 0.0
    difference = largest_difference(actual, expected)
    if difference <= allowed:
        return
    worst = torch.unravel_index(_differences(actual, expected).argmax(), expected.shape)
    place = tuple(int(index) for index in worst)
    raise AssertionError(
        f"{name}: differs by {difference:.3g} of the largest element, allowed {allowed:.3g}; "
        f"worst at {place}: {actual[place].item()!r}, expected {expected[place].item()!r}"
    )


def assert_same(actual: Any, expected: Any, tolerance: float, name: str) -> None:
    """Equal structure; tensors close, anything else equal."""

    def compare(path: str, expected_leaf: Any, actual_leaf: Any) -> None:
        if isinstance(expected_leaf, Tensor):
            return assert_close_by_tensor(actual_leaf, expected_leaf, tolerance, path)
        assert actual_leaf == expected_leaf, f"{path}: {actual_leaf!r}, expected {expected_leaf!r}"

    map_structure(compare, expected, actual, path=name)


def assert_same_parts(path: str, expected: Any, *others: Any) -> None:
    """What each of several structures has at this place (type, keys, length) is equal."""
    for other in others:
        assert other == expected, f"{path}: {other}, expected {expected}"


def _kind(value: Any) -> str:
    return "Tensor" if isinstance(value, Tensor) else type(value).__name__


def _differences(a: Tensor, b: Tensor) -> Tensor:
    """|a-b| by element: 0 where equal (both NaN, or the same infinity), infinite where only one is NaN."""
    a, b = _wide(a), _wide(b)
    same = (a == b) | (torch.isnan(a) & torch.isnan(b))
    return torch.where(same, 0.0, (a - b).abs().double()).nan_to_num(nan=torch.inf, posinf=torch.inf)


def _wide(value: Tensor) -> Tensor:
    wide = torch.complex128 if value.is_complex() else torch.float64 if value.is_floating_point() else torch.int64
    return value.detach().to(wide)


def _shown(value: Tensor | None) -> str:
    return "None" if value is None else f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
