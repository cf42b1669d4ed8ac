"""A device's three constants from a profile, and how far each kind of operation is from them.

    seconds = flops / flops_per_second + bytes / memory_bytes_per_second + operations * seconds_per_operation

Least squares over all operations, none of the three below zero. Each square is divided by the seconds that the constants give
the operation, so that it weighs by its time: neither the longest alone nor the many short ones decide, and all operations
together (not the views, which have no cost) take what was measured. Not here: measuring.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy
from scipy.optimize import nnls

from pdcompiler.core.errors import CompileError
from pdcompiler.core.machine import Device
from pdcompiler.core.profile import Measured, Profile

ITERATIONS = 30
"""The weights are those of the last constants; they settle within a few. What they leave of the whole is scaled away."""


@dataclass(frozen=True)
class KindFit:
    """The operations of one kind: how many, what they took in all, and what the constants say."""

    kind: str
    count: int
    measured_seconds: float
    fitted_seconds: float

    @property
    def residual(self) -> float:
        """How far the constants are from what was measured: 0.1 is 10 % too much."""
        return self.fitted_seconds / self.measured_seconds - 1 if self.measured_seconds else 0.0


@dataclass(frozen=True)
class DeviceFit:
    """The constants (infinite: nothing was seen to cost by it), and the kinds, those that took the longest first."""

    name: str
    flops_per_second: float
    memory_bytes_per_second: float
    seconds_per_operation: float
    kinds: tuple[KindFit, ...]

    @property
    def residuals(self) -> dict[str, float]:
        """By kind; views, which have no cost, are not explained at all: -1."""
        return {fitted.kind: fitted.residual for fitted in self.kinds}

    def device(self, memory_bytes: float = math.inf) -> Device:
        """For a Machine. memory_bytes: what one rank may fill, which no profile tells."""
        constants = self.flops_per_second, self.memory_bytes_per_second
        return Device(self.name, *constants, memory_bytes, self.seconds_per_operation)

    def __str__(self) -> str:
        lines = [
            f"{self.name}: {self.flops_per_second / 1e9:.1f} GFLOP/s, {self.memory_bytes_per_second / 1e9:.1f} GB/s, "
            f"{self.seconds_per_operation * 1e6:.1f} us per operation",
            f"{'kind':14} {'count':>6} {'measured ms':>12} {'fitted ms':>10} {'residual':>9}",
        ]
        for k in self.kinds:
            measured, fitted = k.measured_seconds * 1e3, k.fitted_seconds * 1e3
            lines.append(f"{k.kind:14} {k.count:6} {measured:12.3f} {fitted:10.3f} {k.residual:9.0%}")
        return "\n".join(lines)


def fit(profiles: Sequence[Profile]) -> DeviceFit:
    """The constants that fit one or more profiles of the same device best. Raises CompileError where there is nothing to fit."""
    operations = [operation for profile in profiles for operation in profile.operations]
    devices = sorted({profile.device for profile in profiles})
    if len(devices) > 1:
        raise CompileError(f"the profiles are of different devices: {', '.join(devices)}", ways_out=("fit each by itself",))
    seen = [o for o in operations if o.operations and o.seconds > 0]
    if not seen:
        raise CompileError("the profile has no operation that took any time", ways_out=("measure with more rows",))
    matrix, seconds = _columns(seen), numpy.array([o.seconds for o in seen])
    scale = numpy.where(matrix.any(axis=0), matrix.max(axis=0), 1.0)
    fitted = seconds
    for _ in range(ITERATIONS):
        weights = 1 / numpy.sqrt(numpy.maximum(fitted, seconds.min()))
        found, _residual = nnls(matrix / scale * weights[:, None], seconds * weights)
        fitted = matrix / scale @ found
    costs = found / scale * (seconds.sum() / fitted.sum())
    rates = [float(1 / cost) if cost > 0 else math.inf for cost in costs[:2]]
    return DeviceFit(devices[0], rates[0], rates[1], float(costs[2]), _by_kind(operations, costs))


def _columns(operations: Sequence[Measured]) -> numpy.typing.NDArray[numpy.float64]:
    return numpy.array([[o.flops, o.bytes, o.operations] for o in operations], dtype=numpy.float64)


def _by_kind(operations: Sequence[Measured], costs: numpy.typing.NDArray[numpy.float64]) -> tuple[KindFit, ...]:
    groups: dict[str, list[Measured]] = defaultdict(list)
    for operation in operations:
        groups[operation.kind].append(operation)
    kinds = [
        KindFit(kind, len(group), sum(o.seconds for o in group), float((_columns(group) @ costs).sum()))
        for kind, group in groups.items()
    ]
    return tuple(sorted(kinds, key=lambda k: -k.measured_seconds))
