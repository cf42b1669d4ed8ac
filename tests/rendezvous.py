"""Whether ranks' programs end where no message is buffered: a second answer to what `core/verify_ranks.py` proves.

A send ends once the receive that it meets, the one of its number on the channel, stands open on the other rank: as a `recv` that
the rank has come to, or as a `start_recv` that it has passed. A receive ends once its message was sent, a reduction once all its
ranks have come to it. Each rank is a generator, which gives what it waits for. Not here: values; messages are the nodes that send
them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from pdcompiler.core import ops
from pdcompiler.core.ir import RankProgram, type_of

Wait = tuple[fx.Node, Callable[[], bool]]
"""Where a rank stands, and whether it may go on."""


class Stuck(AssertionError):
    """No rank can go on; the message says where each stands."""


@dataclass
class Meetings:
    """What all ranks see of each other."""

    asked: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    sent: dict[str, list[fx.Node]] = field(default_factory=lambda: defaultdict(list))
    given: dict[tuple[Any, int], int] = field(default_factory=lambda: defaultdict(int))


def finish(programs: Sequence[RankProgram]) -> int:
    """Walk all programs to their ends; how many messages they send. Raises Stuck, or AssertionError where a message meets a
    receive of another kind, or none."""
    meetings = Meetings()
    walks = [walk(program, meetings) for program in programs]
    waits = [next(each, None) for each in walks]
    while any(waits):
        free = [rank for rank, wait in enumerate(waits) if wait is not None and wait[1]()]
        if not free:
            raise Stuck("\n".join(f"rank {rank} stands at {wait[0]}" for rank, wait in enumerate(waits) if wait is not None))
        for rank in free:
            waits[rank] = next(walks[rank], None)
    sent = {channel: len(nodes) for channel, nodes in meetings.sent.items()}
    assert sent == meetings.asked, "a receive that nothing is sent to"
    return sum(sent.values())


def walk(program: RankProgram, meetings: Meetings) -> Iterator[Wait]:
    """One rank, from wait to wait."""
    begun: dict[Any, Any] = {}
    for node in program.graph.nodes:
        begins, ends = node, node.args[0] if node.args else None
        if node.target is ops.send:
            yield from _send(node, str(node.kwargs["channel"]), meetings)
        if node.target in (ops.recv, ops.start_recv):
            channel = str(node.kwargs["channel"])
            begun[begins] = (channel, meetings.asked[channel])
            meetings.asked[channel] += 1
        if node.target in (ops.all_reduce, ops.start_all_reduce):
            ranks: Any = node.kwargs["ranks"]
            meetings.given[ranks, program.rank] += 1
            begun[begins] = (ranks, meetings.given[ranks, program.rank])
        if node.target in (ops.recv, ops.finish_recv):
            receive: Any = begins if node.target is ops.recv else ends
            yield from _receive(node, receive, *begun[receive], meetings)
        if node.target in (ops.all_reduce, ops.finish_all_reduce):
            yield from _meet(node, *begun[begins if node.target is ops.all_reduce else ends], meetings)


def _send(node: fx.Node, channel: str, meetings: Meetings) -> Iterator[Wait]:
    yield node, lambda: meetings.asked[channel] > len(meetings.sent[channel])
    meetings.sent[channel].append(node)


def _receive(node: fx.Node, asked: fx.Node, channel: str, number: int, meetings: Meetings) -> Iterator[Wait]:
    yield node, lambda: len(meetings.sent[channel]) > number
    message = meetings.sent[channel][number]
    value = type_of(message.args[0])  # type: ignore[arg-type]
    assert (value.shape, value.dtype) == (asked.kwargs["shape"], asked.kwargs["dtype"]), f"{asked} meets {message}"
    assert all(asked.meta[key] == message.meta[key] for key in ("stage", "microbatch", "phase")), f"{asked} meets {message}"


def _meet(node: fx.Node, ranks: Sequence[int], number: int, meetings: Meetings) -> Iterator[Wait]:
    yield node, lambda: all(meetings.given[ranks, rank] >= number for rank in ranks)
