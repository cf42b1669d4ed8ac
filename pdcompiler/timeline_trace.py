"""A Timeline as JSON in Chrome's trace event format, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

A simulated and a measured one have the same schema: a process each ("simulated", "measured"), a thread for each rank, a slice for
each event (its category is its kind), arrows for messages, a counter for the bytes that a rank holds. Times are in microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pdcompiler.timeline import Timeline

PROCESSES = {"simulated": 1, "measured": 2}


def save(timeline: Timeline, path: str | Path) -> None:
    """Write the file."""
    Path(path).write_text(json.dumps({"traceEvents": list(_events(timeline)), "displayTimeUnit": "ms"}))


def _events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    process = PROCESSES[timeline.source]
    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": timeline.source}}
    for rank, events in enumerate(timeline.ranks):
        at = {"pid": process, "tid": rank}
        yield {"ph": "M", "name": "thread_name", **at, "args": {"name": f"rank {rank}"}}
        for event in events:
            args = {"stage": event.stage, "microbatch": event.microbatch, "exposed_us": event.exposed * 1e6}
            when = {**_time(event.start), "dur": event.seconds * 1e6}
            yield {"ph": "X", "name": event.name, "cat": event.kind, **when, **at, "args": args}
    for number, message in enumerate(timeline.messages):
        what = {"name": message.name, "cat": "message", "id": number, "pid": process, "args": {"bytes": message.nbytes}}
        yield {"ph": "s", **what, "tid": message.sender, **_time(message.start)}
        yield {"ph": "f", "bp": "e", **what, "tid": message.receiver, **_time(message.end)}
    for rank, held in enumerate(timeline.held):
        for time, nbytes in held:
            yield {"ph": "C", "name": f"bytes held by rank {rank}", "pid": process, **_time(time), "args": {"bytes": nbytes}}


def _time(seconds: float) -> dict[str, float]:
    return {"ts": seconds * 1e6}
