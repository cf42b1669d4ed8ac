"""Which weights a minibatch is on when nobody flushes: the definitions, as formulas over its number.

Minibatch t is on version v_s(t) of stage s, the weights after so many updates of that stage, in forward and backward:

    stash           max(0, floor(t / r_s) - D_s / r_s)            as far behind as a pipeline without flushes makes them
    vertical-sync   L floor(max(0, t - D_0) / L) / r_s            all stages contain exactly the same minibatches
    2bw             max(0, floor(t / m) - 1)                      one batch behind; t counts microbatches, m of them are a batch

r_s: replicas of stage s, which take minibatches in turn.   D_s: its depth, how many minibatches later a backward runs.   L: the
least common multiple of the replicas. Update j + 1 follows minibatches j r_s ... (j + 1) r_s - 1 (2bw: those of batch j). So for
1-1-1 with PipeDream's depths and stashing, and for 2-1:

    stage 0, D = 2:   0 0 0 1 2 3 4 5 6          stage 0, r = 2, D = 2:   0 0 0 0 1 1 2 2 3
    stage 1, D = 1:   0 0 1 2 3 4 5 6 7          stage 1, r = 1, D = 0:   0 1 2 3 4 5 6 7 8
    stage 2, D = 0:   0 1 2 3 4 5 6 7 8

Part of the oracle, so nothing of schedules and programs is known here. `core/ticks.py` gets there another way; tests compare.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from pdcompiler.core.errors import CompileError

Semantics = Literal["stash", "vertical-sync", "2bw"]


@dataclass(frozen=True)
class WeightVersions:
    """replicas, depths: of each stage.   batch: with 2bw, microbatches of an update. Counted from a drain on."""

    semantics: Semantics
    replicas: tuple[int, ...]
    depths: tuple[int, ...]
    batch: int | None = None

    def __post_init__(self) -> None:
        if self.semantics not in get_args(Semantics):
            raise CompileError(f"semantics is {self.semantics!r}", ways_out=get_args(Semantics))
        _check_depths(self.replicas, self.depths)
        if (self.batch is not None) != (self.semantics == "2bw"):
            raise CompileError(f"semantics is {self.semantics!r} and batch is {self.batch}: 2bw has batches, others have none")
        if self.batch is not None and self.batch < (least := max(1, self.depths[0])):
            what = f"a batch of {self.batch} microbatches is less than the first stage's depth {self.depths[0]}"
            raise CompileError(what, ways_out=(f"batches of {least} microbatches or more",))

    def of(self, stage: int, t: int) -> int:
        """The version that minibatch t is on."""
        count, depth = self.replicas[stage], self.depths[stage]
        if self.semantics == "stash":
            return max(0, t // count - depth // count)
        if self.semantics == "vertical-sync":
            together = math.lcm(*self.replicas)
            return together * (max(0, t - self.depths[0]) // together) // count
        return max(0, t // self.round(stage) - 1)

    def round(self, stage: int) -> int:
        """Minibatches of one update."""
        return self.batch or self.replicas[stage]

    def live(self, stage: int, minibatches: int) -> int:
        """The most versions that a replica needs at once while so many run, and more may come: right after an update, the newest
        and the older ones that backwards still to come are on."""
        most = 1
        for newest in range(minibatches // self.round(stage) + 1):
            t, needed = newest * self.round(stage), {newest}
            while (version := self.of(stage, t)) <= newest:
                needed.add(version)
                t += 1
            most = max(most, len(needed))
        return most


def pipedream_depths(replicas: Sequence[int]) -> tuple[int, ...]:
    """Of N replicas in all, stage s runs floor((N - 1 - r_0 - ... - r_(s-1)) / r_s) forwards first on each of its r_s."""
    if not replicas or min(replicas) < 1:
        raise CompileError(f"replicas is {tuple(replicas)}, expected at least 1 for each stage")
    return tuple((sum(replicas[stage:]) - 1) // count * count for stage, count in enumerate(replicas))


def _check_depths(replicas: tuple[int, ...], depths: tuple[int, ...]) -> None:
    usual = (f"{pipedream_depths(replicas)}, PipeDream's",)
    if len(depths) != len(replicas):
        raise CompileError(f"{len(depths)} depths for {len(replicas)} stages", ways_out=usual)
    for stage, (depth, count) in enumerate(zip(depths, replicas, strict=True)):
        if depth % count:
            raise CompileError(f"depth {depth} of stage {stage} is no multiple of its {count} replicas", ways_out=usual)
        if stage and depths[stage - 1] <= depth:
            what = f"depth {depths[stage - 1]} of stage {stage - 1} must be greater than stage {stage}'s, {depth}"
            raise CompileError(what, ways_out=usual)
    if depths[-1] != 0:
        raise CompileError(f"depth {depths[-1]} of the last stage must be 0", ways_out=usual)
