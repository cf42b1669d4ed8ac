"""The walk over the ticks of a schedule, as native functions: what `period.py` is made of.

Costs and order go in as arrays; the state is when each rank is free, and when what others wait for was made. Not here: what the
order is (`ticks.py`), nor what comes of the times.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy

from pdcompiler.core.native import native
from pdcompiler.core.workload import Floats

Integers: TypeAlias = numpy.ndarray

CLOSE = 1e-7


class Walk(NamedTuple):
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


def walk_of(
    replicas: Sequence[int], depths: Sequence[int], rounds: Sequence[int], lags: Sequence[int], costs: Sequence[Sequence[float]],
    overlap: bool,
) -> Walk:  # fmt: skip
    """At time 0. costs: forward, backward, their transfers and sums of gradients."""
    stages = len(replicas)
    ranks = numpy.cumsum([0, *replicas], dtype=numpy.int64)
    rings = numpy.cumsum([0, 0, *(depths[s] - depths[s + 1] for s in range(stages - 1))], dtype=numpy.int64)
    depth, size, lag = (numpy.array(numbers, dtype=numpy.int64) for numbers in (depths, rounds, lags))
    forward, backward, there, back, sums = (numpy.array(numbers, dtype=numpy.float64) for numbers in costs)
    return Walk(
        depth, size, lag, ranks, rings, forward, backward, there, back, sums, overlap,
        numpy.zeros(ranks[-1]), numpy.zeros(rings[-1]), numpy.zeros((stages, 2)),
    )  # fmt: skip


@native
def _here(overlap: bool, free: float, made: float, message: float) -> float:
    """When a rank that is free has a value that was made."""
    return max(free, made + message) if overlap else max(free, made) + message


@native
def _summed(free: Floats, first: int, end: int, seconds: float, overlap: bool) -> float:
    """When the gradients of some ranks are summed up; where messages do not overlap, that occupies the ranks."""
    done = 0.0
    for rank in range(first, end):
        done = max(done, free[rank])
    if not overlap:
        for rank in range(first, end):
            free[rank] = done + seconds
    return done + seconds


@native
def advance(walk: Walk, first: int, end: int, minibatches: int) -> None:
    """Walk the ticks from `first` up to `end`; there are so many minibatches, -1: no end.

    The arrays by their own names and in one function: to hand on the whole walk takes longer than all that is done with it.
    """
    depths, rounds, lags, ranks, rings, last = walk.depths, walk.rounds, walk.lags, walk.ranks, walk.rings, len(walk.depths) - 1
    free, gradients, updated, overlap = walk.free, walk.gradients, walk.updated, walk.overlap
    for tick in range(first, end):
        made = 0.0
        for stage in range(last + 1):
            replicas, size = ranks[stage + 1] - ranks[stage], rounds[stage]
            if minibatches < 0 or tick < minibatches:  # forward
                rank = ranks[stage] + tick % replicas
                start = free[rank]
                version = tick // size - lags[stage] if size else 0
                if version > 0:
                    start = max(start, updated[stage, version % 2])
                if stage:
                    start = _here(overlap, start, made, walk.forward_transfer[stage - 1])
                made = start + walk.forward[stage]
                free[rank] = made if overlap or stage == last else made + walk.forward_transfer[stage]
            minibatch = tick - depths[stage]
            if minibatch < 0 or 0 <= minibatches <= minibatch:
                continue
            rank = ranks[stage] + minibatch % replicas  # backward
            start = free[rank]
            if stage < last:
                sent = gradients[rings[stage + 1] + minibatch % (rings[stage + 2] - rings[stage + 1])]
                start = _here(overlap, start, sent, walk.backward_transfer[stage])
            done = start + walk.backward[stage]
            free[rank] = done if overlap or not stage else done + walk.backward_transfer[stage - 1]
            if stage:
                gradients[rings[stage] + minibatch % (rings[stage + 1] - rings[stage])] = done
            if size and (minibatch + 1) % size == 0:  # update; one sum of a stage's at a time
                number = (minibatch + 1) // size
                summed = _summed(free, ranks[stage], ranks[stage + 1], walk.sums[stage], overlap)
                updated[stage, number % 2] = max(summed, updated[stage, (number + 1) % 2] + walk.sums[stage])


@native
def _state(walk: Walk, tick: int) -> Floats:
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
def steady_seconds(walk: Walk, repeat: int, most: int, enough: float) -> float:
    """Seconds per tick, from above. The ticks repeat, so two states bound the growth from both sides: by the largest and the
    smallest change of any part. Compared with an older and older state (Brent), since what comes back may take many rounds."""
    tick = ((walk.depths[0] + 2 * walk.rounds.max()) // repeat + 1) * repeat
    advance(walk, 0, tick, -1)
    old, age, longest = _state(walk, tick), 0, 1
    low: float = 0.0
    high: float = numpy.inf
    while True:
        advance(walk, tick, tick + repeat, -1)
        tick, age = tick + repeat, age + 1
        change = (_state(walk, tick) - old) / (age * repeat)
        low, high = max(low, change.min()), min(high, change.max())
        if high - low <= CLOSE * high or high <= enough * (1 + CLOSE) or tick >= most:
            return high
        if age == longest:
            old, age, longest = _state(walk, tick), 0, 2 * longest


@native
def mean_seconds(walk: Walk, ticks: int) -> float:
    """Seconds per tick of the second half of so many."""
    advance(walk, 0, ticks // 2, -1)
    middle: float = walk.free.max()
    advance(walk, ticks // 2, ticks, -1)
    mean: float = (walk.free.max() - middle) / (ticks - ticks // 2)
    return mean
