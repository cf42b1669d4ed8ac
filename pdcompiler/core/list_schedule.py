"""An order found by walking: whenever a rank is free, it starts the best of what can start.

    a rank's choice, first to last    may start when
    B  (of the last stage first)      its forward is done, and the gradient has come
    F  (of the last stage first)      its input has come, and the rank holds fewer microbatches than it may
    W                                 its B is done, and nothing else can start

A rank holds a microbatch of a stage from its forward until its W (its B, where backwards are whole). Actions of one kind on a
stage run in the order of the microbatches, so that sums are those of a loop. The result is the order alone; how long it takes,
`timing.py` says. Not here: named schedules (`passes/schedules/`), and which limits are good.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pdcompiler.core.errors import CompileError
from pdcompiler.core.schedule import PHASES, Action, Phase, Schedule

Better = Callable[[Action], tuple[float, ...]]
"""Of what can start, the least is chosen."""


def backward_first(action: Action) -> tuple[float, ...]:
    """B, then F, then W; of each, that of the latest stage."""
    return ("BFW".index(action.phase), -action.stage, action.microbatch)


@dataclass(frozen=True)
class Task:
    """What is to be ordered. rank_of: of each stage.   limits: of each rank, how many it may hold at once, a stage's microbatch
    counting one.   warm_up: of each stage, the most forwards without their B.   split: whether backwards are in two parts.
    seconds: of each stage's F, B and W; left out: 1.   transfer: of a message over each border between stages; left out: 0."""

    rank_of: tuple[int, ...]
    microbatches: int
    limits: tuple[int, ...]
    warm_up: tuple[int, ...] = ()
    split: bool = True
    seconds: dict[Phase, Sequence[float]] = field(default_factory=dict)
    transfer: Sequence[float] = ()

    @property
    def stages(self) -> int:
        """How many."""
        return len(self.rank_of)


def list_schedule(task: Task, name: str, better: Better = backward_first) -> Schedule:
    """The order. Raises CompileError, naming the rank, where a limit is too low for anything to go on."""
    walk = _Walk(task, better)
    while walk.left:
        walk.step()
    return Schedule(tuple(map(tuple, walk.order)), name)


class _Walk:
    """Where every rank and stage stands. next: of each stage and phase, the microbatch that comes next.   arrived: when a stage
    has what an action gives."""

    def __init__(self, task: Task, better: Better) -> None:
        self.task, self.better = task, better
        ranks = 1 + max(task.rank_of)
        self.own = [[s for s in range(task.stages) if task.rank_of[s] == rank] for rank in range(ranks)]
        self.phases = PHASES if task.split else PHASES[:2]
        self.next: dict[tuple[Phase, int], int] = {(phase, s): 0 for phase in self.phases for s in range(task.stages)}
        self.arrived: dict[tuple[Action, int], float] = {}
        self.free, self.held = [0.0] * ranks, [0] * ranks
        self.order: list[list[Action]] = [[] for _ in range(ranks)]
        self.times = [0.0]
        self.left = len(self.phases) * task.stages * task.microbatches

    def step(self) -> None:
        """Let every rank that is free at the next moment start something."""
        if not self.times:
            self._stuck()
        now = heapq.heappop(self.times)
        while self.times and self.times[0] == now:
            heapq.heappop(self.times)
        for rank in range(len(self.own)):
            if self.free[rank] <= now:
                ready = [action for action in self._candidates(rank) if self._comes(action) <= now]
                if ready:
                    self._start(rank, min(ready, key=self.better), now)

    def _candidates(self, rank: int) -> list[Action]:
        found = []
        for stage in self.own[rank]:
            for phase in self.phases:
                microbatch = self.next[phase, stage]
                if microbatch < self.task.microbatches and (phase != "F" or self._has_room(rank, stage)):
                    found.append(Action(phase, stage, microbatch))
        return found

    def _has_room(self, rank: int, stage: int) -> bool:
        warm_up = self.task.warm_up[stage] if self.task.warm_up else self.task.microbatches
        return self.held[rank] < self.task.limits[rank] and self.next["F", stage] - self.next["B", stage] < warm_up

    def _comes(self, action: Action) -> float:
        """When all that an action needs is there."""
        needs = action.needs(self.task.stages)
        return max((self.arrived.get((need, action.stage), math.inf) for need in needs), default=0.0)

    def _start(self, rank: int, action: Action, now: float) -> None:
        task = self.task
        end = now + (task.seconds[action.phase][action.stage] if task.seconds else 1.0)
        self.free[rank] = end
        self.order[rank].append(action)
        self.next[action.phase, action.stage] += 1
        self.left -= 1
        self.held[rank] += {"F": 1, "B": 0 if task.split else -1, "W": -1}[action.phase]
        heapq.heappush(self.times, end)
        self.arrived[action, action.stage] = end
        reader = action.reader
        if reader is not None and reader.stage < task.stages:
            is_message = task.rank_of[reader.stage] != rank and bool(task.transfer)
            comes = end + (task.transfer[min(action.stage, reader.stage)] if is_message else 0.0)
            self.arrived[action, reader.stage] = comes
            heapq.heappush(self.times, comes)

    def _stuck(self) -> None:
        for rank, own in enumerate(self.own):
            if self.held[rank] >= self.task.limits[rank]:
                raise CompileError(
                    f"rank {rank} may hold {self.task.limits[rank]} microbatches of its stages {own} at once, and waits for a "
                    "backward that needs another forward of it",
                    ways_out=(f"at least {self.task.limits[rank] + 1} there",),
                )
        raise AssertionError("nothing can start, and no limit is reached")
