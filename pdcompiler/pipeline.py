"""Pipeline: what `compile` returns. Trains and evaluates; everything that it runs can be looked at first.

Under torchrun it holds and runs this rank's part, with messages; without it, all ranks run in this process through the reference
backend, so the same script runs on a laptop. Not here: how programs are made (`compiler.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from pdcompiler.backends import reference
from pdcompiler.backends.codegen import generate
from pdcompiler.backends.distributed import Distributed
from pdcompiler.compiler import Request, compile_program, compile_ranks, receive_window
from pdcompiler.core.batch import Batch, BatchDims, read_batch
from pdcompiler.core.errors import CompileError
from pdcompiler.core.ir import Microbatch, Program, RankProgram, Stage, Step
from pdcompiler.core.partition import Partition
from pdcompiler.core.schedule import Schedule
from pdcompiler.holdings import Holdings, Initialize
from pdcompiler.outputs import LossWeight, StepResult, join_outputs, loss_weights
from pdcompiler.traces import Traces


@dataclass(frozen=True)
class Options:
    """What of `compile`'s arguments the steps need."""

    schedule: Schedule
    microbatches: int
    loss_weight: LossWeight
    batch_dims: BatchDims | None
    timeout: float
    init: Initialize | None


@dataclass
class Compiled:
    """One step's programs. modules: per rank; in a process of its own, this rank's is bound to its messages."""

    step: Step
    program: Program
    ranks: tuple[RankProgram, ...]
    modules: tuple[fx.GraphModule, ...]
    window: dict[str, int]


