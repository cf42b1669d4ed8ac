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

import numpy

from pdcompiler.core.errors import CompileError
from pdcompiler.core.tick_walk import Walk, advance, mean_seconds, steady_seconds, walk_of
from pdcompiler.core.ticks import Ticks

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
    """Seconds per minibatch in steady state. Never below `ideal`; exact within 1e-7, or from above where that takes too long. Of
    an order that repeats after too many ticks, the mean of many: within about a hundredth."""
    rounds = [ticks.round(stage) for stage in range(ticks.stages)]
    lags = [ticks.lag(stage) for stage in range(ticks.stages)]
    walk = _walk(ticks.replicas, ticks.depths, rounds, lags, seconds)
    least, most = ideal(ticks, seconds), max(MOST_WORK // ticks.stages, 4 * ticks.depths[0])
    if ticks.repeat > most // 4:
        return max(least, mean_seconds(walk, min(most, 20 * (ticks.depths[0] + max(rounds)))))
    return max(least, steady_seconds(walk, ticks.repeat, most, least))


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
    none = [0] * len(replicas)
    walk = _walk(replicas, depths, none, none, seconds)
    advance(walk, 0, microbatches + depths[0], microbatches)
    stages = numpy.maximum.reduceat(walk.free, walk.ranks[:-1])
    return float((stages + numpy.array(seconds.reduce)).max())


def _walk(replicas: Sequence[int], depths: Sequence[int], rounds: Sequence[int], lags: Sequence[int], seconds: Seconds) -> Walk:
    stages = len(seconds.forward)
    if len(replicas) != stages:
        raise CompileError(f"the seconds are of {stages} stages, the order is of {len(replicas)}")
    costs = (seconds.forward, seconds.backward, seconds.forward_transfer, seconds.backward_transfer, seconds.reduce)
    return walk_of(replicas, depths, rounds, lags, costs, seconds.overlap)
