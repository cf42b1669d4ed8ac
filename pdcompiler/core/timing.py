"""How long a schedule takes, from costs alone: the one timing model. No torch.

Each rank walks its list in order; an action starts when the rank is free and its inputs are there. Three microbatches on two
stages, 1f1b, a forward of 1 and a backward of 2 seconds, messages of 1 second, as `draw` prints it:

    F0F1        B0..F2B1..      B2..
        F0B0..F1B1..    F2B2..

and where messages occupy both ranks, as on processes that share a CPU (>> sends, << takes):

    F0>>F1>>  <<B0..F2>><<B1..    <<B2..
      <<F0B0..>><<F1B1..>><<F2B2..>>

Where a backward is in two parts, W is a part of its seconds, and B the rest. With replicas, several ranks run one stage, each its
own microbatches; the sum of their gradients (=) starts when the stage's last backward is done. Not here: what an action or a
message costs, memory, and the order of anything.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from pdcompiler.core.errors import CompileError
from pdcompiler.core.schedule import Action, Phase, Schedule, show

Costs: TypeAlias = dict[Phase, Sequence[float]]


@dataclass(frozen=True)
class Interval:
    """What a rank does from `start` to `end`: an action's text, or ">" (sends), "<" (takes), "=" (adds up gradients)."""

    what: str
    start: float
    end: float
    occupies: bool = True


@dataclass(frozen=True)
class Timing:
    """finish: when everything is done, from 0.   starts, ends: of each action.   ranks: what each does, in order."""

    finish: float
    starts: dict[Action, float]
    ends: dict[Action, float]
    ranks: tuple[tuple[Interval, ...], ...]

    @property
    def busy(self) -> tuple[float, ...]:
        """Seconds in which each rank is occupied."""
        return tuple(math.fsum(i.end - i.start for i in intervals if i.occupies) for intervals in self.ranks)

    @property
    def bubble(self) -> tuple[float, ...]:
        """Seconds in which each rank waits."""
        return tuple(self.finish - busy for busy in self.busy)


def timing(
    schedule: Schedule, *, forward: Sequence[float], backward: Sequence[float], weight: Sequence[float] = (),
    forward_transfer: Sequence[float] = (), backward_transfer: Sequence[float] = (), reduce: Sequence[float] = (),
    overlap: bool = True,
) -> Timing:  # fmt: skip
    """Walk the schedule. All costs in seconds.

    Args:
        forward, backward: of one microbatch on each stage.
        weight: of these backwards the part that makes the weights' gradients; left out: half.
        forward_transfer, backward_transfer: of one message over each border (border i lies between the stages i and i + 1);
            left out: 0. On one rank there is no message.
        reduce: of the sum of gradients over the ranks of each stage; left out: 0.
        overlap: whether messages travel while ranks compute; if not, each occupies both its ranks.

    Raises DeadlockError where the schedule waits for itself.
    """
    stages = schedule.stages
    backward = _numbers(backward, stages, "backward")
    weight = _numbers(weight or [seconds / 2 for seconds in backward], stages, "weight")
    for stage, (part, whole) in enumerate(zip(weight, backward, strict=True)):
        if part > whole:
            raise CompileError(f"weight[{stage}] is {part} s, more than backward[{stage}], of which it is a part: {whole} s")
    costs: Costs = {"F": _numbers(forward, stages, "forward"), "B": backward, "W": weight}
    messages: Costs = {
        "F": _numbers(forward_transfer or [0.0] * (stages - 1), stages - 1, "forward_transfer"),
        "B": _numbers(backward_transfer or [0.0] * (stages - 1), stages - 1, "backward_transfer"),
    }
    walk = _Walk(schedule, costs, messages, overlap)
    for rank, action in schedule.order():
        walk.run(rank, action)
    walk.reduce(_numbers(reduce or [0.0] * stages, stages, "reduce"))
    finish = max((i.end for intervals in walk.ranks for i in intervals), default=0.0)
    return Timing(finish, walk.starts, walk.ends, tuple(map(tuple, walk.ranks)))


def unit_timing(schedule: Schedule) -> Timing:
    """At the papers' unit costs: F, B and W take 1 each, a whole backward 2, messages nothing."""
    ones = [1.0] * schedule.stages
    return timing(schedule, forward=ones, backward=[2.0] * schedule.stages, weight=ones)


