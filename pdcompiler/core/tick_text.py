"""One tick of a schedule without flushes as a program sees it: which weights, what is kept for later ticks; all relative to it.

    2-1, tick 3 (minibatch 3 comes in)          2-1, tick 5
    F 0 on stage 0, replica 1                   the same text: the same replicas run, in steady state,
    B -2 on stage 0, replica 1                  so ticks 3 and 5 run one program
    update of stage 0 with -3 and -2
    F 0 on stage 1, replica 0
    B 0 on stage 1, replica 0
    update of stage 1 with 0

Old weights live as long as a forward or a backward to come is on them, and no longer:

- a backward takes those that its forward was on;
- a forward is on the newest, or on older ones that were kept for it: by the update that made newer ones, or handed on by the
  forward before it on the same replica.

Not here: programs, and what a stage's backward really reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pdcompiler.core.ticks import Tick, Ticks, Update


@dataclass(frozen=True)
class TickForward:
    """turn: which replica of each stage runs the minibatch.   kept: whether it is on weights that were kept for it, not on the
    newest.   next: for which later minibatch these are kept on."""

    stage: int
    turn: tuple[int, ...]
    kept: bool = False
    next: int | None = None

    def __str__(self) -> str:
        kept = " on kept weights" if self.kept else ""
        return f"F 0 on stage {self.stage}, replica {self.turn[self.stage]}{kept}"


@dataclass(frozen=True)
class TickBackward:
    """minibatch: minus how many ticks ago it came in.   before: the minibatch before it of the same round on the same replica."""

    stage: int
    turn: tuple[int, ...]
    minibatch: int
    before: int | None = None

    def __str__(self) -> str:
        return f"B {self.minibatch} on stage {self.stage}, replica {self.turn[self.stage]}"


@dataclass(frozen=True)
class TickUpdate:
    """Of a round's minibatches, and the replicas that ran them.   in_flight: whether a backward to come is on the weights before
    it.   next: by replica, for which later minibatch's forward these are kept.   mean: whether it is with the mean of the
    gradients; else with their sum."""

    stage: int
    minibatches: tuple[int, ...]
    replicas: tuple[int, ...]
    in_flight: bool
    next: tuple[int | None, ...]
    mean: bool

    def __str__(self) -> str:
        return f"update of stage {self.stage} with {' and '.join(map(str, self.minibatches))}"


@dataclass(frozen=True)
class TickLoss:
    """Of a minibatch: every rank knows it after the tick."""

    minibatch: int
    turn: tuple[int, ...]


@dataclass(frozen=True)
class TickText:
    """What runs in a tick, in order.   losses: those that every rank then knows, at the end of a drain all that are left.
    feeds: whether a minibatch comes in.   last: whether it ends a drain."""

    items: tuple[TickForward | TickBackward | TickUpdate, ...]
    losses: tuple[TickLoss, ...]
    feeds: bool
    last: bool = False

    @property
    def minibatches(self) -> tuple[int, ...]:
        """Those that run, whose gradients are summed, or whose losses are told, in this tick."""
        found = {0} if self.feeds else set()
        found |= {loss.minibatch for loss in self.losses}
        for item in self.items:
            found |= {item.minibatch} if isinstance(item, TickBackward) else set()
            found |= set(item.minibatches) if isinstance(item, TickUpdate) else set()
        return tuple(sorted(found))


def tick_text(ticks: Ticks, number: int, minibatches: int | None = None) -> TickText:
    """Tick `number`. minibatches: how many there are, once that is known: in the ticks of a drain."""
    items = tuple(_items(ticks, number, minibatches))
    last = minibatches is not None and number == last_tick(ticks, minibatches)
    first = number - ticks.until_known
    told = range(max(0, first), minibatches if last and minibatches else first + 1)
    losses = tuple(TickLoss(t - number, _turn(ticks, t)) for t in told)
    return TickText(items, losses, minibatches is None or number < minibatches, last)


def last_tick(ticks: Ticks, minibatches: int) -> int:
    """Of a drain, which begins with tick `minibatches`."""
    return minibatches + max(ticks.depths[0], 1) - 1


def _items(ticks: Ticks, number: int, minibatches: int | None) -> Iterator[TickForward | TickBackward | TickUpdate]:
    for work in _of_tick(ticks, number, minibatches):
        if isinstance(work, Update):
            yield _update(ticks, work, number, minibatches)
        elif work.phase == "F":
            yield _forward(ticks, work.stage, number)
        else:
            yield _backward(ticks, work.stage, work.minibatch, number)


def _of_tick(ticks: Ticks, number: int, minibatches: int | None) -> Tick:
    """Also, at the begin of a drain, the last stage's update for a round that has no more minibatches: its backwards ran before
    it was known that no more would come."""
    last = ticks.stages - 1
    size = ticks.round(last)
    leftover: Tick = ()
    if minibatches is not None and number == minibatches and minibatches % size:
        leftover = (Update(last, minibatches // size + 1, range(minibatches // size * size, minibatches)),)
    return (*ticks.tick(number, minibatches), *leftover)


def _forward(ticks: Ticks, stage: int, number: int) -> TickForward:
    count, version = ticks.replicas[stage], ticks.weights(stage, number)
    if version == ticks.newest(stage, number):
        return TickForward(stage, _turn(ticks, number))
    goes_on = ticks.weights(stage, number + count) == version
    return TickForward(stage, _turn(ticks, number), True, count if goes_on else None)


def _backward(ticks: Ticks, stage: int, t: int, number: int) -> TickBackward:
    before = t - ticks.replicas[stage]
    is_same = before >= t // ticks.round(stage) * ticks.round(stage)
    return TickBackward(stage, _turn(ticks, t), t - number, before - number if is_same else None)


def _turn(ticks: Ticks, minibatch: int) -> tuple[int, ...]:
    return tuple(minibatch % count for count in ticks.replicas)


def _update(ticks: Ticks, update: Update, number: int, minibatches: int | None) -> TickUpdate:
    stage, old = update.stage, update.number - 1
    count = ticks.replicas[stage]
    running = range(max(0, number - ticks.depths[stage] + 1), min(number + 1, minibatches or number + 1))
    in_flight = any(ticks.weights(stage, t) == old for t in running)
    following = tuple(_next_forward(ticks, stage, replica, old, number, minibatches) for replica in range(count))
    ran = tuple(t % count for t in update.minibatches)
    return TickUpdate(stage, tuple(t - number for t in update.minibatches), ran, in_flight, following, ticks.batch is None)


def _next_forward(ticks: Ticks, stage: int, replica: int, version: int, number: int, minibatches: int | None) -> int | None:
    """The first minibatch to come on a replica that is on a version; relative to the tick."""
    if minibatches is not None:
        return None  # no more forwards
    count = ticks.replicas[stage]
    t = number + 1 + (replica - number - 1) % count
    while ticks.weights(stage, t) < version:
        t += count
    return t - number if ticks.weights(stage, t) == version else None
