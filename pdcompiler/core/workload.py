"""A model as the planner sees it: an acyclic graph of layers with costs in seconds and bytes. No torch, no names of operators.

    Workload   layers 0, 1, 2, ... in a topological order, and the values between them
    Value      one tensor: made by one layer, read by others; it crosses every border between them

All costs are of one microbatch. A trace becomes one by `passes/partition/problem.py`, PipeDream's `graph.txt` by
`graph_txt.py`. Not here: devices (`machine.py`), and which layers are a stage (`plan.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy
import numpy.typing

from pdcompiler.core.errors import CompileError

Floats: TypeAlias = numpy.typing.NDArray[numpy.float64]


@dataclass(frozen=True)
class Value:
    """What layer `producer` makes and the layers `consumers` read. bytes: one way; its gradient is as large."""

    producer: int
    consumers: tuple[int, ...]
    bytes: float


@dataclass(frozen=True)
class Workload:
    """Layers in a topological order. forward, backward: seconds of each layer, one row per kind of device, (kinds, layers).
    parameters: bytes of weights.   saved: bytes that wait from a microbatch's forward for its backward.   working: bytes alive
    only while the layer runs.   together: groups of layers that one stage must hold whole."""

    names: tuple[str, ...]
    forward: Floats
    backward: Floats
    parameters: Floats
    saved: Floats
    working: Floats
    values: tuple[Value, ...]
    together: tuple[tuple[int, ...], ...] = ()
    rows: int = field(default=1, compare=False)

    def __post_init__(self) -> None:
        for name in ("forward", "backward", "parameters", "saved", "working"):
            array = numpy.asarray(getattr(self, name), dtype=numpy.float64)
            object.__setattr__(self, name, array)
            if not numpy.isfinite(array).all() or (array < 0).any():
                where = int(numpy.argwhere(~(array >= 0) | ~numpy.isfinite(array))[0][-1])
                raise CompileError(f"layer {self.names[where]!r}: {name} is negative or not a number")
        for value in self.values:
            if not (value.bytes >= 0 and numpy.isfinite(value.bytes)):
                raise CompileError(f"layer {self.names[value.producer]!r}: what it makes has {value.bytes} bytes")
            if min(value.consumers, default=len(self.names)) <= value.producer:
                raise CompileError(f"layer {self.names[value.producer]!r} is read by one that stands before it")

    @property
    def layers(self) -> int:
        """How many."""
        return len(self.names)

    @property
    def seconds(self) -> Floats:
        """Forward and backward together, (kinds, layers)."""
        both: Floats = self.forward + self.backward
        return both

    def edges(self) -> list[tuple[int, int]]:
        """Which layer must run before which."""
        return sorted({(value.producer, consumer) for value in self.values for consumer in value.consumers})


def in_order(workload: Workload, order: Sequence[int]) -> Workload:
    """The same layers in another topological order: `order[k]` is the layer that comes k-th."""
    place = {layer: k for k, layer in enumerate(order)}
    take = numpy.array(order, dtype=int)
    by_layer = (workload.parameters[take], workload.saved[take], workload.working[take])
    return Workload(
        tuple(workload.names[i] for i in order),
        workload.forward[:, take], workload.backward[:, take], *by_layer,
        tuple(Value(place[v.producer], tuple(sorted(place[c] for c in v.consumers)), v.bytes) for v in workload.values),
        tuple(tuple(sorted(place[i] for i in group)) for group in workload.together),
        workload.rows,
    )  # fmt: skip
