"""Walk the ranks' programs with a clock in place of tensors: when each node runs, when each message is under way.

    rank 0   F0  F1  ....  B0  B1         F0's message leaves when it is made and its receive has been asked for; while it is
    rank 1       F0  B0  F1  B1           under way, it has its sender's and its receiver's port to itself

What the distributed backend does is done here: messages of a channel in order, receives asked for where the program says, at most
`window` sends of a channel open, sums over ranks once all of them have given their part. Where messages don't overlap with
computing (processes that share a computer's cores), sending and taking one occupies the rank for its seconds, as in
`core/timing.py`, of which this is the finer form: on a schedule's programs both give the same times. Not here: what anything
costs, and bytes (`live_bytes.py`).
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import fx

from pdcompiler.core import ops
from pdcompiler.core.errors import DeadlockError
from pdcompiler.core.events import Event, Kind, Message
from pdcompiler.core.ir import RankProgram, ValueType, type_of
from pdcompiler.core.printer import show_node

REDUCTIONS = (ops.all_reduce, ops.start_all_reduce)
DONE = object()


class Prices(Protocol):
    """What things cost, in seconds."""

    @property
    def overlap(self) -> bool:
        """Whether messages are under way while ranks compute."""

    @property
    def window(self) -> Mapping[str, int]:
        """Of each channel, how many sends may be open."""

    def compute(self, rank: int, node: fx.Node) -> float:
        """A node of a rank's program."""

    def message(self, sender: int, receiver: int, nbytes: int) -> tuple[float, float]:
        """The latency, and the seconds in which the ports are taken."""

    def port(self, sender: int, receiver: int) -> int:
        """Which of a rank's ports a message takes: the level of the machine that it goes over."""

    def reduce(self, ranks: Sequence[int], nbytes: int) -> float:
        """A sum over ranks, of so many bytes on each."""


@dataclass
class Walked:
    """events: of each rank.   messages: in the order in which they begin.   starts, ends: of each rank's nodes."""

    events: list[list[Event]]
    messages: list[Message]
    starts: list[list[float]]
    ends: list[list[float]]


def simulate(programs: Sequence[RankProgram], prices: Prices) -> Walked:
    """When everything runs, from 0. Raises DeadlockError where the programs wait for each other."""
    return _Simulation(programs, prices).run()


@dataclass
class _Meeting:
    """A message, or a sum over ranks: complete when all sides are there. ranks: sender and receiver, or all of a sum.   sides:
    when each came.   end: when it is complete, None until that is known.   seconds: that it occupies a rank, where ranks do not
    compute meanwhile."""

    ranks: tuple[int, ...]
    nbytes: int
    seconds: float
    sides: dict[Any, float] = field(default_factory=dict)
    end: float | None = None
    waiting: list[int] = field(default_factory=list)


