"""Nested Python values taken apart into tensors and put together again.

A batch, a target and a model's outputs are dicts, lists, tuples, named tuples, dataclasses (Hugging Face's `ModelOutput`
among them), tensors, None and plain Python values, nested as the user likes. `flatten` gives the tensors in a fixed order
with a name each, and a `Structure` that puts tensors back into the same shape. A plain value is part of the structure: it is
a constant of whatever is compiled for it, so two calls with other constants are two programs.

Not torch's pytree: that one needs each dataclass to be registered globally, which would change state of the user's.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pdcompiler.core.errors import CompileError

PLAIN = (bool, int, float, complex, str, bytes, type(None), enum.Enum, torch.dtype, torch.device, torch.Size, range, slice)


@dataclass(frozen=True)
class Structure:
    """A nested value without its tensors: what stands where. Equal structures take the same program."""

    kind: str  # "tensor", "plain", or how `children` are held: "mapping", "sequence", "namedtuple", "dataclass"
    type: type
    keys: tuple[Any, ...] = ()
    children: tuple[Structure, ...] = ()
    value: Any = None

    def count(self) -> int:
        """How many tensors it holds."""
        return 1 if self.kind == "tensor" else sum(child.count() for child in self.children)

    def rebuild(self, leaves: Sequence[Any]) -> Any:
        """The nested value with `leaves` (as many as `count()`, in the order of `flatten`) in the tensors' places."""
        if self.kind == "tensor":
            return leaves[0]
        if self.kind == "plain":
            return self.value
        built, at = [], 0
        for child in self.children:
            size = child.count()
            built.append(child.rebuild(leaves[at : at + size]))
            at += size
        return self._assemble(built)

    def _assemble(self, parts: list[Any]) -> Any:
        if self.kind == "sequence":
            return self.type(parts)
        if self.kind == "namedtuple":
            return self.type(*parts)
        items = dict(zip(self.keys, parts, strict=True))
        if self.kind == "mapping" and self.type is dict:
            return items
        if self.kind == "mapping" and not dataclasses.is_dataclass(self.type):
            return self.type(items)
        return _dataclass(self.type, items)


def _dataclass(cls: type, items: Mapping[str, Any]) -> Any:
    """A dataclass from its fields, also where some are not arguments of its constructor."""
    arguments = {field.name for field in dataclasses.fields(cls) if field.init}
    built = cls(**{name: value for name, value in items.items() if name in arguments})
    for name in items.keys() - arguments:
        object.__setattr__(built, name, items[name])
    return built


Unknown = Callable[[str, Any], Any]


def refuse(name: str, value: Any) -> Any:
    """What `flatten` does with a value of a type that it does not know: a CompileError that names it."""
    raise CompileError(
        f"{name} is a {type(value).__module__}.{type(value).__qualname__}, which is neither a tensor, nor a plain value, "
        "nor a container of such",
        ways_out=("pass its tensors in a dict, list, tuple or dataclass",),
    )


def flatten(value: Any, name: str = "", unknown: Unknown = refuse) -> tuple[dict[str, Tensor], Structure]:
    """Take `value` apart: its tensors by name, in order, and the structure around them.

    Names are paths such as `input_ids`, `pair[1]` or `labels.boxes`; `unknown(name, value)` answers for values of a type
    that is none of the above (by default it refuses).
    """
    tensors: dict[str, Tensor] = {}
    structure = _take_apart(value, name, unknown, tensors)
    return tensors, structure


def _take_apart(part: Any, path: str, unknown: Unknown, tensors: dict[str, Tensor]) -> Structure:
    """The structure of a part; its tensors are added. (A closure that calls itself would be a cycle that keeps them alive.)"""
    if isinstance(part, Tensor):
        if (path or "value") in tensors:
            raise CompileError(f"two tensors are called {path}", ways_out=("rename a key of the dicts that hold them",))
        tensors[path or "value"] = part
        return Structure("tensor", Tensor)
    if isinstance(part, PLAIN):
        return Structure("plain", type(part), value=part)
    named = _children(part)
    if named is None:
        return _take_apart(unknown(path or "value", part), path, unknown, tensors)
    kind, keys, parts = named
    paths = [_join(path, key, kind) for key in keys]
    children = tuple(_take_apart(child, at, unknown, tensors) for child, at in zip(parts, paths, strict=True))
    return Structure(kind, type(part), tuple(keys), children)


def _children(part: Any) -> tuple[str, list[Any], list[Any]] | None:
    if isinstance(part, Mapping):
        return "mapping", list(part.keys()), list(part.values())
    if isinstance(part, tuple) and hasattr(part, "_fields"):
        return "namedtuple", list(part._fields), list(part)
    if isinstance(part, (list, tuple)):
        return "sequence", list(range(len(part))), list(part)
    if dataclasses.is_dataclass(part) and not isinstance(part, type):
        names = [field.name for field in dataclasses.fields(part)]
        return "dataclass", names, [getattr(part, name) for name in names]
    return None


def _join(path: str, key: Any, kind: str) -> str:
    if kind == "sequence" or not isinstance(key, str):
        return f"{path}[{key!r}]"
    return f"{path}.{key}" if path else key
