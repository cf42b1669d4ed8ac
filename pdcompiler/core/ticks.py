"""The order of schedules without flushes, by ticks, as data: who runs what, and when weights change. No torch.

In tick k each stage, from the first on, runs the forward of minibatch k, then the backward of minibatch k - depth, then an update
if a round of minibatches is complete. The replicas of a stage take turns. Two replicas and one, depths 2 and 0 (F3@0.1: forward
of minibatch 3 on stage 0, replica 1; U2@0: the second update of stage 0, on all its replicas):

    F0@0.0               F0@1.0 B0@1.0 U1@1
    F1@0.1               F1@1.0 B1@1.0 U2@1
    F2@0.0 B0@0.0        F2@1.0 B2@1.0 U3@1
    F3@0.1 B1@0.1 U1@0   F3@1.0 B3@1.0 U4@1

A forward is on the newest weights there are; with `vertical_sync` on those that contain the same minibatches on all stages; with
a `batch` (PipeDream-2BW: a tick is a microbatch, a round a batch) on those without the gradients of its own batch and of the one
before. Not here: how long a tick takes (`period.py`), and what runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from pdcompiler.core.errors import CompileError
from pdcompiler.core.schedule import Phase


@dataclass(frozen=True)
class Work:
    """One phase of one minibatch on one replica of a stage."""

    phase: Phase
    stage: int
    replica: int
    minibatch: int

    def __str__(self) -> str:
        return f"{self.phase}{self.minibatch}@{self.stage}.{self.replica}"


@dataclass(frozen=True)
class Update:
    """All replicas of a stage step with the mean of the gradients of these minibatches. number: counts a stage's updates from 1,
    and so names the version of the weights that it makes."""

    stage: int
    number: int
    minibatches: range

    def __str__(self) -> str:
        return f"U{self.number}@{self.stage}"


MOST_LINES = 24
"""Of ticks that are printed."""

Tick: TypeAlias = tuple[Work | Update, ...]


def pipedream_depths(replicas: Sequence[int]) -> tuple[int, ...]:
    """PipeDream's: on each replica as many forwards first as there are, rounded up, devices downstream for each replica."""
    return tuple(count * -(-sum(replicas[stage + 1 :]) // count) for stage, count in enumerate(replicas))


@dataclass(frozen=True)
class Ticks:
    """replicas: of each stage.   depths: how many ticks after its forward a minibatch's backward runs, for each stage.
    batch: minibatches of one update of every stage; None: each stage updates after one minibatch of each of its replicas.
    vertical_sync: whether the weights of a minibatch are of the same age on all stages."""

    replicas: tuple[int, ...]
    depths: tuple[int, ...]
    batch: int | None = None
    vertical_sync: bool = False

    def __post_init__(self) -> None:
        if not self.replicas or any(count < 1 for count in self.replicas):
            raise CompileError(f"replicas is {self.replicas}, expected one number of at least 1 for each stage")
        if len(self.depths) != len(self.replicas):
            raise CompileError(f"{len(self.depths)} depths for {len(self.replicas)} stages")
        way_out = (f"{pipedream_depths(self.replicas)}, PipeDream's",)
        for stage, (depth, count) in enumerate(zip(self.depths, self.replicas, strict=True)):
            where = f"depth {depth} of stage {stage}"
            if depth % count:
                raise CompileError(f"{where} is no multiple of its {count} replicas", ways_out=way_out)
            if stage == len(self.depths) - 1 and depth != 0:
                raise CompileError(f"{where} must be 0: the last stage's backward follows its forward", ways_out=way_out)
            if stage and self.depths[stage - 1] <= depth:
                before = self.depths[stage - 1]
                raise CompileError(f"{where} must be less than that of the stage before, {before}", ways_out=way_out)
        if self.vertical_sync and self.batch is not None:
            raise CompileError("pipedream-2bw has no vertical sync: all stages are one batch behind as it is")
        if self.batch is not None and self.batch < max(1, self.depths[0]):
            ways = (f"batches of {max(1, self.depths[0])} microbatches or more", "fewer stages")
            raise CompileError(f"a batch of {self.batch} microbatches is less than the first stage's depth {self.depths[0]}, "
                               "so two versions of the weights do not suffice", ways_out=ways)  # fmt: skip

    @property
    def name(self) -> str:
        """As `compile` knows it."""
        return "pipedream" if self.batch is None else "pipedream-2bw"

    @property
    def stages(self) -> int:
        """How many."""
        return len(self.replicas)

    @property
    def repeat(self) -> int:
        """After so many ticks the text of a tick repeats, but for the minibatches' numbers."""
        return math.lcm(*self.replicas, self.batch or 1)

    def round(self, stage: int) -> int:
        """Minibatches of one update."""
        return self.batch or self.replicas[stage]

    def lag(self, stage: int) -> int:
        """How many rounds the weights of a forward are behind the minibatch's own."""
        return 1 if self.batch else self.depths[stage] // self.replicas[stage]

    @property
    def until_known(self) -> int:
        """After so many ticks every rank has a minibatch's loss without waiting for it: each has run a backward of a later round
        of the last stage since, as seldom as its turn comes."""
        turns = max(depth + count for depth, count in zip(self.depths, self.replicas, strict=True)) - 1
        return turns + (self.replicas[-1] if self.replicas[-1] > 1 else 0)

    def weights(self, stage: int, minibatch: int) -> int:
        """The number of the update whose weights a minibatch's forward and backward use; 0: the first weights."""
        if self.vertical_sync:
            together = math.lcm(*self.replicas)
            return together * (max(0, minibatch - self.depths[0]) // together) // self.replicas[stage]
        return max(0, minibatch // self.round(stage) - self.lag(stage))

    def newest(self, stage: int, tick: int) -> int:
        """The number of the update whose weights are the newest when a tick begins."""
        return max(0, tick - self.depths[stage]) // self.round(stage)

    def staleness(self, stage: int) -> int:
        """In steady state the most updates that a minibatch's weights are behind those that all minibatches before its round
        have gone into."""
        first = math.lcm(self.repeat, self.round(stage)) * (self.depths[0] + 1)
        return max(t // self.round(stage) - self.weights(stage, t) for t in range(first, first + self.repeat))

    def in_flight(self, stage: int) -> int:
        """Minibatches whose saved values one replica holds at once."""
        return self.depths[stage] // self.replicas[stage] + 1

    def versions(self, stage: int) -> int:
        """Of the weights that one replica holds at once."""
        if self.vertical_sync:
            together = math.lcm(*self.replicas)
            return 1 + -(-self.depths[0] // together) + (together > self.replicas[stage])
        return 2 if self.batch else self.in_flight(stage)

    def tick(self, number: int, minibatches: int | None = None) -> Tick:
        """What runs in a tick, in order. minibatches: how many there are; None: no end. The last round may be a partial one."""
        return tuple(work for stage in range(self.stages) for work in self._of_stage(stage, number, minibatches))

    def until(self, minibatches: int) -> tuple[Tick, ...]:
        """All ticks of so many minibatches: while the pipeline fills, in steady state, and while it drains."""
        return tuple(self.tick(number, minibatches) for number in range(minibatches + self.depths[0]))

    def __str__(self) -> str:
        """The ticks up to the steady state, a line each, and how old the weights of each stage are."""
        count, more = self.depths[0] + self.repeat, ""
        if count > MOST_LINES:
            count, more = MOST_LINES, f"\n...  (they repeat after {self.repeat})"
        stages = range(self.stages)
        cells = [[" ".join(map(str, self._of_stage(stage, number, None))) for stage in stages] for number in range(count)]
        widths = [max(len(row[stage]) for row in cells) for stage in stages]
        lines = ["   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
        of_update = "round" if self.batch is None else f"batch of {self.batch}"
        ages = [
            f"stage {stage}: {_count(self.replicas[stage], 'replica')}, depth {self.depths[stage]}, "
            f"weights {_count(self.staleness(stage), 'update')} old, at most {_count(self.versions(stage), 'version')} kept"
            for stage in stages
        ]  # fmt: skip
        sync = " with vertical sync" if self.vertical_sync else ""
        return "\n".join([f"{self.name}{sync}, an update a {of_update}; by ticks:", *lines]) + more + "\n" + "\n".join(ages)

    def _of_stage(self, stage: int, number: int, minibatches: int | None) -> Iterator[Work | Update]:
        count, size = self.replicas[stage], self.round(stage)
        done = number - self.depths[stage]
        if minibatches is None or number < minibatches:
            yield Work("F", stage, number % count, number)
        if done >= 0 and (minibatches is None or done < minibatches):
            yield Work("B", stage, done % count, done)
            if (done + 1) % size == 0 or done + 1 == minibatches:
                yield Update(stage, done // size + 1, range(done // size * size, done + 1))


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
