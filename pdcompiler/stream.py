"""Training without flushes: minibatch after minibatch goes in, and what has finished comes out, until the pipeline is drained.

    step(batch 0) -> None                     step(batch 3) -> loss of batch 1          (three stages: depth 2)
    step(batch 1) -> None                     ...
    step(batch 2) -> loss of batch 0          drain()       -> losses of the last two

Each call runs one tick (pipedream-2bw: one for each microbatch of a batch), from which it takes what it finds; no rank waits for
the others at its end. Programs of ticks are remembered by their text. Not here: which weights are used (`core/tick_text.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from pdcompiler.backends import reference
from pdcompiler.backends.codegen import generate
from pdcompiler.compiler import compile_ranks, compile_tick, receive_window
from pdcompiler.core.batch import Batch
from pdcompiler.core.errors import CompileError
from pdcompiler.core.ir import Microbatch, Program, RankProgram, Staged
from pdcompiler.core.tick_text import TickText, last_tick, tick_text
from pdcompiler.core.ticks import Ticks
from pdcompiler.optimizers import MakeOptimizer, StageOptimizers
from pdcompiler.outputs import LossWeight, StepResult, loss_weights
from pdcompiler.runner import Runner
from pdcompiler.stream_checks import Fed, check_same, check_ties, check_unchanged, check_weights
from pdcompiler.stream_memory import StreamMemory


@dataclass
class CompiledTick:
    """One tick's programs. modules: per rank; in a process of its own, this rank's is bound to its messages."""

    program: Program
    ranks: tuple[RankProgram, ...]
    modules: tuple[fx.GraphModule, ...]
    window: dict[str, int]
    staged: Staged


class Stream:
    """See the module's docstring. scale: whether learning rates are scaled by replicas."""

    def __init__(self, runner: Runner, ticks: Ticks, make: MakeOptimizer, scale: bool) -> None:
        self.runner, self.ticks, self.make, self.scale = runner, ticks, make, scale
        self.replicas = runner.schedule.replicas
        self.compiled: dict[Any, CompiledTick] = {}
        self.latest: CompiledTick | None = None
        self.network = reference.Network()
        self.observe: reference.Observe | None = None
        self.fed: dict[int, Fed] = {}
        self.number = 0
        self.batches = 0
        self.losses: list[Tensor] = []
        self.dims: dict[str, int | None] = {}
        self.memory: StreamMemory | None = None
        self.optimizer: StageOptimizers | None = None

    def prepare(self, batch: Batch) -> None:
        """Compile a tick of the steady state, for batches like this one, without running anything."""
        plan = self._plans(batch)[0]
        number = self.ticks.depths[0] + self.ticks.repeat
        text = tick_text(self.ticks, number)
        self._compile(text, dict.fromkeys(text.minibatches, plan), plan.staged, batch)

    def step(self, batch: Batch, loss_weight: LossWeight, outputs: str, seeds: Sequence[int]) -> StepResult | None:
        """Feed a batch; the one that has finished meanwhile, if any."""
        if outputs != "none":
            raise CompileError(
                f'outputs is "{outputs}", but {self.ticks.name} gives none: they would wait for the pipeline',
                ways_out=('outputs="none"', "eval_step after a drain", "a schedule that flushes"),
            )
        check_unchanged([fed for t, fed in self.fed.items() if t >= self.number - self.ticks.depths[0]])
        weights = loss_weights(batch, batch.spans(self.ticks.batch or 1), loss_weight)
        check_weights(weights, self.ticks.name)
        plans = self._plans(batch)
        result: StepResult | None = None
        for place, (plan, weight, seed) in enumerate(zip(plans, weights, seeds, strict=True)):
            start = sum(other.rows for other in plans[:place])
            tensors = {
                name: value if (dim := batch.dims[name]) is None else value.narrow(dim, start, plan.rows)
                for name, value in batch.tensors.items()
            }
            versions = tuple(tensor._version for tensor in tensors.values())
            fed = Fed(plan, tensors, weight, seed, self.batches, place == len(plans) - 1, versions)
            result = next(iter(self._tick(fed, batch, None)), result)
        self.batches += 1
        return result

    def drain(self) -> list[StepResult]:
        """Finish all that is in flight, and update with what there is of the last rounds."""
        if not self.number:
            return []
        total, results = self.number, list[StepResult]()
        while self.number <= last_tick(self.ticks, total):
            results += self._tick(None, None, total)
        if self.runner.backend is not None:
            self.runner.backend.finish_sends()
        with torch.no_grad():
            self._memory().end_stream()
        self.fed.clear()
        self.number = 0
        return results

    def check_drained(self, what: str) -> None:
        """Raise CompileError where minibatches are in flight: stages then stand at different versions."""
        if self.number:
            raise CompileError(
                f"{what}, while the pipeline is fed ({self.number} minibatches since the last drain): its stages stand at "
                "different versions", ways_out=("pipe.drain() first",),
            )  # fmt: skip

    def _plans(self, batch: Batch) -> list[Microbatch]:
        count = self.ticks.batch or 1
        if batch.rows < count:
            raise CompileError(
                f"the batch has {batch.rows} rows, pipedream-2bw cuts each into {count} microbatches",
                ways_out=(f"batches of {count} rows or more", "fewer microbatches"),
            )
        spans = batch.spans(count)
        staged = self.runner.traces.staged(batch, [stop - start for start, stop in spans], True)
        for own in staged.values() if self.memory is not None else ():
            check_same(own, self._memory())
        return [Microbatch(0, stop - start, staged[stop - start]) for start, stop in spans]

    def _tick(self, new: Fed | None, batch: Batch | None, total: int | None) -> list[StepResult]:
        """Run the next one; the batches that have finished."""
        text = tick_text(self.ticks, self.number, total)
        known = {**self.fed, **({} if new is None else {self.number: new})}
        plans = {minibatch: known[self.number + minibatch].plan for minibatch in text.minibatches}
        compiled = self._compile(text, plans, known[max(known)].plan.staged, batch)
        self.fed = known
        self._memory().tick = self.number
        results = self._run(compiled, new)
        self.number += 1
        losses = next(iter(results.values()))["losses"]
        told = [self._finished(self.number - 1 + loss.minibatch, value) for loss, value in zip(text.losses, losses, strict=True)]
        return [result for result in told if result is not None]

    def _finished(self, minibatch: int, loss: Tensor) -> StepResult | None:
        """The batch whose last minibatch this is."""
        fed = self.fed[minibatch]
        for older in [t for t in self.fed if t <= minibatch - max(self.ticks.round(s) for s in range(self.ticks.stages))]:
            del self.fed[older]
        self.losses.append(loss.detach() * fed.weight)
        if not fed.is_last:
            return None
        total = self.losses[0].clone()
        for other in self.losses[1:]:
            total += other
        self.losses = []
        return StepResult(total, None, fed.index)

    def _compile(self, text: TickText, plans: dict[int, Microbatch], staged: Staged, batch: Batch | None) -> CompiledTick:
        dims = self.dims = self.dims if batch is None else dict(batch.dims)
        key = (text, tuple((minibatch, id(plan.staged), plan.rows) for minibatch, plan in plans.items()), tuple(dims.items()))
        if key not in self.compiled:
            program = compile_tick(self.runner.request, text, plans, staged, dims, self.replicas)
            self.compiled[key] = self._programs(program, staged)
        compiled = self.compiled[key]
        self.latest = compiled if text.feeds else self.latest
        return compiled

    def _programs(self, program: Program, staged: Staged) -> CompiledTick:
        runner, in_flight = self.runner, self.ticks.until_known
        if self.memory is None:
            self._hold(program, staged)
        ranks = compile_ranks(runner.request, program, in_flight)
        window = receive_window(program, in_flight)
        if runner.rank is not None:
            runner.join(ranks)
        if runner.backend is not None:
            runner.backend.put_by = self._memory().stashed
        own = runner.backend.meaning(reference.PURE, self.memory) if runner.backend else None
        modules = tuple(generate(p, own if p.rank == runner.rank else None) for p in ranks)
        return CompiledTick(program, ranks, modules, window, staged)

    def _hold(self, program: Program, staged: Staged) -> None:
        """Take this process's parameters, at the first program, and make their optimizers."""
        runner = self.runner
        runner.hold(staged)
        partition, held = runner.traces.fixed_partition(), runner.held_stages()
        check_ties(partition)
        parameters = {stage: [runner.holdings.parameters[n] for n in partition.stages[stage].parameters] for stage in held}
        first = len(self.replicas[0])
        scales = {stage: len(ranks) / first for stage, ranks in self.replicas.items()} if self.scale else None
        self.optimizer = StageOptimizers(self.make, parameters, scales, by_program=True)
        self.memory = StreamMemory(
            runner.holdings, partition, self.optimizer, self.replicas, program.buffer_names,
            {stage.index: stage.written for stage in staged.stages}, program.gradient_names, runner.rank,
        )  # fmt: skip

    def _run(self, compiled: CompiledTick, fed: Fed | None) -> dict[int, Any]:
        runner, inputs = self.runner, {}
        if fed is not None:
            loss_weights = runner.loss_weights(fed.plan.staged, [fed.weight])
            inputs = runner.placeholders(compiled.program, fed.tensors, loss_weights, [fed.seed])
        if runner.backend is None:
            with torch.autocast(runner.device.type, enabled=False):
                found = reference.run_ranks(compiled.ranks, inputs, self._memory(), self.network, self.observe)
            return dict(enumerate(found))
        rank = runner.backend.rank
        return {rank: runner.backend.run(compiled.ranks[rank], compiled.modules[rank], inputs, compiled.window, finish=False)}

    def _memory(self) -> StreamMemory:
        assert self.memory is not None
        return self.memory
