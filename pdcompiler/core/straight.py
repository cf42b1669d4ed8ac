"""Plans of a branching graph with one device a stage: what is asked, what is found, what a plan takes. No search.

Transfers are charged in seconds to each stage that a value touches without lying on it whole; there need be no order among those
who touch it, and a spare device may take one stage: more than a Workload and a Machine say. Not here: the search
(`branching.py`), and plans with replication, memory in flight and levels of bandwidth (`plan.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy

from pdcompiler.core.errors import CompileError
from pdcompiler.core.workload import Floats

CLOSE = 1e-9
"""Two plans this near are equal."""


@dataclass(frozen=True)
class StraightProblem:
    """edges: which layer must run before which; only within groups may they have cycles.   values: the layers of each, in any
    order, and what its transfer takes.   seconds: of each layer.   spare: the same on the spare device, or None.   sizes:
    of each layer; no device but the spare one holds more than `most_size`.   together: groups that must not be parted."""

    edges: tuple[tuple[int, int], ...]
    values: tuple[tuple[tuple[int, ...], float], ...]
    seconds: Floats
    devices: int
    spare: Floats | None = None
    sizes: Floats | None = None
    most_size: float = numpy.inf
    together: tuple[tuple[int, ...], ...] = ()

    @property
    def layers(self) -> int:
        """How many."""
        return len(self.seconds)


@dataclass(frozen=True)
class StraightPlan:
    """seconds: of the slowest stage.   bound: no plan takes less.   spare: which stage is on the spare device, or -1.
    how: what was searched, in words."""

    stages: tuple[tuple[int, ...], ...]
    spare: int
    seconds: float
    bound: float
    how: str

    @property
    def gap(self) -> float:
        """How far it may be from the best, relative to the bound."""
        return max(0.0, self.seconds / self.bound - 1) if self.bound > 0 else 0.0

    @property
    def proven(self) -> bool:
        """Whether no plan is better."""
        return self.gap <= 2 * CLOSE


def judge_straight(problem: StraightProblem, stages: Sequence[Sequence[int]], spare: int = -1) -> float:
    """Seconds of the slowest stage, from the definitions. Raises CompileError where these are no stages of the problem."""
    where = {layer: index for index, stage in enumerate(stages) for layer in stage}
    if sorted(layer for stage in stages for layer in stage) != list(range(problem.layers)):
        raise CompileError(f"the stages do not hold each of {problem.layers} layers once")
    if len(stages) - (spare >= 0) > problem.devices or (spare >= 0 and problem.spare is None):
        raise CompileError(f"{len(stages)} stages, but {problem.devices} devices")
    for first, second in problem.edges:
        if where[first] > where[second]:
            raise CompileError(f"layer {second} on stage {where[second]} reads layer {first} of the later stage {where[first]}")
    for group in problem.together:
        if len({where[layer] for layer in group}) > 1:
            raise CompileError(f"layers {list(group)} must stand together")
    slowest = 0.0
    for index, stage in enumerate(stages):
        layers, own = set(stage), list(stage)
        if index == spare:
            assert problem.spare is not None
            slowest = max(slowest, float(problem.spare[own].sum()))
            continue
        if problem.sizes is not None and problem.sizes[own].sum() > problem.most_size * (1 + CLOSE):
            raise CompileError(f"stage {index} has {problem.sizes[own].sum():g} bytes, a device {problem.most_size:g}")
        crossing = sum(cost for members, cost in problem.values if layers & set(members) and set(members) - layers)
        slowest = max(slowest, float(problem.seconds[own].sum()) + crossing)
    return slowest


def check(problem: StraightProblem) -> None:
    """Raise CompileError for numbers that are none."""
    arrays = {"seconds": problem.seconds, "spare": problem.spare, "sizes": problem.sizes}
    for name, array in arrays.items():
        if array is not None and (len(array) != problem.layers or not (numpy.isfinite(array) & (array >= 0)).all()):
            raise CompileError(f"{name} must be {problem.layers} numbers of at least 0")
    if problem.devices < 1 or problem.layers < 1:
        raise CompileError(f"{problem.layers} layers on {problem.devices} devices; both must be at least 1")


class Loads(NamedTuple):
    """What stages are made of. seconds: of each layer.   sizes: of each layer, at most `most_size` on one device.   spare:
    seconds on the spare device; empty: there is none."""

    seconds: Floats
    sizes: Floats
    most_size: float
    spare: Floats

    @staticmethod
    def of(seconds: Floats, sizes: Floats | None = None, most_size: float = numpy.inf, spare: Floats | None = None) -> Loads:
        """All arrays, whatever is left out."""
        sizes = numpy.zeros(len(seconds)) if sizes is None else sizes
        return Loads(seconds, sizes, most_size, numpy.zeros(0) if spare is None else spare)


def least_seconds(loads: Loads, devices: int) -> float:
    """No plan's slowest stage takes less: all devices compute all the time, and some stage holds each layer."""
    total = float(loads.seconds.sum())
    if not len(loads.spare):
        return max(total / devices, float(loads.seconds.max(initial=0.0)))
    low, high = 0.0, total / devices
    while high - low > 1e-12 * high:  # the spare device takes off the others what it can compute in as long
        middle = (low + high) / 2
        low, high = (low, middle) if total - spare_work(loads, middle) <= devices * middle else (middle, high)
    return max(low, float(numpy.minimum(loads.seconds, loads.spare).max(initial=0.0)))


def spare_work(loads: Loads, seconds: float) -> float:
    """How much of the devices' seconds the spare device can take off them in `seconds`, parts of layers allowed."""
    spare = numpy.maximum(loads.spare, 1e-300)
    order = numpy.argsort(-loads.seconds / spare, kind="stable")
    taken = numpy.minimum(1.0, numpy.maximum(0.0, seconds - numpy.cumsum(spare[order]) + spare[order]) / spare[order])
    return float((taken * loads.seconds[order]).sum())