class _Simulation:
    """Where every rank stands. numbers: how many messages of a channel a side has sent or asked for, in how many sums of a group
    a rank has taken part."""

    def __init__(self, programs: Sequence[RankProgram], prices: Prices) -> None:
        self.programs, self.prices = programs, prices
        self.clock = [0.0 for _ in programs]
        self.queue = [(0.0, rank) for rank in range(len(programs))]
        self.at: list[fx.Node | None] = [None for _ in programs]
        self.meetings: dict[Any, _Meeting] = {}
        self.numbers: dict[Any, int] = defaultdict(int)
        self.ports: dict[tuple[str, int, int], float] = defaultdict(float)
        self.sizes = _sizes(programs)
        self.found = Walked([[] for _ in programs], [], [[] for _ in programs], [[] for _ in programs])

    def run(self) -> Walked:
        walks = [self._rank(program) for program in self.programs]
        while self.queue:
            _, rank = heapq.heappop(self.queue)
            meeting = next(walks[rank], DONE)
            if isinstance(meeting, _Meeting):
                meeting.waiting.append(rank)
            elif meeting is not DONE:
                heapq.heappush(self.queue, (self.clock[rank], rank))
        stuck = [f"rank {rank} waits at {show_node(node)}" for rank, node in enumerate(self.at) if node is not None]
        if stuck:
            raise DeadlockError("\n".join(["the ranks' programs wait for each other:", *stuck]))
        return self.found

    def _rank(self, program: RankProgram) -> Iterator[_Meeting | None]:
        """A rank's walk: gives None where time has passed, and a meeting whose end isn't known where it waits for that."""
        rank, started, sent = program.rank, dict[fx.Node, _Meeting](), defaultdict[str, deque[_Meeting]](deque)
        for node in program.graph.nodes:
            self.at[rank] = node
            begin = self.clock[rank]
            self.found.starts[rank].append(begin)
            if node.target is ops.send:
                yield from self._send(rank, node, sent[str(node.kwargs["channel"])])
            elif node.target in (ops.start_recv, ops.start_all_reduce):
                started[node] = self._come(rank, node)
                if seconds := self.prices.compute(rank, node):
                    self._spend(rank, node, "other", seconds)
            elif node.target in (ops.finish_recv, ops.finish_all_reduce):
                yield from self._finish(rank, node, started.pop(node.all_input_nodes[0]))
            elif node.target in (ops.recv, ops.all_reduce):
                yield from self._finish(rank, node, self._come(rank, node))
            elif (seconds := self.prices.compute(rank, node)) or node.op == "call_module":
                self._spend(rank, node, _kind(node), seconds)
            self.found.ends[rank].append(self.clock[rank])
            if self.clock[rank] > begin:
                yield None
        self.at[rank] = None

    def _spend(self, rank: int, node: fx.Node, kind: Kind, seconds: float, exposed: float = 0.0) -> None:
        begin = self.clock[rank]
        self.clock[rank] = begin + seconds
        name = f"{node.target}_{node.meta['microbatch']}" if node.op == "call_module" else node.name
        event = Event(kind, name, begin, self.clock[rank], node.meta["stage"], node.meta["microbatch"], exposed)
        self.found.events[rank].append(event)

    def _send(self, rank: int, node: fx.Node, sent: deque[_Meeting]) -> Iterator[_Meeting | None]:
        """Wait where too many of the channel's are open."""
        receiver: Any = node.kwargs["to"]
        meeting = self._message(node, "send", rank, receiver)
        sent.append(meeting)
        if not self.prices.overlap and meeting.seconds:
            self._spend(rank, node, "message", meeting.seconds)
        while len(sent) > self.prices.window.get(str(node.kwargs["channel"]), 1):
            yield from self._wait(rank, node, sent.popleft())

    def _come(self, rank: int, node: fx.Node) -> _Meeting:
        """Ask for a message, or give a part of a sum."""
        if node.target not in REDUCTIONS:
            sender: Any = node.kwargs["frm"]
            return self._message(node, "recv", sender, rank)
        ranks: Any = node.kwargs["ranks"]
        number = self._next(ranks, rank)
        if (ranks, number) not in self.meetings:
            nbytes = sum(_nbytes(type_of(value)) for value in node.all_input_nodes)
            self.meetings[ranks, number] = _Meeting(ranks, nbytes, self.prices.reduce(ranks, nbytes))
        meeting = self.meetings[ranks, number]
        meeting.sides[rank] = self.clock[rank]
        if len(meeting.sides) == len(ranks):
            self._end(meeting, max(meeting.sides.values()) + (meeting.seconds if self.prices.overlap else 0.0))
        return meeting

    def _message(self, node: fx.Node, side: str, sender: int, receiver: int) -> _Meeting:
        """One side of the channel's next message is there. With the other it is under way as soon as both ports are free; where
        ranks do the work themselves, it can be taken when it is sent."""
        channel = str(node.kwargs["channel"])
        number = self._next(channel, side)
        nbytes = self.sizes[channel][number]
        latency, seconds = self.prices.message(sender, receiver, nbytes)
        meeting = self.meetings.setdefault((channel, number), _Meeting((sender, receiver), nbytes, latency + seconds))
        meeting.sides[side] = self.clock[sender if side == "send" else receiver]
        if len(meeting.sides) == 2:
            begin = meeting.sides["send"]
            if self.prices.overlap:
                port = self.prices.port(sender, receiver)
                ways = (("out", sender, port), ("in", receiver, port))
                begin = max(*meeting.sides.values(), *(self.ports[way] for way in ways))
                self.ports.update(dict.fromkeys(ways, begin + seconds))
            name = node.name.removeprefix("pending_")
            self.found.messages.append(Message(name, sender, receiver, nbytes, begin, begin + latency + seconds))
            self._end(meeting, begin + latency + seconds if self.prices.overlap else begin)
        return meeting

    def _next(self, key: Any, side: Any) -> int:
        number = self.numbers[key, side]
        self.numbers[key, side] += 1
        return number

    def _end(self, meeting: _Meeting, end: float) -> None:
        meeting.end = end
        for rank in meeting.waiting:
            heapq.heappush(self.queue, (max(self.clock[rank], end), rank))
        meeting.waiting.clear()

    def _finish(self, rank: int, node: fx.Node, meeting: _Meeting) -> Iterator[_Meeting | None]:
        """Take a message, or a sum."""
        yield from self._wait(rank, node, meeting)
        if not self.prices.overlap and meeting.seconds:
            self._spend(rank, node, "message", meeting.seconds)

    def _wait(self, rank: int, node: fx.Node, meeting: _Meeting) -> Iterator[_Meeting | None]:
        """Until it is complete. While it is under way that is the message's doing; before, it is bubble."""
        if meeting.end is None:
            yield meeting
        assert meeting.end is not None, "who waits is woken by the end"
        if (seconds := meeting.end - self.clock[rank]) > 0:
            sent = meeting.sides.get("send", max(meeting.sides.values()))
            self._spend(rank, node, "wait", seconds, exposed=min(seconds, meeting.end - sent))


def _sizes(programs: Sequence[RankProgram]) -> dict[str, list[int]]:
    """Of the messages of each channel, in order."""
    sizes: dict[str, list[int]] = defaultdict(list)
    for program in programs:
        for node in program.graph.nodes:
            if node.target in (ops.recv, ops.start_recv):
                sizes[str(node.kwargs["channel"])].append(_nbytes(ValueType(node.kwargs["shape"], node.kwargs["dtype"])))
    return sizes


def _nbytes(type: Any) -> int:
    return int(type.nbytes()) if isinstance(type, ValueType) else 0


def _kind(node: fx.Node) -> Kind:
    """Of a node that computes."""
    if node.op != "call_module":
        return "other"
    return "F" if node.meta["phase"] == "F" else "W" if node.meta["phase"] == "W" else "B"
