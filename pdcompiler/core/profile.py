"""What each operation of a model took on a device: measured once, saved as JSON, written onto any trace of the same model.

An operation is known by the module call that made it, whether it is of the backward, its operator, and which of these it is:

    layers.3  forward   addmm  0        the first addmm of the first call of layers.3
    layers.3  backward  mm     1

So a profile of a trace of 8 rows fits one of any number of rows, and a symbolic one; what a trace has more is priced by its
kind. Not here: measuring (`passes/tracing/profile.py`), and a device's constants from a profile (`passes/tracing/fit.py`).
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import fx

from pdcompiler.core.errors import CompileError
from pdcompiler.core.flops import kind_of
from pdcompiler.core.ir import Trace, is_backward, module_of, type_of

LISTED = 8
"""Modules in a profile's table."""

Key: TypeAlias = tuple[str, bool, str, int]


@dataclass(frozen=True)
class Measured:
    """One operation. module, backward, operator, number: which one.   kind: as in `flops.py`.   seconds: its share of the
    measured whole.   flops, bytes, operations: what it costs by its sizes (a view: nothing)."""

    module: str
    backward: bool
    operator: str
    number: int
    kind: str
    seconds: float
    flops: float
    bytes: float
    operations: int

    @property
    def key(self) -> Key:
        """What it is known by."""
        return self.module, self.backward, self.operator, self.number


@dataclass(frozen=True)
class Profile:
    """model: the fingerprint of parameters' names and shapes.   device: its name.   rows: of the microbatch.   dtype: of most
    parameters.   forward_seconds, backward_seconds: of the whole, measured without a clock at each operation; the operations'
    seconds add up to them.   clocked_seconds: what the clocks at each operation added up to."""

    model: str
    device: str
    rows: int
    dtype: str
    forward_seconds: float
    backward_seconds: float
    clocked_seconds: float
    operations: tuple[Measured, ...]

    @property
    def seconds(self) -> float:
        """Forward and backward of one microbatch."""
        return self.forward_seconds + self.backward_seconds

    @property
    def residual(self) -> float:
        """By how much the operations, each with a clock of its own, took longer than the whole: 0.05 is 5 %."""
        return self.clocked_seconds / self.seconds - 1 if self.seconds else 0.0

    def __str__(self) -> str:
        """The whole, then two tables: what modules took the longest, and all kinds of operations."""
        forward, backward = self.forward_seconds * 1e3, self.backward_seconds * 1e3
        longer = f"{abs(self.residual):.1%} {'longer' if self.residual >= 0 else 'less long'}"
        modules, kinds = ([(getattr(o, name), o) for o in self.operations] for name in ("module", "kind"))
        lines = [
            f"{self.device}, {self.rows} rows, {self.dtype}: forward {forward:.3f} ms, backward {backward:.3f} ms",
            f"with a clock at each operation it took {longer}, which is scaled away",
            *_slowest("slowest modules", modules, LISTED),
            *_slowest("kinds of operations", kinds, len(kinds)),
        ]
        return "\n".join(lines)

    def to_json(self) -> str:
        """The inverse of `from_json`; one line per operation."""
        head = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "operations"}
        lines = ",\n  ".join(json.dumps(asdict(operation)) for operation in self.operations)
        return json.dumps(head, indent=1)[:-2] + f',\n "operations": [\n  {lines}\n ]\n}}\n'

    @staticmethod
    def from_json(text: str) -> Profile:
        """Raises CompileError where the text is no profile."""
        try:
            data: Any = json.loads(text)
            operations = tuple(Measured(**operation) for operation in data.pop("operations"))
            profile = Profile(**data, operations=operations)
            numbers = [profile.forward_seconds, profile.backward_seconds, profile.clocked_seconds, profile.rows]
            numbers += [number for o in operations for number in (o.seconds, o.flops, o.bytes, o.operations)]
            if not all(number >= 0 and math.isfinite(number) for number in numbers):
                raise ValueError("a number is negative or not finite")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CompileError(
                f"the text is no profile: {type(error).__name__}: {error}", ways_out=("measure the model again",)
            ) from error
        return profile

    def save(self, path: str | Path) -> None:
        """Write it as JSON."""
        Path(path).write_text(self.to_json())

    @staticmethod
    def load(path: str | Path) -> Profile:
        """Read it from JSON. Raises CompileError where there is no such file, or where it is no profile."""
        try:
            text = Path(path).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise CompileError(f"the profile's file {path} can't be read: {reason}") from error
        try:
            return Profile.from_json(text)
        except CompileError as error:
            raise CompileError(f"{path}: {error}") from error

    def check_model(self, model: str) -> None:
        """Raise CompileError unless it is of this model, by its fingerprint."""
        if self.model != model:
            raise CompileError(
                f"the profile is of another model: its parameters' names and shapes give {self.model!r}, this one's {model!r}",
                ways_out=("measure this model",),
            )

    def check(self, model: str, trace: Trace) -> None:
        """Raise CompileError unless it is of this model (by its fingerprint), in this trace's dtype."""
        self.check_model(model)
        if self.dtype != (dtype := dtype_of(trace)):
            raise CompileError(
                f"the profile was measured in {self.dtype}, the model is in {dtype}", ways_out=("measure it in its dtype",)
            )


def _slowest(title: str, named: Iterable[tuple[str, Measured]], most: int) -> list[str]:
    """A table of the groups of operations that took the longest in all."""
    counts: Counter[str] = Counter()
    sides: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for name, operation in named:
        name = name or "(the model's own forward)"
        counts[name] += 1
        sides[name][operation.backward] += operation.seconds
    slowest = sorted(sides, key=lambda name: -sum(sides[name]))[:most]
    width = max(len(title), *map(len, slowest), 0)
    whole = sum(map(sum, sides.values())) or 1.0
    lines = [f"{title:{width}} {'count':>6} {'forward ms':>11} {'backward ms':>12} {'share':>6}"]
    for name in slowest:
        forward, backward = sides[name]
        share = (forward + backward) / whole
        lines.append(f"{name:{width}} {counts[name]:6} {forward * 1e3:11.3f} {backward * 1e3:12.3f} {share:6.1%}")
    return lines


def measured_nodes(trace: Trace) -> dict[fx.Node, Key]:
    """The operations of a trace, views too, each with what it is known by."""
    counts: Counter[tuple[str, bool, str]] = Counter()
    keys: dict[fx.Node, Key] = {}
    for node in trace.graph.nodes:
        if node.op == "call_function" and kind_of(node) != "integer":
            called = str(module_of(node)), is_backward(node), str(node.target).removeprefix("aten.")
            keys[node] = (*called, counts[called])
            counts[called] += 1
    return keys


def dtype_of(trace: Trace) -> str:
    """In which most of the parameters are, by bytes."""
    counts: Counter[torch.dtype] = Counter()
    for node in trace.graph.nodes:
        if node.op == "placeholder" and trace.inputs[node.name].kind == "parameter":
            counts[type_of(node).dtype] += int(type_of(node).nbytes())
    dtype = counts.most_common(1)[0][0] if counts else torch.get_default_dtype()
    return str(dtype).removeprefix("torch.")
