"""What a rank does when, and what it holds, as data: simulated (`backends/simulator.py`, `backends/live_bytes.py`) or recorded
(`backends/recorder.py`) in the same words.

    F0      0.0 .. 1.0    stage0_forward_0
    wait    1.0 .. 1.5    h_1, exposed 0.2: so long was the message under way

Not here: all ranks together (`pdcompiler/timeline.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["F", "B", "W", "other", "message", "wait"]
"""A stage's forward, its backward or a part of it, other work of the program, sending or taking a message, waiting."""
COMPUTES: tuple[Kind, ...] = ("F", "B", "W", "other")
OTHER: Kind = "other"


@dataclass(frozen=True)
class Event:
    """What a rank does from `start` to `end`, in seconds. name: of the program's node, of a stage's function with the
    microbatch.   exposed: of a wait, the seconds in which what it waits for was under way; the rest is bubble."""

    kind: Kind
    name: str
    start: float
    end: float
    stage: int | None = None
    microbatch: int | None = None
    exposed: float = 0.0

    @property
    def seconds(self) -> float:
        """How long."""
        return self.end - self.start


@dataclass(frozen=True)
class Message:
    """A value under way from one rank to another, from when it leaves until it is there."""

    name: str
    sender: int
    receiver: int
    nbytes: int
    start: float
    end: float


@dataclass(frozen=True)
class Memory:
    """What a rank holds at its fullest. peak: bytes.   node: of its program, that runs then.   inside: the operation within a
    stage's function, if one.   parts: what it is made of, in bytes, the largest first."""

    peak: int
    node: str
    inside: str | None
    parts: Mapping[str, int]
