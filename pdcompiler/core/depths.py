"""How deep a schedule by ticks must be: the round of a replicated stage starves its neighbours at PipeDream's depths.

    replicas   PipeDream's depths   period   least depths   period      (F = 1, B = 2 on one replica, work as their number)
    1-2        2, 0                 3.75     3, 0           3.0
    2-3-1      4, 3, 0              7.5      10, 3, 0       3.0

Deeper costs staleness, and memory for each minibatch in flight. Deeper at the first stage, or by a common multiple of their
replicas at several first ones, is never slower; deeper at a later stage alone can be. Where messages occupy ranks, no depth may
give the ideal. Not here: memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pdcompiler.core.period import Seconds, ideal, period
from pdcompiler.core.ticks import Ticks

NEAR = 1 + 1e-6
MOST_ROUNDS = 64
"""Deeper than given, in rounds of the stage with most replicas: what no depth up to there gives is given up."""


def least_depths(ticks: Ticks, seconds: Seconds, most: Sequence[int] | None = None) -> tuple[int, ...]:
    """The smallest depths from those of `ticks` on with the best period within 1e-6. most: of each stage, as its memory allows;
    the answer is the given depths where they already exceed it.

    From the last border to the first: the stages before a border add nothing to the period of those behind it once they are deep
    enough. What some stages lose because of `most`, others need not gain; so a second pass knows the period to be had.
    """
    target, limits = ideal(ticks, seconds), _limits(ticks, most)
    if any(limit < depth for limit, depth in zip(limits, ticks.depths, strict=True)) or period(ticks, seconds) <= target * NEAR:
        return ticks.depths
    before = -1.0
    while target > before * NEAR:
        before = target
        depths: tuple[int, ...] = ticks.depths[-1:]
        for stage in reversed(range(ticks.stages - 1)):
            replicas = ticks.replicas[stage]
            least = max(ticks.depths[stage], (depths[0] // replicas + 1) * replicas)
            part = Ticks(ticks.replicas[stage:], (least, *depths), ticks.batch)
            depths, target = _deepen(part, seconds.since(stage), limits[stage], target)
    return depths


def _limits(ticks: Ticks, most: Sequence[int] | None) -> list[int]:
    """The largest depth of each stage that leaves room for those of the later ones."""
    limits: list[int] = []
    for stage, (replicas, depth) in enumerate(zip(ticks.replicas, ticks.depths, strict=True)):
        limit = depth + MOST_ROUNDS * max(ticks.replicas)
        if most is not None:
            limit = min(limit, most[stage])
        if ticks.batch is not None:
            limit = min(limit, ticks.batch)
        if limits:
            limit = min(limit, limits[-1] - 1)
        limits.append(limit // replicas * replicas)
    return limits


def _deepen(ticks: Ticks, seconds: Seconds, limit: int, target: float) -> tuple[tuple[int, ...], float]:
    """The smallest depth of the first stage that gives the target, or else what the limit gives; with that period."""
    replicas, (first, *later) = ticks.replicas[0], ticks.depths

    def at(rounds: int) -> float:
        return period(replace(ticks, depths=(first + rounds * replicas, *later)), seconds)

    few, many, most = -1, 0, (limit - first) // replicas
    found = at(many)
    while found > target * NEAR and many < most:
        few, many = many, min(2 * many + 1, most)
        found = at(many)
    target = max(target, found)
    if many == most:
        few = -1
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (few, middle) if at(middle) <= target * NEAR else (middle, many)
    return (first + many * replicas, *later), target
