"""What a pipeline shows before it runs, and of how it ran: stages, schedule, programs, timelines.

Not here: training and evaluation (`pipeline.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from torch import fx

from pdcompiler.compiler import Request
from pdcompiler.core.errors import CompileError
from pdcompiler.core.ir import Program, Stage
from pdcompiler.core.partition import Partition
from pdcompiler.core.schedule import Schedule
from pdcompiler.core.ticks import Ticks
from pdcompiler.holdings import Holdings
from pdcompiler.recording import Recording
from pdcompiler.runner import Compiled, Runner
from pdcompiler.simulation import simulated
from pdcompiler.stream import CompiledTick, Stream
from pdcompiler.timeline import Timeline


class Inspectable:
    """The part of a Pipeline that is for looking at."""

    request: Request
    runner: Runner
    stream: Stream | None
    holdings: Holdings
    rank: int | None

    @property
    def partition(self) -> Partition:
        """The stages: which parameters and module calls each holds."""
        return self.runner.traces.fixed_partition()

    @property
    def schedule(self) -> Schedule | Ticks:
        """The order of forwards and backwards on each rank; without flushes by ticks, with updates and how old weights are."""
        return self.request.ticks or self.runner.schedule

    @property
    def program(self) -> Program:
        """The newest step's program over all ranks."""
        return self._newest().program

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The newest step's stages: each with its forward and backward graphs."""
        return self._newest().staged.stages

    @property
    def ranks(self) -> tuple[fx.GraphModule, ...]:
        """The newest step's program of each rank: .code, .print_readable(), .graph."""
        return self._newest().modules

    def simulate(self, seconds: Mapping[str, float] | None = None) -> Timeline:
        """The newest training or evaluation step on the machine of `compile`, without running it: when each rank does what, and
        what it holds. seconds: of a call of each stage function (stage0_forward, ...), and "other" of any other word, where they
        are known better than by the machine's figures: `Timeline.function_seconds` of a recorded step. Raises CompileError
        without flushes."""
        if self.stream is not None:
            ways_out = ("a schedule that flushes", "pipe.schedule, for its order and the age of its weights")
            raise CompileError(f"{self.stream.ticks.name} does not flush: its ticks are not simulated", ways_out=ways_out)
        latest = self.runner.latest
        if latest is None:
            raise CompileError("no step is compiled yet", ways_out=("compile(..., example_args=...)", "take a step first"))
        return simulated(latest, self.request.machine, self.holdings, seconds)

    @contextlib.contextmanager
    def record(self, memory: bool = False) -> Iterator[Recording]:
        """Record the steps within as they run: afterwards `.timeline` is that of the newest, of all ranks, on each of them. Every
        rank enters and leaves it. memory: count what is held, too (slower). Raises CompileError in one process, where ranks take
        turns, and without flushes."""
        if self.rank is None or self.stream is not None:
            raise CompileError("only steps with a flush, each rank in its process, are recorded", ways_out=("torchrun",))
        self.runner.recording = recording = Recording(memory)
        try:
            yield recording
        finally:
            self.runner.recording = None
        recording.gather(self.runner.backend)

    def _newest(self) -> Compiled | CompiledTick:
        latest = self.stream.latest if self.stream is not None else self.runner.latest
        if latest is None:
            _ = self.partition
            raise CompileError("no step is compiled yet", ways_out=("take a step first",))
        return latest
