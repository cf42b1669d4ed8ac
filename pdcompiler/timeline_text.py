"""A Timeline for the terminal: a line of characters for each rank, and a table of where the time and the memory go.

    rank 0   F0  F1          B0      B1              computes 60 %   messages 5 %   bubble 35 %   12.4 MiB

Not here: the schedule alone at given costs (`core/timing.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from pdcompiler.core.events import Event, Memory
from pdcompiler.core.explanation import amount

if TYPE_CHECKING:
    from pdcompiler.timeline import Timeline

LEAST = 4
"""Characters of an action that is written out; shorter ones are their letter alone."""


def text(timeline: Timeline) -> str:
    """All that there is."""
    console = Console(width=120, highlight=False)
    with console.capture() as capture:
        console.print(table(timeline), *([memory_table(timeline)] if timeline.memory else []), sep="\n")
    return f"{lines(timeline, 120)}\n\n{capture.get().rstrip()}"


def lines(timeline: Timeline, width: int) -> str:
    """A line for each rank, all to one scale. Forwards, backwards and weights' gradients by their letter; - is a message that the
    rank waits for or works on, + other work; what is too short to be seen is left out."""
    label = len(f"rank {len(timeline.ranks) - 1} ")
    scale = (width - label) / (timeline.finish or 1.0)
    return "\n".join(f"{f'rank {rank}':<{label}}{_line(events, scale)}" for rank, events in enumerate(timeline.ranks))


def _line(events: tuple[Event, ...], scale: float) -> str:
    line = ""
    for event in events:
        start, end = round(event.start * scale), round(event.end * scale)
        line = line.ljust(start) + _word(event, end - start)
    return line.rstrip()


def _word(event: Event, width: int) -> str:
    if event.kind == "wait":
        exposed = round(width * event.exposed / event.seconds)
        return " " * (width - exposed) + "-" * exposed
    if event.kind not in ("F", "B", "W"):
        return ("-" if event.kind == "message" else "+") * width
    name = f"{event.kind}{event.microbatch}"
    return f"{name:{event.kind.lower()}<{width - 1}} " if width > max(LEAST, len(name)) else (name[:1] * width)


def table(timeline: Timeline) -> Table:
    """See `Timeline.table`."""
    finish = timeline.finish
    found = Table("rank", "computes", "messages", "bubble", title=f"{timeline.source}: {seconds(finish)}", title_justify="left")
    if timeline.memory:
        found.add_column("holds")
        found.add_column("at its fullest")
    for rank, times in enumerate(zip(timeline.computing, timeline.exposed, timeline.bubble, strict=True)):
        memory = [text for m in timeline.memory[rank : rank + 1] for text in (f"{amount(m.peak)}B", place(m))]
        found.add_row(str(rank), *(f"{seconds(time)} {time / (finish or 1.0):4.0%}" for time in times), *memory)
    return found


def memory_table(timeline: Timeline) -> Table:
    """See `Timeline.memory_table`."""
    parts = list(dict.fromkeys(part for memory in timeline.memory for part in memory.parts))
    found = Table("rank", *parts, title="what a rank holds at its fullest", title_justify="left")
    for rank, memory in enumerate(timeline.memory):
        found.add_row(str(rank), *(f"{amount(memory.parts.get(part, 0))}B" for part in parts))
    return found


def place(memory: Memory) -> str:
    """Where a rank is at its fullest."""
    return memory.node + (f": {memory.inside}" if memory.inside else "")


def seconds(count: float) -> str:
    """With a unit that fits."""
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if count * factor >= 1:
            return f"{count * factor:.3g} {unit}"
    return f"{count * 1e6:.3g} µs"