class _Walk:
    """Where each rank stands."""

    def __init__(self, schedule: Schedule, costs: Costs, messages: Costs, overlap: bool) -> None:
        self.stages, self.costs, self.messages, self.overlap = schedule.stages, costs, messages, overlap
        self.rank_of = {action: rank for rank, actions in enumerate(schedule.ranks) for action in actions}
        self.with_stage = any(a.stage != rank for rank, actions in enumerate(schedule.ranks) for a in actions)
        self.split = schedule.split
        self.free = [0.0] * len(schedule.ranks)
        self.ranks: list[list[Interval]] = [[] for _ in schedule.ranks]
        self.starts: dict[Action, float] = {}
        self.ends: dict[Action, float] = {}

    def run(self, rank: int, action: Action) -> None:
        """Take what the action needs, run it, send what it gives."""
        for need in action.needs(self.stages):
            if need in self.ends:
                self.take(rank, self.ends[need], 0.0 if self.rank_of[need] == rank else self.message(need))
        self.starts[action] = self.free[rank]
        self.occupy(rank, show(action, self.with_stage), self.seconds(action))
        self.ends[action] = self.free[rank]
        if not self.overlap:
            self.occupy(rank, ">", self.message(action))

    def seconds(self, action: Action) -> float:
        """That it takes by itself."""
        seconds = self.costs[action.phase][action.stage]
        is_part = action.phase == "B" and (action.stage, action.microbatch) in self.split
        return seconds - self.costs["W"][action.stage] if is_part else seconds

    def take(self, rank: int, made: float, message: float) -> None:
        """Wait until a value is here that was made at a certain time."""
        if self.overlap:
            self.free[rank] = max(self.free[rank], made + message)
        else:
            self.free[rank] = max(self.free[rank], made)
            self.occupy(rank, "<", message)

    def message(self, action: Action) -> float:
        """Seconds of the message with what an action gives; 0 where its reader is on the same rank, or nowhere."""
        reader = action.reader
        if reader is None or self.rank_of.get(reader, self.rank_of[action]) == self.rank_of[action]:
            return 0.0
        return self.messages[action.phase][min(action.stage, reader.stage)]

    def occupy(self, rank: int, what: str, seconds: float) -> None:
        """Let the rank do something now."""
        if seconds or what not in "><":
            self.ranks[rank].append(Interval(what, self.free[rank], self.free[rank] + seconds))
            self.free[rank] += seconds

    def reduce(self, seconds: Sequence[float]) -> None:
        """Add up each stage's gradients over its ranks: from the last stage's on, one after the other on each rank."""
        link = [0.0] * len(self.free) if self.overlap else self.free
        for stage in reversed([stage for stage in range(self.stages) if seconds[stage]]):
            backward = [action for action in self.ends if action.phase != "F" and action.stage == stage]
            ranks = {self.rank_of[action] for action in backward}
            start = max((*(self.ends[action] for action in backward), *(link[rank] for rank in ranks)), default=0.0)
            for rank in ranks:
                self.ranks[rank].append(Interval("=", start, start + seconds[stage], occupies=not self.overlap))
                link[rank] = start + seconds[stage]


def _numbers(given: Sequence[float], count: int, name: str) -> Sequence[float]:
    if len(given) != count:
        raise CompileError(f"{name} has {len(given)} numbers, the schedule needs {count}")
    for place, value in enumerate(given):
        if not value >= 0:
            raise CompileError(f"{name}[{place}] is {value}, expected seconds of at least 0")
    return given


def draw(timing: Timing, unit: float = 0.0, width: int = 2) -> str:
    """One line per rank, `width` characters per `unit` seconds (0: the shortest action). What is under way without occupying
    the rank is left out."""
    shortest = min((i.end - i.start for rank in timing.ranks for i in rank if i.occupies and i.end > i.start), default=1.0)
    scale = width / (unit or shortest)
    lines = []
    for rank in timing.ranks:
        line = ""
        for interval in rank:
            if interval.occupies:
                start, end = round(interval.start * scale), round(interval.end * scale)
                fill = interval.what if len(interval.what) == 1 else "."
                line = line.ljust(start) + interval.what[: end - start].ljust(end - start, fill)
        lines.append(line)
    return "\n".join(lines)