class Pipeline:
    """A model compiled for several ranks; see the module's docstring, and `pdcompiler.compile` for what it promises."""

    def __init__(self, request: Request, options: Options, rank: int | None) -> None:
        self.request, self.options, self.rank = request, options, rank
        self.traces = Traces(request)
        self.compiled: dict[Any, Compiled] = {}
        self.latest: Compiled | None = None
        self.holdings = Holdings(request.model, request.loss_fn, request.device, options.init)
        self.backend: Distributed | None = None

    # what was compiled

    @property
    def partition(self) -> Partition:
        """The stages: which parameters and module calls each holds."""
        if self.traces.partition is None:
            raise CompileError(
                "nothing is compiled yet", ways_out=("give example_args or example_kwargs to compile", "take a step first")
            )
        return self.traces.partition

    @property
    def schedule(self) -> Schedule:
        """The order of forwards and backwards on each rank."""
        return self.options.schedule

    @property
    def program(self) -> Program:
        """The newest step's program over all ranks."""
        return self._newest().program

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The newest step's stages: each with its forward and backward graphs."""
        return self._newest().step.microbatches[0].staged.stages

    @property
    def ranks(self) -> tuple[fx.GraphModule, ...]:
        """The newest step's program of each rank: .code, .print_readable(), .graph."""
        return self._newest().modules

    def _newest(self) -> Compiled:
        if self.latest is None:
            _ = self.partition
            raise CompileError("no step is compiled yet", ways_out=("take a step first",))
        return self.latest

    # training and evaluation

    def step(self, *args: Any, target: Any = None, outputs: str = "none", **kwargs: Any) -> StepResult:
        """One training step on a batch: adds to `.grad` of this rank's parameters what plain PyTorch would add.

        The gradient is that of sum_i w_i * loss_i over the microbatches, w_i by `loss_weight`.   outputs: "none", "last" (on
        the ranks of the last stage) or "all".   Every rank calls it with the same arguments.
        """
        batch = self._read(args, kwargs, target)
        weights = loss_weights(batch, batch.spans(self.options.microbatches), self.options.loss_weight)
        compiled = self._compile(batch, weights, outputs, gradients=True)
        results = self._run(compiled, batch, weights)
        for rank, result in results.items():
            self._add_gradients(rank, compiled, result)
        return self._result(compiled, results, batch, weights, gradients=True)

    def eval_step(self, *args: Any, target: Any = None, outputs: str = "all", **kwargs: Any) -> StepResult:
        """The model in evaluation mode, without gradients, on a batch of any size; the modules' modes stay as they are."""
        batch = self._read(args, kwargs, target)
        weights = loss_weights(batch, batch.spans(self.options.microbatches), self.options.loss_weight)
        compiled = self._compile(batch, weights, outputs, gradients=False)
        return self._result(compiled, self._run(compiled, batch, weights), batch, weights, gradients=False)

    def prepare(self, *args: Any, target: Any = None, **kwargs: Any) -> None:
        """Compile for a batch without running anything: the training step, and where there is no target for its loss, none."""
        batch = self._read(args, kwargs, target)
        trains = target is not None or self.request.loss_fn is None
        weights = [1.0] * len(batch.spans(self.options.microbatches))
        self._compile(batch, weights, "none" if trains else "all", gradients=trains)

    def _read(self, args: Sequence[Any], kwargs: Mapping[str, Any], target: Any) -> Batch:
        if target is not None and self.request.loss_fn is None:
            raise CompileError("a target was given, but the pipeline has no loss_fn", ways_out=("compile(..., loss_fn=...)",))
        return read_batch(self.request.model, args, kwargs, target, self.options.batch_dims)

    def _compile(self, batch: Batch, weights: Sequence[float], outputs: str, *, gradients: bool) -> Compiled:
        if outputs not in ("none", "last", "all"):
            raise CompileError(f'outputs is {outputs!r}, not "none", "last" or "all"')
        spans = batch.spans(self.options.microbatches)
        microbatches = tuple(
            Microbatch(start, stop, self.traces.staged(batch, stop - start, gradients), counts=weight != 0)
            for (start, stop), weight in zip(spans, weights, strict=True)
        )
        parts = tuple((m.start, m.stop, id(m.staged), m.counts) for m in microbatches)
        key = (parts, tuple(batch.dims.items()), outputs, gradients)
        if key not in self.compiled:
            self.compiled[key] = self._programs(Step(microbatches, batch.dims, outputs), gradients)
        self.latest = self.compiled[key]
        return self.latest

    def _programs(self, step: Step, gradients: bool) -> Compiled:
        ranks = range(self.request.world_size)
        mine = ranks if self.rank is None else [self.rank]
        rank_of = self.schedule.rank_of_stage()
        self.holdings.hold(self.partition, [stage for stage, rank in rank_of.items() if rank in mine])
        stages = step.microbatches[0].staged.stages
        self.holdings.elsewhere.update(name for stage in stages if rank_of[stage.index] not in mine for name in stage.written)
        program = compile_program(self.request, step, restrict(self.schedule, step, gradients), self._holders())
        programs = compile_ranks(self.request, program)
        window = receive_window(program)
        if self.rank is not None:
            self._join(programs)
        memory = self._memory(program)
        own = self.backend.meaning(reference.PURE, memory) if self.backend else None
        modules = tuple(generate(p, own if p.rank == self.rank else None) for p in programs)
        return Compiled(step, program, programs, modules, window)

    def _holders(self) -> dict[str, tuple[int, ...]]:
        rank_of = self.schedule.rank_of_stage()
        owners = self.partition.owners()
        return {name: tuple(sorted({rank_of[s] for s in stages})) for name, stages in owners.items() if len(stages) > 1}

    def _join(self, programs: Sequence[RankProgram]) -> None:
        """Make this process's end of the messages, at the first program that is compiled."""
        nodes = [node for program in programs for node in program.graph.nodes]
        channels = sorted({str(node.kwargs["channel"]) for node in nodes if "channel" in node.kwargs})
        reductions = sorted({node.kwargs["ranks"] for node in nodes if "ranks" in node.kwargs})
        if self.backend is None:
            self.backend = Distributed(self.device, channels, reductions, self.options.timeout)
        else:
            self.backend.join(channels, reductions)

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self.request.device or next(iter(self.request.model.parameters())).device

    def _memory(self, program: Program) -> reference.Memory:
        """What the words `weights` and `buffers` of a program stand for."""
        return reference.Memory(
            lambda stage, rank: self.holdings.tensors(self.partition.stages[stage].parameters),
            lambda stage, rank: self.holdings.tensors(program.buffer_names[stage]),
        )

    def _run(self, compiled: Compiled, batch: Batch, weights: Sequence[float]) -> dict[int, Any]:
        staged = compiled.step.microbatches[0].staged
        types = [stage.types[staged.loss] for stage in staged.stages if staged.loss in stage.types]
        loss_weights = torch.tensor(weights, dtype=types[0].dtype if types else None, device=self.device)
        names = [str(node.target) for node in compiled.program.graph.nodes if node.op == "placeholder"]
        inputs = dict(zip(names, [*(tensor.detach() for tensor in batch.tensors.values()), loss_weights], strict=True))
        if self.backend is None:
            return dict(enumerate(reference.run_ranks(compiled.ranks, inputs, self._memory(compiled.program))))
        rank = self.backend.rank
        return {rank: self.backend.run(compiled.ranks[rank], compiled.modules[rank], inputs, compiled.window)}

    def _add_gradients(self, rank: int, compiled: Compiled, result: Mapping[str, Any]) -> None:
        """Through autograd itself, so that hooks on parameters fire, once a step, and `.grad` is added to."""
        reduced: dict[str, Tensor] = dict(result.get("reduced", {}))
        if self.rank is None:
            reduced = {name: value for name, value in reduced.items() if self._holders()[name][0] == rank}
        found = dict(reduced)
        for stage, gradients in result.get("gradients", {}).items():
            names = compiled.program.gradient_names[stage]
            found |= {n: g for n, g in zip(names, gradients, strict=True) if n not in result.get("reduced", {})}
        if found:
            torch.autograd.backward([self.holdings.parameters[name] for name in found], list(found.values()))

    def _result(
        self, compiled: Compiled, results: Mapping[int, Any], batch: Batch, weights: Sequence[float], *, gradients: bool
    ) -> StepResult:
        result = results[max(results)]
        staged = compiled.step.microbatches[0].staged
        outputs = None
        if "outputs" in result:
            one = len(compiled.step.microbatches) == 1
            dims = (None,) * len(staged.outputs) if one else self.traces.output_dims(batch, gradients)
            outputs = staged.result.rebuild(join_outputs(result["outputs"], dims, weights))
        loss = result.get("loss")
        return StepResult(None if loss is None else loss.detach().clone(), outputs)

    # what is held

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's parameters."""
        return (parameter for _, parameter in self.named_parameters())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters with the model's own names; a tied one once."""
        _ = self.partition
        return iter(self.holdings.parameters.items())

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """This process's buffers with the model's own names, without those that a stage elsewhere writes."""
        _ = self.partition
        return iter(self.holdings.newest_buffers().items())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As of a module."""
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad = None if set_to_none else parameter.grad.detach().zero_()

    def train(self, mode: bool = True) -> Pipeline:
        """Set the modules' mode, as of a module."""
        self.request.model.train(mode)
        return self

    def eval(self) -> Pipeline:
        """Set the modules to evaluation mode: `step` then trains with dropout off and statistics frozen."""
        return self.train(False)

    def state_dict(self) -> dict[str, Tensor]:
        """What this rank holds, under the model's own names; in one process the whole model's."""
        _ = self.partition
        return self.holdings.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor], strict: bool = True) -> None:
        """Load the model's own state_dict (or this rank's part of it)."""
        _ = self.partition
        self.holdings.load_state_dict(state, strict)

    def close(self) -> None:
        """Leave the process group, if this pipeline made it."""
        if self.backend is not None and self.backend.own_group:
            self.backend.close()


def restrict(schedule: Schedule, step: Step, gradients: bool) -> Schedule:
    """The schedule for the microbatches that there are; forward only for those that do not count, or without gradients."""
    count = len(step.microbatches)
    backward = [gradients and microbatch.counts for microbatch in step.microbatches]
    return schedule.without(a for a in schedule if a.microbatch >= count or (a.phase == "B" and not backward[a.microbatch]))


