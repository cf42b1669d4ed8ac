"""A batch as the user passes it: its tensors by name, which dimension of each carries the rows, and its microbatches.

Rows are found by agreement: the size that most tensors have in dimension 0 is the number of rows, and the tensors that have
it there are split; `batch_dims` says otherwise. Whether that reading is right is tried by tracing (`passes/tracing`), with a
number of rows that no other dimension has. Not here: reading data, moving it, or weights of losses.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from pdcompiler.core.errors import CompileError
from pdcompiler.core.structure import Structure, flatten

BatchDims = Mapping[str, int | None]


@dataclass(frozen=True)
class Batch:
    """One batch. tensors: by name ("input_ids", "pair[1]", "target").   structure: of (args, kwargs, target).

    dims: per tensor the dimension that carries the rows, or None.   has_target: whether a target was given.
    """

    tensors: dict[str, Tensor]
    structure: Structure
    dims: dict[str, int | None]
    rows: int
    has_target: bool

    def signature(self) -> tuple[Any, ...]:
        """What of the batch a trace depends on, apart from the number of rows."""
        sizes = tuple(
            (name, self.dims[name], tuple(s for dim, s in enumerate(t.shape) if dim != self.dims[name]), t.dtype, t.device.type)
            for name, t in self.tensors.items()
        )
        return (_frozen(self.structure), sizes)

    def spans(self, microbatches: int) -> list[tuple[int, int]]:
        """First and last-plus-one row of each microbatch: as equal as possible, the longer ones first; none is empty."""
        count = min(microbatches, self.rows)
        base, longer = divmod(self.rows, count)
        ends = [(i + 1) * base + min(i + 1, longer) for i in range(count)]
        return list(zip([0, *ends[:-1]], ends, strict=True))


def read_batch(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], target: Any, batch_dims: BatchDims | None
) -> Batch:
    """Take a call's arguments apart. Raises CompileError where no tensor has rows, or where rows disagree."""
    names = _positional_names(model, len(args))
    tensors: dict[str, Tensor] = {}
    parts: list[Structure] = []
    own_name = "loss_target" if "target" in (*names, *kwargs) else "target"
    for name, value in zip([*names, *kwargs, own_name], [*args, *kwargs.values(), target], strict=True):
        found, structure = flatten(value, name)
        if clash := found.keys() & tensors.keys():
            raise CompileError(f"two inputs are called {', '.join(clash)}", ways_out=("rename the model's argument",))
        tensors |= found
        parts.append(structure)
    positional = Structure("sequence", tuple, tuple(names), tuple(parts[: len(args)]))
    keyword = Structure("mapping", dict, tuple(kwargs), tuple(parts[len(args) : -1]))
    whole = Structure("sequence", tuple, ("args", "kwargs", "target"), (positional, keyword, parts[-1]))
    dims, rows = find_rows(tensors, batch_dims or {}, {*inspect.signature(model.forward).parameters, own_name})
    _check_target({name: tensors[name] for name in found}, tensors, dims, rows, batch_dims or {})
    return Batch(tensors, whole, dims, rows, target is not None)


def find_rows(
    tensors: Mapping[str, Tensor], batch_dims: BatchDims, absent: Collection[str] = ()
) -> tuple[dict[str, int | None], int]:
    """Per tensor the dimension that carries the rows, and how many there are. absent: inputs that a call may leave out."""
    said = {name: _said(name, batch_dims) for name in tensors}
    unused = [key for key in batch_dims if not any(_covers(key, name) for name in tensors)]
    unknown = [key for key in unused if not any(_covers(name, key) for name in absent)]
    if unknown:
        raise CompileError(f"batch_dims names {unknown}, the inputs are {sorted(tensors)}")
    explicit = {name: dim for name, dim in said.items() if isinstance(dim, int)}
    for name, dim in explicit.items():
        if not -tensors[name].dim() <= dim < tensors[name].dim():
            raise CompileError(f"batch_dims: {name} has {tensors[name].dim()} dimensions, there is no dimension {dim}")
    counts = Counter(tensors[name].shape[dim] for name, dim in explicit.items())
    if not counts:
        counts = Counter(t.shape[0] for name, t in tensors.items() if said[name] == "auto" and t.dim())
    if not counts:
        raise CompileError("no input has rows to split", ways_out=("pass a batch of tensors", "say batch_dims={name: dim}"))
    if explicit and len(counts) > 1:
        sizes = {name: tensors[name].shape[dim] for name, dim in explicit.items()}
        raise CompileError(f"the inputs disagree in the number of rows: {sizes}")
    rows = counts.most_common(1)[0][0]
    if rows == 0:
        raise CompileError("the batch has no rows")
    dims: dict[str, int | None] = {}
    for name, tensor in tensors.items():
        choice = said[name]
        if choice == "auto":
            dims[name] = 0 if tensor.dim() and tensor.shape[0] == rows else None
        else:
            dims[name] = choice % tensor.dim() if isinstance(choice, int) else None
    return dims, rows


def _check_target(
    target: Mapping[str, Tensor], tensors: Mapping[str, Tensor], dims: Mapping[str, int | None], rows: int, batch_dims: BatchDims
) -> None:
    """A target none of which goes with the rows would meet every microbatch whole: most likely the rows were read wrongly."""
    unsaid = [name for name, tensor in target.items() if tensor.dim() and _said(name, batch_dims) == "auto"]
    if not unsaid or any(dims[name] is not None for name in target):
        return
    split = ", ".join(f"dimension {dim} of {name} {list(tensors[name].shape)}" for name, dim in dims.items() if dim is not None)
    whole = ", ".join(f"{name} {list(target[name].shape)}" for name in unsaid)
    raise CompileError(
        f"no part of the target goes with the {rows} rows of the inputs: {whole}, but rows are {split}",
        ways_out=("say where the rows are: batch_dims={name: dimension, or None where it is the same for all rows}",),
    )


def _said(name: str, batch_dims: BatchDims) -> int | str | None:
    return next((dim for key, dim in batch_dims.items() if _covers(key, name)), "auto")


def _covers(key: str, name: str) -> bool:
    return name == key or (name.startswith(key) and name[len(key)] in ".[")


@functools.lru_cache(maxsize=64)
def _positional(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """The positional parameters of a function, `self` among them; looked up at every step, so remembered."""
    parameters = inspect.signature(function).parameters.values()
    return [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL)]


def _positional_names(model: nn.Module, count: int) -> list[str]:
    function = getattr(model.forward, "__func__", model.forward)
    parameters = _positional(function)[function is not model.forward :]
    names: list[str] = []
    for parameter in parameters:
        if parameter.kind is parameter.VAR_POSITIONAL:
            names += [f"{parameter.name}[{i}]" for i in range(count - len(names))]
        else:
            names.append(parameter.name)
    if len(names) < count:
        raise CompileError(f"{type(model).__name__}.forward takes {len(names)} positional arguments, got {count}")
    return names[:count]


def _frozen(structure: Structure) -> Any:
    """A hashable form: plain values by type and repr, since they may not be hashable."""
    children = tuple(_frozen(child) for child in structure.children)
    return (structure.kind, structure.type, repr(structure.keys), children, type(structure.value), repr(structure.value))
