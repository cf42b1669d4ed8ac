"""Nested values come apart into named tensors and go together again, whatever holds them."""

from __future__ import annotations

import collections
import dataclasses
import enum
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.utils.generic import ModelOutput

from pdcompiler.core.errors import CompileError
from pdcompiler.core.structure import flatten


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Record:
    first: Any
    second: Any
    made: Any = dataclasses.field(init=False, default=None)


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: Any


@dataclasses.dataclass
class Output(ModelOutput):
    logits: Any = None
    hidden: Any = None


class Color(enum.Enum):
    RED = 1


PLAINS = st.sampled_from((None, True, 3, 2.5, 1j, "text", b"bytes", Color.RED, torch.float16, torch.Size((2, 3)), range(3)))
TENSORS = st.integers(0, 9).map(lambda n: torch.full((2,), n))


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """One more level around values."""
    keys = st.sampled_from(("a", "b", "c d", "e_1", 0, 7, (1, "x"), Color.RED))
    dicts = st.dictionaries(keys, inner, max_size=3)
    return st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        dicts,
        dicts.map(collections.OrderedDict),
        st.builds(Pair, inner, inner),
        st.builds(Frozen, inner),
        st.builds(with_made, inner, inner, inner),
        st.builds(lambda value, others: Output(logits=value, hidden=others), TENSORS, st.none() | st.tuples(inner)),
    )


def with_made(first: Any, second: Any, made: Any) -> Record:
    """A dataclass with a field that its constructor does not take."""
    record = Record(first, second)
    record.made = made
    return record


VALUES = st.recursive(TENSORS | PLAINS, containers, max_leaves=12)


def same(one: Any, other: Any) -> bool:
    """Equal types and values all the way down, and the very same tensors."""
    if isinstance(one, Tensor) or type(one) is not type(other):
        return one is other
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and not isinstance(one, torch.Size):
        return len(one) == len(other) and all(map(same, one, other))
    if dataclasses.is_dataclass(one):
        return all(same(getattr(one, field.name), getattr(other, field.name)) for field in dataclasses.fields(one))
    return bool(one == other)


@given(VALUES)
def test_what_comes_apart_goes_together_again(value: Any) -> None:
    tensors, structure = flatten(value, "x")
    assert structure.count() == len(tensors)
    assert same(structure.rebuild(list(tensors.values())), value)
    assert all(name == "x" or name.startswith(("x.", "x[")) for name in tensors)


@given(VALUES)
def test_the_structure_depends_on_no_tensor(value: Any) -> None:
    tensors, structure = flatten(value, "x")
    others = [torch.zeros(3) for _ in tensors]
    again, same_structure = flatten(structure.rebuild(others), "x")
    assert same_structure == structure and list(again) == list(tensors)
    assert all(one is other for one, other in zip(again.values(), others, strict=True))


@given(VALUES, VALUES)
def test_equal_structures_hold_the_same_but_for_tensors(one: Any, other: Any) -> None:
    (tensors, structure), (others, other_structure) = flatten(one, "x"), flatten(other, "x")
    if structure == other_structure:
        assert same(structure.rebuild(list(others.values())), other)
    elif len(tensors) == len(others):
        assert not same(structure.rebuild(list(others.values())), other)


def test_names_are_paths_in_order() -> None:
    leaf = torch.zeros(1)
    value = {"ids": leaf, "pair": (leaf, [leaf]), 3: leaf, "deep": Record(Pair(leaf, None), "plain")}
    assert list(flatten(value)[0]) == ["ids", "pair[0]", "pair[1][0]", "[3]", "deep.first.left"]
    assert list(flatten(value, "x")[0]) == ["x.ids", "x.pair[0]", "x.pair[1][0]", "x[3]", "x.deep.first.left"]
    assert list(flatten(leaf)[0]) == ["value"]


def test_plain_values_are_part_of_the_structure() -> None:
    leaf = torch.zeros(1)
    assert flatten([leaf, 2])[1] == flatten([torch.ones(5), 2])[1]
    assert flatten([leaf, 2])[1] != flatten([leaf, 3])[1]
    assert flatten([leaf, 2])[1] != flatten((leaf, 2))[1]
    assert flatten({"a": leaf})[1] != flatten({"b": leaf})[1]


def test_a_model_output_keeps_its_type_and_leaves_out_what_is_none() -> None:
    tensors, structure = flatten(Output(logits=torch.zeros(2)))
    again = structure.rebuild([torch.ones(2)])
    assert list(tensors) == ["logits"] and type(again) is Output
    assert again.hidden is None and list(again.keys()) == ["logits"] and again["logits"] is again.logits


def test_a_value_of_an_unknown_type_is_refused_by_name() -> None:
    with pytest.raises(CompileError, match=r"^x\.a\[1\] is a builtins\.object, which is neither a tensor, nor") as caught:
        flatten({"a": [1, object()]}, "x")
    assert "try: pass its tensors in a dict, list, tuple or dataclass" in str(caught.value)


def test_the_caller_may_answer_for_an_unknown_type() -> None:
    asked: list[str] = []
    tensors, structure = flatten([{1, 2}, torch.zeros(1)], "x", lambda name, value: asked.append(name))
    assert asked == ["x[0]"] and list(tensors) == ["x[1]"]
    assert structure.rebuild([5]) == [None, 5]


def test_two_tensors_of_one_name_are_refused() -> None:
    leaf = torch.zeros(1)
    with pytest.raises(CompileError, match=r"two tensors are called x\.a\.b"):
        flatten({"a": {"b": leaf}, "a.b": leaf}, "x")
