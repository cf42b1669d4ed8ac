"""The programs of a pipeline's steps: compiled on demand, remembered, and run by this process's backend.

Not here: what users call (`pipeline.py`), and how programs are made (`compiler.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from pdcompiler.backends import reference
from pdcompiler.backends.codegen import generate
from pdcompiler.backends.distributed import Distributed
from pdcompiler.compiler import Request, compile_program, compile_ranks, receive_window
from pdcompiler.core.batch import Batch
from pdcompiler.core.errors import CompileError
from pdcompiler.core.ir import Microbatch, Program, RankProgram, Staged, Step
from pdcompiler.core.schedule import Schedule
from pdcompiler.holdings import Holdings
from pdcompiler.recording import Recording
from pdcompiler.traces import Traces


@dataclass
class Compiled:
    """One step's programs. modules: per rank; in a process of its own, this rank's is bound to its messages.   inputs: bytes of
    each, by placeholder."""

    step: Step
    program: Program
    ranks: tuple[RankProgram, ...]
    modules: tuple[fx.GraphModule, ...]
    window: dict[str, int]
    inputs: dict[str, int]

    @property
    def staged(self) -> Staged:
        """The stages, of its first microbatch."""
        return self.step.microbatches[0].staged


class Runner:
    """Programs by what a step computes; see the module's docstring. rank: None where all ranks run in this process."""

    def __init__(
        self, request: Request, schedule: Schedule, timeout: float, rank: int | None, holdings: Holdings, traces: Traces
    ) -> None:
        self.request, self.schedule, self.timeout, self.rank = request, schedule, timeout, rank
        self.holdings, self.traces = holdings, traces
        self.compiled: dict[Any, Compiled] = {}
        self.latest: Compiled | None = None
        self.backend: Distributed | None = None
        self.recording: Recording | None = None

    def compile(self, batch: Batch, weights: Sequence[float], outputs: str, *, gradients: bool) -> Compiled:
        """The programs for a batch: those of an equal step before, or new ones."""
        if outputs not in ("none", "last", "all"):
            raise CompileError(f'outputs is {outputs!r}, not "none", "last" or "all"')
        spans = batch.spans(self.schedule.microbatches)
        staged = self.traces.staged(batch, [stop - start for start, stop in spans], gradients)
        microbatches = tuple(
            Microbatch(start, stop, staged[stop - start], counts=weight != 0)
            for (start, stop), weight in zip(spans, weights, strict=True)
        )
        parts = tuple((m.start, m.stop, id(m.staged), m.counts) for m in microbatches)
        key = (parts, tuple(batch.dims.items()), outputs, gradients)
        if key not in self.compiled:
            self.compiled[key] = self._programs(Step(microbatches, batch.dims, outputs), gradients, batch)
        self.latest = self.compiled[key]
        return self.latest

    def _programs(self, step: Step, gradients: bool, batch: Batch) -> Compiled:
        self.hold(step.microbatches[0].staged)
        restricted = restrict(self.schedule, step, gradients)
        program = compile_program(self.request, step, restricted, self.holders(), self.schedule.replicas)
        programs = compile_ranks(self.request, program)
        window = receive_window(program)
        if self.rank is not None:
            self.join(programs)
        memory = self.memory(program)
        own = self.backend.meaning(reference.PURE, memory) if self.backend else None
        modules = tuple(generate(p, own if p.rank == self.rank else None) for p in programs)
        names = [str(node.target) for node in program.graph.nodes if node.op == "placeholder"]
        sizes = [tensor.numel() * tensor.element_size() for tensor in batch.tensors.values()]
        inputs = dict(zip(names, sizes, strict=False))  # behind them weights and seeds, a number each
        return Compiled(step, program, programs, modules, window, inputs)

    def holders(self) -> dict[str, tuple[int, ...]]:
        """The ranks that hold each parameter whose gradient has several parts: the replicas of its stage, of all its stages where
        it is tied (which may stand on one rank)."""
        replicas, owners = self.schedule.replicas, self.traces.fixed_partition().owners()
        ranks = {name: tuple(sorted({rank for stage in stages for rank in replicas[stage]})) for name, stages in owners.items()}
        return {name: holding for name, holding in ranks.items() if len(holding) > 1 or len(owners[name]) > 1}

    def held_stages(self) -> list[int]:
        """The stages that a rank of this process runs."""
        return [stage for stage, ranks in self.schedule.replicas.items() if self.rank is None or self.rank in ranks]

    def hold(self, staged: Staged) -> None:
        """Take the parameters and buffers of this process's stages."""
        held = self.held_stages()
        self.holdings.hold(self.traces.fixed_partition(), held)
        self.holdings.elsewhere.update(name for stage in staged.stages if stage.index not in held for name in stage.written)

    def join(self, programs: Sequence[RankProgram]) -> None:
        """Make this process's end of the messages, at the first program that is compiled."""
        nodes = [node for program in programs for node in program.graph.nodes]
        channels = sorted({str(node.kwargs["channel"]) for node in nodes if "channel" in node.kwargs})
        reductions = sorted({node.kwargs["ranks"] for node in nodes if "ranks" in node.kwargs})
        if self.backend is None:
            self.backend = Distributed(self.device, channels, reductions, self.timeout)
        else:
            self.backend.join(channels, reductions)

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self.request.device or next(iter(self.request.model.parameters())).device

    def memory(self, program: Program) -> reference.Memory:
        """What the words `weights` and `buffers` of a program stand for."""
        return reference.Memory(
            lambda stage, rank: self.holdings.tensors(self.traces.fixed_partition().stages[stage].parameters),
            lambda stage, rank: self.holdings.tensors(program.buffer_names[stage]),
        )

    def inputs(self, compiled: Compiled, batch: Batch, weights: Sequence[float], seeds: Sequence[int]) -> dict[str, Any]:
        """The program's placeholders: the batch's tensors, the weights of the losses, the seeds of the microbatches."""
        return self.placeholders(compiled.program, batch.tensors, self.loss_weights(compiled.staged, weights), seeds)

    @staticmethod
    def placeholders(
        program: Program, tensors: Mapping[str, torch.Tensor], loss_weights: torch.Tensor, seeds: Sequence[int]
    ) -> dict[str, Any]:
        """Values by their names; a program that draws nothing has no seeds."""
        names = [str(node.target) for node in program.graph.nodes if node.op == "placeholder"]
        given = [*(tensor.detach() for tensor in tensors.values()), loss_weights, tuple(seeds)]
        return dict(zip(names, given[: len(names)], strict=True))

    def loss_weights(self, staged: Staged, weights: Sequence[float]) -> torch.Tensor:
        """As a tensor, of the losses' own type."""
        types = [stage.types[staged.loss] for stage in staged.stages if staged.loss in stage.types]
        return torch.tensor(weights, dtype=types[0].dtype if types else None, device=self.device)

    def run(self, compiled: Compiled, batch: Batch, weights: Sequence[float], seeds: Sequence[int]) -> dict[int, Any]:
        """Run a step; the results of the ranks that run in this process."""
        inputs = self.inputs(compiled, batch, weights, seeds)
        if self.backend is None:
            with torch.autocast(self.device.type, enabled=False):
                return dict(enumerate(reference.run_ranks(compiled.ranks, inputs, self.memory(compiled.program))))
        rank, backend = self.backend.rank, self.backend
        if self.recording is not None:
            meaning = backend.meaning(reference.PURE, self.memory(compiled.program))
            return {rank: self.recording.run(backend, compiled.ranks[rank], meaning, inputs, compiled.window)}
        return {rank: backend.run(compiled.ranks[rank], compiled.modules[rank], inputs, compiled.window)}


def restrict(schedule: Schedule, step: Step, gradients: bool) -> Schedule:
    """The schedule for the microbatches that there are; forward only for those that do not count, or without gradients."""
    count = len(step.microbatches)
    backward = [gradients and microbatch.counts for microbatch in step.microbatches]
    return schedule.without(a for a in schedule if a.microbatch >= count or (a.phase != "F" and not backward[a.microbatch]))


