"""How long the emitted programs of a stream take per minibatch at given costs: a walk over every rank's nodes with a clock.

Messages are free and arrive when they are sent; a receive is waited for where its program finishes it, also where it was begun
ticks before; a reduction is when the last of its ranks is there. Not here: `core/period.py`, which says the same of ticks alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from pdcompiler.core import ops
from pdcompiler.core.ir import RankProgram

Seconds = Callable[[int, str], float]
"""By stage and phase."""


@dataclass
class Clocks:
    """now: of each rank.   waited: of each rank, for messages.   sent: when each message of a channel was."""

    seconds: Seconds
    now: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    waited: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    sent: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    asked: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    stashed: dict[Any, Any] = field(default_factory=dict)

    def tick(self, number: int, programs: Sequence[RankProgram]) -> None:
        """All ranks run their programs of one tick."""
        walks = [_Walk(self, number, program) for program in programs]
        while not all(walk.done for walk in walks):
            moved = [walk.advance(walks) for walk in walks]
            assert any(moved), "the programs wait for each other"


class _Walk:
    """One rank's program; stands at `at`."""

    def __init__(self, clocks: Clocks, number: int, program: RankProgram) -> None:
        self.clocks, self.number, self.rank = clocks, number, program.rank
        self.nodes, self.at = list(program.graph.nodes), 0
        self.values: dict[fx.Node, Any] = {}

    @property
    def done(self) -> bool:
        return self.at == len(self.nodes)

    def advance(self, walks: Sequence[_Walk]) -> bool:
        start = self.at
        while not self.done and self._run(self.nodes[self.at], walks):
            self.at += 1
        return self.at > start

    def _run(self, node: fx.Node, walks: Sequence[_Walk]) -> bool:
        """Whether it could run."""
        clocks, channel = self.clocks, str(node.kwargs.get("channel"))
        key = (*(node.kwargs.get(name) for name in ("kind", "stage", "rank")), self.number + int(node.kwargs.get("minibatch", 0)))
        if node.op == "call_module":
            clocks.now[self.rank] += clocks.seconds(node.meta["stage"], node.meta["phase"])
        elif node.target is ops.send:
            clocks.sent[channel].append(clocks.now[self.rank])
        elif node.target is ops.start_recv:
            self.values[node] = (channel, clocks.asked[channel])
            clocks.asked[channel] += 1
        elif node.target is ops.stash:
            clocks.stashed[key] = self.values.get(node.args[0])
        elif node.target is ops.restore:
            self.values[node] = clocks.stashed.pop(key)
        elif node.target is ops.finish_recv:
            own, number = self.values[node.args[0]]
            if number >= len(clocks.sent[own]):
                return False
            clocks.waited[self.rank] += max(0.0, clocks.sent[own][number] - clocks.now[self.rank])
            clocks.now[self.rank] = max(clocks.now[self.rank], clocks.sent[own][number])
        elif node.target is ops.all_reduce:
            return self._meet(node, walks)
        return True

    def _meet(self, node: fx.Node, walks: Sequence[_Walk]) -> bool:
        if node in self.values:  # the others came later, and took this rank along
            return True
        ranks: Any = node.kwargs["ranks"]
        there = {rank: walks[rank].nodes[walks[rank].at] for rank in ranks if not walks[rank].done}
        if any(there.get(rank) is None or there[rank].kwargs.get("ranks") != ranks for rank in ranks):
            return False
        latest = max(self.clocks.now[rank] for rank in ranks)
        for rank in ranks:
            self.clocks.now[rank] = latest
            walks[rank].values[there[rank]] = None
        return True


def period_of(programs: Sequence[Sequence[RankProgram]], seconds: Seconds, first: int) -> float:
    """Seconds per tick, of the ticks from `first` on, by the rank that is ready last."""
    clocks = Clocks(seconds)
    ends = []
    for number, tick in enumerate(programs):
        clocks.tick(number, tick)
        ends.append(max(clocks.now.values()))
    return (ends[-1] - ends[first]) / (len(ends) - 1 - first)
