"""Timeline: what all ranks do when, and what they hold, simulated or measured, so that the two lie side by side.

    rank 0   F0 F1 .. .. B0 B1
    rank 1      F0 B0 F1 B1

A rank's time falls into what it computes, what messages cost it (it sends, takes, or waits for one that is under way), and the
bubble, in which it waits for what others have not made yet. Not here: what finds the times (`simulation.py`, `recording.py`), and
how it is drawn and written (`timeline_text.py`, `timeline_trace.py`, `timeline_picture.py`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rich.table import Table

from pdcompiler import timeline_picture, timeline_text, timeline_trace
from pdcompiler.core.events import COMPUTES, OTHER, Event, Memory, Message


@dataclass(frozen=True)
class Timeline:
    """ranks: of each its events, in order.   messages: as far as they are known.   memory: of each rank, where it was counted.
    held: of each rank, the bytes that it holds from a time on.   source: "simulated" or "measured"."""

    ranks: tuple[tuple[Event, ...], ...]
    messages: tuple[Message, ...] = ()
    memory: tuple[Memory, ...] = ()
    held: tuple[tuple[tuple[float, int], ...], ...] = field(default=(), repr=False)
    source: Literal["simulated", "measured"] = "simulated"

    @property
    def finish(self) -> float:
        """Seconds until the last rank is done."""
        return max((event.end for events in self.ranks for event in events), default=0.0)

    @property
    def computing(self) -> tuple[float, ...]:
        """Seconds that each rank computes."""
        return tuple(math.fsum(event.seconds for event in events if event.kind in COMPUTES) for events in self.ranks)

    @property
    def exposed(self) -> tuple[float, ...]:
        """Seconds that messages cost each rank: it sends or takes, or waits for one that is under way."""
        return tuple(
            math.fsum(event.seconds if event.kind == "message" else event.exposed for event in events) for events in self.ranks
        )

    @property
    def bubble(self) -> tuple[float, ...]:
        """Seconds in which each rank waits for what others have not made yet, or is done before them."""
        pairs = zip(self.computing, self.exposed, strict=True)
        return tuple(max(self.finish - computing - exposed, 0.0) for computing, exposed in pairs)

    def function_seconds(self) -> dict[str, float]:
        """By stage function (stage0_forward, ...) the mean seconds of its calls; of a measured timeline with what Python does
        before each, and as "other" the same of what else a rank does: what `Pipeline.simulate(seconds=)` takes."""
        found: dict[str, list[float]] = defaultdict(list)
        for events in self.ranks:
            done = 0.0
            for event in events:
                before, done = (event.start - done if self.source == "measured" else 0.0), event.end
                if event.kind in ("F", "B", "W"):
                    found[event.name.removesuffix(f"_{event.microbatch}")].append(before + event.seconds)
                elif event.kind == OTHER and self.source == "measured":
                    found[OTHER].append(before + event.seconds)
        return {name: math.fsum(seconds) / len(seconds) for name, seconds in found.items()}

    def table(self) -> Table:
        """By rank what it computes, what messages cost it, its bubble, and its fullest moment."""
        return timeline_text.table(self)

    def memory_table(self) -> Table:
        """By rank what it holds at its fullest, in parts."""
        return timeline_text.memory_table(self)

    def text(self, width: int = 120) -> str:
        """A line for each rank, in so many characters."""
        return timeline_text.lines(self, width)

    def save_trace(self, path: str | Path) -> None:
        """As JSON for Perfetto (ui.perfetto.dev) and chrome://tracing."""
        timeline_trace.save(self, path)

    def save_picture(self, path: str | Path) -> None:
        """As SVG, PNG or PDF, by the path's end; readable on light and on dark pages."""
        timeline_picture.save(self, path)

    def __str__(self) -> str:
        return timeline_text.text(self)
