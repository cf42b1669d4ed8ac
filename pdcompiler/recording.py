"""Record a step as it runs under torchrun, and put all ranks' records together as one Timeline.

    with pipe.record() as recording:
        pipe.step(ids)                       runs as always; the ranks begin to count together
    recording.timeline.save_trace(path)      every rank has all of it

How long a message was under way while a rank waited for it is counted from when it was sent. Not here: what the clock is read
around (`backends/recorder.py`), nor what a Timeline can do (`timeline.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from pdcompiler.backends.codegen import generate
from pdcompiler.backends.distributed import Distributed
from pdcompiler.backends.recorder import Part, Recorder
from pdcompiler.core.errors import CompileError
from pdcompiler.core.events import Event, Memory, Message
from pdcompiler.core.ir import RankProgram
from pdcompiler.timeline import Timeline

Record = tuple[tuple[Event, ...], list[Part], Memory | None]
"""Of a rank: its events, their parts in messages, its memory."""


class Recording:
    """What `Pipeline.record` gives. timeline: of the newest step within, once the `with` is left."""

    def __init__(self, memory: bool) -> None:
        self.memory, self.begin = memory, 0.0
        self.recorder: Recorder | None = None
        self._timeline: Timeline | None = None

    def run(
        self, backend: Distributed, program: RankProgram, meaning: Mapping[Any, Any], inputs: Mapping[str, Any],
        window: Mapping[str, int],
    ) -> Any:  # fmt: skip
        """Run a rank's program, recorded."""
        self.recorder = Recorder(program, backend.device, self.memory)
        module = generate(_copy(program), self.recorder.timed(meaning))
        used = [inputs[str(node.target)] for node in program.graph.nodes if node.op == "placeholder"]
        backend.of_all(torch.zeros((), device=backend.device), dist.ReduceOp.SUM)  # so that all begin together
        self.begin = self.recorder.clock()
        with self.recorder.recording(module, used):
            return backend.run(program, module, inputs, window)

    def gather(self, backend: Distributed | None) -> None:
        """Put the ranks' records together, on each of them."""
        if backend is None or self.recorder is None:
            raise CompileError("nothing was recorded", ways_out=("take a step within `with pipe.record():`",))
        own: Record = self.recorder.events(self.begin), self.recorder.parts(), self.recorder.memory()
        self._timeline = together(backend.gather(own))

    @property
    def timeline(self) -> Timeline:
        """Of all ranks."""
        if self._timeline is None:
            raise CompileError("the recording has not ended", ways_out=("ask after the `with`",))
        return self._timeline


def _copy(program: RankProgram) -> RankProgram:
    """Whose code may be another."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(program.graph, {}))
    return RankProgram(program.rank, graph, program.root)


def together(records: Sequence[Record]) -> Timeline:
    """One timeline of all ranks' records. A message is under way from when it is sent, a sum from when the last part is there."""
    came: dict[Any, float] = {}
    senders: dict[Any, int] = {}
    for rank, (events, parts, _) in enumerate(records):
        for event, part in zip(events, parts, strict=True):
            if part.gives:
                came[part.meeting] = max(event.start, came.get(part.meeting, 0.0))
                senders[part.meeting] = rank
    ranks, messages = [], []
    for rank, (events, parts, _) in enumerate(records):
        own = []
        for event, part in zip(events, parts, strict=True):
            if part.waits:
                begin = came[part.meeting]
                event = replace(event, exposed=event.end - min(max(event.start, begin), event.end))
                if part.nbytes:
                    messages.append(Message(event.name, senders[part.meeting], rank, part.nbytes, begin, event.end))
            own.append(event)
        ranks.append(tuple(own))
    memory = tuple(memory for _, _, memory in records if memory is not None)
    return Timeline(tuple(ranks), tuple(messages), memory, source="measured")
