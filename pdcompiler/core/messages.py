"""Whether ranks that send and take messages in a given order wait for each other for ever, under a named model. No torch.

A channel leads from one rank to another. Models:

    unbuffered        a send waits until its receive begins
    k buffers         a send waits while k messages of its channel have not been taken
    any buffers       no send waits: what is stuck here is stuck under every model
    in order          no send waits, but a receive takes the oldest message of its channel, and waits where that is another

Ranks do one thing after the other, so where they stop doesn't depend on who is faster. Not here: where messages
stand (`lint_messages.py`).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal

from pdcompiler.core.schedule import Action
from pdcompiler.core.schedule_csv import Cell

Does = Literal["compute", "send", "recv"]


@dataclass(frozen=True)
class Event:
    """One thing that a rank does, at a cell.   action: what it computes, or whose value it sends or takes.
    other: to or from which rank.   needs: what must have been computed on the same rank."""

    cell: Cell
    does: Does
    action: Action
    other: int = -1
    needs: tuple[Action, ...] = ()


@dataclass(frozen=True)
class Wait:
    """A rank stops at an event for ever, because another (or its own) is never reached."""

    event: Event
    other: Event

    def __str__(self) -> str:
        at, what = self.event.cell.place, self.event.does
        if what == "send":
            return f"{at}: its send waits for rank {self.event.other}, cell {self.other.cell.position}, {self.other.cell.text}"
        if self.other.does == "recv":  # in order: another message is older
            return f"{at}: its message is behind one for cell {self.other.cell.position}, {self.other.cell.text}, which is later"
        return f"{at} waits for {self.other.cell.place}"


def deadlock(ranks: Sequence[Sequence[Event]], buffers: float = inf, *, in_order: bool = False) -> tuple[Wait, ...]:
    """The shortest cycle of ranks that wait for each other; empty where every rank reaches its end.

    Every message must have one send and one receive, and what a computation needs must be computed on its rank.
    """
    walk = _Walk(ranks, buffers, in_order)
    while any([walk.advance(rank) for rank in range(len(ranks))]):
        pass
    waits = {rank: walk.wait(rank) for rank in range(len(ranks)) if walk.at[rank] < len(ranks[rank])}
    return min((_cycle(rank, waits) for rank in waits), key=len, default=())


def least_buffers(ranks: Sequence[Sequence[Event]]) -> int:
    """How many buffers a channel needs, where any number is enough."""
    most = max((len(events) for events in ranks), default=0)
    return next(k for k in range(most + 1) if not deadlock(ranks, k))


class _Walk:
    """Where each rank stands."""

    def __init__(self, ranks: Sequence[Sequence[Event]], buffers: float, in_order: bool) -> None:
        self.ranks, self.buffers, self.in_order = ranks, buffers, in_order
        self.at = [0] * len(ranks)
        self.done: set[Action] = set()
        self.sent: dict[tuple[int, int], deque[Action]] = defaultdict(deque)
        self.makes = {(e.action, e.does): e for events in ranks for e in events}

    def advance(self, rank: int) -> bool:
        """Walk a rank until it has to wait; whether it moved."""
        start = self.at[rank]
        while self.at[rank] < len(self.ranks[rank]) and self.can_do(rank, self.ranks[rank][self.at[rank]]):
            self.at[rank] += 1
        return self.at[rank] > start

    def can_do(self, rank: int, event: Event) -> bool:
        """Do it, if it needs not wait."""
        if event.does == "compute":
            if not self.done.issuperset(event.needs):
                return False
            self.done.add(event.action)
            return True
        if event.does == "recv":
            channel = self.sent[event.other, rank]
            if event.action not in channel or (self.in_order and channel[0] != event.action):
                return False
            channel.remove(event.action)
            return True
        if self.buffers:
            has_room = len(self.sent[rank, event.other]) < self.buffers
        else:
            has_room = not self.sent[rank, event.other] and self.makes[event.action, "recv"] is self.head(event.other)
        if has_room:
            self.sent[rank, event.other].append(event.action)
        return has_room

    def head(self, rank: int) -> Event | None:
        """At which event a rank stands."""
        return self.ranks[rank][self.at[rank]] if self.at[rank] < len(self.ranks[rank]) else None

    def wait(self, rank: int) -> Wait:
        """What a rank that stands still waits for."""
        event = self.ranks[rank][self.at[rank]]
        if event.does == "compute":
            missing = next(need for need in event.needs if need not in self.done)
            return Wait(event, self.makes[missing, "compute"])
        if event.does == "recv":
            channel = self.sent[event.other, rank]
            if self.in_order and event.action in channel:
                return Wait(event, self.makes[channel[0], "recv"])
            return Wait(event, self.makes[event.action, "send"])
        oldest = self.sent[rank, event.other]
        return Wait(event, self.makes[oldest[0] if oldest else event.action, "recv"])


def _cycle(start: int, waits: dict[int, Wait]) -> tuple[Wait, ...]:
    """The cycle into which a rank's waiting leads."""
    path = [start]
    while (following := waits[path[-1]].other.cell.rank) not in path:
        path.append(following)
    return tuple(waits[rank] for rank in path[path.index(following) :])
