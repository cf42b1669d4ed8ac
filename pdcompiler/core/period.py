"""How long schedules by ticks take, from costs alone: a minibatch in steady state, or all microbatches of a flushing step.

A tick's order is one in which everything can be computed, so one walk over the ticks gives all times. Work starts when its rank
is free and its inputs are there:

    forward    its input, and the update whose weights it uses
    backward   its gradient; receives are posted early and waited for here, so that messages overlap where the machine can
    update     the backwards of its round on all replicas, then the sum of the gradients

One replica and two (F = 1, B = 2 on the first, 2 and 4 on each of the others), depths 2 and 0: the round of the two ends when the
later is done, and meanwhile nobody feeds them: 3.75 per minibatch; with depths 3 and 0 there is one more on its way, and 3.0.

The walk ends when the state has come back but for a shift in time. Not here: the order (`ticks.py`), which depths (`depths.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import numpy

from pdcompiler.core.errors import CompileError
from pdcompiler.core.native import native
from pdcompiler.core.ticks import Ticks
from pdcompiler.core.workload import Floats

Integers: TypeAlias = numpy.ndarray

CLOSE = 1e-7
MOST_WORK = 1_000_000
"""Ticks x stages of one walk; a period that has not come to rest by then is bounded from above."""


@dataclass(frozen=True)
class Seconds:
    """forward, backward: of one minibatch on each stage.   forward_transfer, backward_transfer: of one message over each border.
    reduce: of all gradients of a round, for each stage.   Left out: 0.   overlap: whether messages travel while ranks compute."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    forward_transfer: tuple[float, ...] = ()
    backward_transfer: tuple[float, ...] = ()
    reduce: tuple[float, ...] = ()
    overlap: bool = True

    def __post_init__(self) -> None:
        stages = len(self.forward)
        for name in ("forward", "backward", "forward_transfer", "backward_transfer", "reduce"):
            count = stages - 1 if name.endswith("transfer") else stages
            given = getattr(self, name) or (0.0,) * count
            if len(given) != count or not all(value >= 0 for value in given):
                raise CompileError(f"{name} is {given}, expected {count} numbers of at least 0")
            object.__setattr__(self, name, tuple(given))

    def since(self, stage: int) -> Seconds:
        """Of a pipeline that begins with this stage."""
        return replace(
            self, forward=self.forward[stage:], backward=self.backward[stage:], reduce=self.reduce[stage:],
            forward_transfer=self.forward_transfer[stage:], backward_transfer=self.backward_transfer[stage:],
        )  # fmt: skip


def period(ticks: Ticks, seconds: Seconds) -> float:
    """Seconds per minibatch in steady state. Never below `ideal`; exact within 1e-7, else from above."""
    _check(ticks.replicas, seconds)
    least = ideal(ticks, seconds)
    rounds = [ticks.round(stage) for stage in range(ticks.stages)]
    lags = [ticks.lag(stage) for stage in range(ticks.stages)]
    walk = _walk(ticks.replicas, ticks.depths, rounds, lags, seconds)
    return max(least, _steady(walk, ticks.repeat, max(MOST_WORK // ticks.stages, 4 * ticks.depths[0]), least))


def ideal(ticks: Ticks, seconds: Seconds) -> float:
    """What no depths go below: the work of the busiest stage, or of the busiest border, shared out to the replicas. Where
    messages overlap, a batch's sum of gradients has a batch's time to travel; that of a round stands in the way of the next."""
    borders = [0.0, *map(sum, zip(seconds.forward_transfer, seconds.backward_transfer, strict=True)), 0.0]
    most = 0.0
    for stage, replicas in enumerate(ticks.replicas):
        compute = seconds.forward[stage] + seconds.backward[stage]
        reduce = seconds.reduce[stage] / ticks.round(stage)
        before, after = borders[stage : stage + 2]
        if not seconds.overlap:
            most = max(most, (compute + before + after) / replicas + reduce)
        elif ticks.batch:
            most = max(most, compute / replicas, before / replicas, after / replicas, reduce)
        else:
            most = max(most, compute / replicas + reduce, before / replicas, after / replicas)
    return most


def drained(replicas: Sequence[int], depths: Sequence[int], microbatches: int, seconds: Seconds) -> float:
    """Seconds of a step with a flush: all microbatches in the ticks' order, no update between them, then the sums of gradients.
    The last depth need not be 0; with no depth below `microbatches`, all forwards come first. As core/timing.py says."""
    _check(replicas, seconds)
    none = [0] * len(replicas)
    walk = _walk(replicas, depths, none, none, seconds)
    _advance(walk, 0, microbatches + depths[0], microbatches)
    stages = numpy.maximum.reduceat(walk.free, walk.ranks[:-1])
    return float((stages + numpy.array(seconds.reduce)).max())


def _check(replicas: Sequence[int], seconds: Seconds) -> None:
    if len(replicas) != len(seconds.forward):
        raise CompileError(f"the seconds are of {len(seconds.forward)} stages, the order is of {len(replicas)}")


class _Walk(NamedTuple):
    """ranks: the first of each stage, and their number.   rings: where each stage's gradients that wait begin in `gradients`.
    rounds: minibatches of an update, 0: there is none.   Then the state: when each rank is free, when the gradients that wait
    were made, and when the last two updates were."""

    depths: Integers
    rounds: Integers
    lags: Integers
    ranks: Integers
    rings: Integers
    forward: Floats
    backward: Floats
    forward_transfer: Floats
    backward_transfer: Floats
    sums: Floats
    overlap: bool
    free: Floats
    gradients: Floats
    updated: Floats


def _walk(
    replicas: Sequence[int], depths: Sequence[int], rounds: Sequence[int], lags: Sequence[int], seconds: Seconds
) -> _Walk:
    stages = len(seconds.forward)
    ranks = numpy.cumsum([0, *replicas], dtype=numpy.int64)
    rings = numpy.cumsum([0, 0, *(depths[s] - depths[s + 1] for s in range(stages - 1))], dtype=numpy.int64)
    depth, size, lag = (numpy.array(numbers, dtype=numpy.int64) for numbers in (depths, rounds, lags))
    work = (seconds.forward, seconds.backward, seconds.forward_transfer, seconds.backward_transfer, seconds.reduce)
    forward, backward, there, back, sums = (numpy.array(numbers, dtype=numpy.float64) for numbers in work)
    return _Walk(
        depth, size, lag, ranks, rings, forward, backward, there, back, sums, seconds.overlap,
        numpy.zeros(ranks[-1]), numpy.zeros(rings[-1]), numpy.zeros((stages, 2)),
    )  # fmt: skip


@native
def _here(walk: _Walk, free: float, made: float, message: float) -> float:
    """When a rank that is free has a value that was made."""
    return max(free, made + message) if walk.overlap else max(free, made) + message


@native
def _advance(walk: _Walk, first: int, end: int, minibatches: int) -> None:
    """Walk the ticks from `first` up to `end`; there are so many minibatches, -1: no end."""
    for tick in range(first, end):
        made = 0.0
        for stage in range(len(walk.depths)):
            if minibatches < 0 or tick < minibatches:
                made = _forward(walk, stage, tick, made)
            minibatch = tick - walk.depths[stage]
            if minibatch >= 0 and (minibatches < 0 or minibatch < minibatches):
                _backward(walk, stage, minibatch)


@native
def _forward(walk: _Walk, stage: int, minibatch: int, made: float) -> float:
    """When it is done. made: when its input was."""
    rank = walk.ranks[stage] + minibatch % (walk.ranks[stage + 1] - walk.ranks[stage])
    start: float = walk.free[rank]
    if walk.rounds[stage] > 0:
        version = minibatch // walk.rounds[stage] - walk.lags[stage]
        if version > 0:
            start = max(start, walk.updated[stage, version % 2])
    if stage > 0:
        start = _here(walk, start, made, walk.forward_transfer[stage - 1])
    done: float = start + walk.forward[stage]
    walk.free[rank] = done
    if not walk.overlap and stage < len(walk.depths) - 1:
        walk.free[rank] += walk.forward_transfer[stage]
    return done


@native
def _backward(walk: _Walk, stage: int, minibatch: int) -> None:
    rank = walk.ranks[stage] + minibatch % (walk.ranks[stage + 1] - walk.ranks[stage])
    start: float = walk.free[rank]
    if stage < len(walk.depths) - 1:
        ring = walk.rings[stage + 2] - walk.rings[stage + 1]
        made = walk.gradients[walk.rings[stage + 1] + minibatch % ring]
        start = _here(walk, start, made, walk.backward_transfer[stage])
    done = start + walk.backward[stage]
    walk.free[rank] = done
    if stage > 0:
        ring = walk.rings[stage + 1] - walk.rings[stage]
        walk.gradients[walk.rings[stage] + minibatch % ring] = done
        if not walk.overlap:
            walk.free[rank] += walk.backward_transfer[stage - 1]
    size = walk.rounds[stage]
    if size > 0 and (minibatch + 1) % size == 0:
        _update(walk, stage, (minibatch + 1) // size)


@native
def _update(walk: _Walk, stage: int, number: int) -> None:
    """Sum up the gradients once all replicas have theirs; where messages do not overlap, that occupies them."""
    own = walk.free[walk.ranks[stage] : walk.ranks[stage + 1]]
    if walk.overlap:
        walk.updated[stage, number % 2] = max(own.max(), walk.updated[stage, (number + 1) % 2]) + walk.sums[stage]
    else:
        own[:] = own.max() + walk.sums[stage]
        walk.updated[stage, number % 2] = own[0]


@native
def _state(walk: _Walk, tick: int) -> Floats:
    """All that the ticks from this one on depend on, the gradients that wait in the minibatches' order."""
    waiting = walk.gradients.copy()
    for stage in range(1, len(walk.depths)):
        first, ring = walk.rings[stage], walk.rings[stage + 1] - walk.rings[stage]
        for place in range(ring):
            minibatch = tick - walk.depths[stage - 1] + place
            waiting[first + place] = walk.gradients[first + minibatch % ring]
    updated = walk.updated.copy()
    for stage in range(len(walk.depths)):
        number = (tick - walk.depths[stage]) // walk.rounds[stage]
        updated[stage, 0], updated[stage, 1] = walk.updated[stage, number % 2], walk.updated[stage, (number + 1) % 2]
    return numpy.concatenate((walk.free, waiting, updated.ravel()))


@native
def _steady(walk: _Walk, repeat: int, most: int, enough: float) -> float:
    """Seconds per tick, from above. The ticks repeat, so two states bound the growth from both sides: by the largest and the
    smallest change of any part. Compared with an older and older state (Brent), since what comes back may take many rounds."""
    tick = ((walk.depths[0] + 2 * walk.rounds.max()) // repeat + 1) * repeat
    _advance(walk, 0, tick, -1)
    old, age, longest = _state(walk, tick), 0, 1
    low: float = 0.0
    high: float = numpy.inf
    while True:
        _advance(walk, tick, tick + repeat, -1)
        tick, age = tick + repeat, age + 1
        change = (_state(walk, tick) - old) / (age * repeat)
        low, high = max(low, change.min()), min(high, change.max())
        if high - low <= CLOSE * high or high <= enough * (1 + CLOSE) or tick >= most:
            return high
        if age == longest:
            old, age, longest = _state(walk, tick), 0, 2 * longest
