"""Write one step of all ranks as one program: the stages' functions, called in the schedule's order.

    stages 0, 1; schedule F0 F1 B0 B1 / F0 B0 F1 B1          x_0 = microbatch(x, start=0, stop=2)                 # rank 0
                                                             weights_0 = weights(stage=0)                         # rank 0
                                                             stage0_forward_0 = stage0_forward(weights_0, x_0)    # rank 0
                                                             h_0, saved_0 = stage0_forward_0                      # rank 0
                                                             stage1_forward_0 = stage1_forward(weights_1, h_0)    # rank 1
                                                             ...
                                                             return {0: {loss, gradients}, 1: {loss, gradients}}

Values cross ranks freely here (`insert_transfers` comes later). Gradients and losses are accumulated in the order of the
microbatches, whatever the order of the backwards; on a replicated stage by each of its ranks for its own microbatches. Buffers
are dataflow: each forward takes the values that the forward of the rank's microbatch before it gave; at the end all replicas get
those of the first. Not here: messages, reductions over the holders of a weight.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from pdcompiler.core import ops
from pdcompiler.core.errors import CompileError
from pdcompiler.core.ir import Function, Program, Stage, Step
from pdcompiler.core.program_writer import Note, ProgramWriter, note_of
from pdcompiler.core.schedule import Action, Schedule

OWN = ("saved", "kept", "gradients")
"""Values that every stage has, under the same name."""


def lower_schedule(step: Step, schedule: Schedule, replicas: Mapping[int, tuple[int, ...]] | None = None) -> Program:
    """The program of one step. `step` says what is computed for each microbatch, `schedule` in which order.   replicas: the ranks
    of each stage, where some of them have nothing to run in this step."""
    _check_variants(step)
    _check_buffers(step, schedule)
    lowering = _Lowering(step, schedule, replicas or schedule.replicas)
    for rank, action in schedule.order():
        lowering.action(rank, action)
    return lowering.finish()


def _check_variants(step: Step) -> None:
    """Microbatches of other row counts are other traces; gradients and buffers must be the same tuples in all of them."""
    first = step.microbatches[0].staged.stages
    for plan in step.microbatches[1:]:
        for one, other in zip(first, plan.staged.stages, strict=True):
            if one.gradients != other.gradients or one.buffers != other.buffers:
                raise CompileError(
                    f"stage {one.index} has other gradients or buffers for {plan.rows} rows than for {step.microbatches[0].rows}",
                    ways_out=("a batch whose microbatches have equal rows",),
                )


def _check_buffers(step: Step, schedule: Schedule) -> None:
    """What forwards write into buffers (BatchNorm's statistics) depends on their order, which is that of the microbatches."""
    writing = {stage.index: stage.written[0] for stage in step.microbatches[0].staged.stages if stage.written}
    for rank, actions in enumerate(schedule.ranks):
        latest: dict[int, int] = {}
        for action in [a for a in actions if a.phase == "F" and a.stage in writing]:
            if (before := latest.get(action.stage, -1)) > action.microbatch:
                raise CompileError(
                    f"rank {rank} runs the forward of microbatch {before} before that of {action.microbatch} on stage "
                    f"{action.stage}, whose forwards update {writing[action.stage]}: that would not be what a loop gives",
                    ways_out=("a schedule with these forwards in the order of the microbatches", "pipe.eval(): no updates"),
                )
            latest[action.stage] = action.microbatch


class _Lowering:
    """The program while it grows: one `action` at a time, in global order."""

    def __init__(self, step: Step, schedule: Schedule, replicas: Mapping[int, tuple[int, ...]]) -> None:
        self.step, self.schedule, self.replicas = step, schedule, replicas
        self.writer = ProgramWriter(step.dims)
        self.values: dict[tuple[str, int], fx.Node] = {}
        self.buffers: dict[tuple[int, int], fx.Node] = {}
        own: dict[tuple[int, int], list[int]] = defaultdict(list)  # microbatches of a stage and rank
        for rank, actions in enumerate(schedule.ranks):
            for action in actions:
                if action.phase == "F" and step.microbatches[action.microbatch].counts:
                    own[action.stage, rank].append(action.microbatch)
        self.gradients = {where: _Total(self.writer, f"stage{where[0]}_gradients", sorted(own[where])) for where in sorted(own)}
        self.losses = {where: _Total(self.writer, "loss", sorted(own[where])) for where in sorted(own)}

    def action(self, rank: int, action: Action) -> None:
        """Call one function of one stage for one microbatch, and name what it gives."""
        stage, m = action.stage, action.microbatch
        part = self.step.microbatches[m].staged.stages[stage]
        function, which = self._function(part, action)
        if function is None:
            if action.phase == "B":
                self._accumulate(part, action.phase, rank, m)
            return
        note = note_of(rank, stage, m, action.phase)
        call = self.writer.stage_call(function, [self._take(name, part, note) for name in function.takes], note, which)
        for place, name in enumerate(function.gives):
            node = self.writer.result(call, place, name, part, self.step.microbatches[m].rows, note)
            if name == "buffers":
                self.buffers[stage, rank] = node
            else:
                self.values[f"{name}@{stage}" if name in OWN else name, m] = node
        if action.phase == "F" or which != "_input":
            self._accumulate(part, action.phase, rank, m)

    def _function(self, part: Stage, action: Action) -> tuple[Function | None, str]:
        """What an action calls, with the end of its name: a backward in two parts where the schedule has it and it falls apart;
        if not, B runs all of it and W nothing."""
        if action.phase == "F":
            return part.forward, ""
        if part.parts is None or (action.stage, action.microbatch) not in self.schedule.split:
            return (part.backward if action.phase == "B" else None), ""
        return (part.parts.input, "_input") if action.phase == "B" else (part.parts.weight, "_weight")

    def _take(self, name: str, part: Stage, note: Note) -> Any:
        stage, m = note["stage"], note["microbatch"]
        plan = self.step.microbatches[m]
        if name == "weights":
            return self.writer.once(ops.weights, f"stage{stage}_weights", note)
        if name == "buffers":
            return self._buffers_of(stage, m, note)
        given = self.writer.of_batch(name, part, plan, self.step.dims, note)
        return self.values[f"{name}@{stage}" if name in OWN else name, m] if given is None else given

    def _buffers_of(self, stage: int, m: int, note: Note) -> fx.Node:
        """The newest values for a forward; for a backward, those that the forward of its microbatch saw."""
        newest = self.buffers.get((stage, note["rank"])) or self.writer.once(ops.buffers, f"stage{stage}_buffers", note)
        if note["phase"] == "F":
            self.values[f"buffers@{stage}", m] = newest
        return self.values.get((f"buffers@{stage}", m), newest)

    def _accumulate(self, part: Stage, phase: str, rank: int, m: int) -> None:
        note = note_of(rank, part.index, m, phase)
        plan = self.step.microbatches[m]
        loss = self.values.get((plan.staged.loss, m)) if plan.staged.loss else None
        if loss is not None and plan.counts and loss.meta["stage"] == part.index and phase == "F":
            factors = (loss, self.writer.loss_weight(note))
            weighted = self.writer.call(operator.mul, factors, {}, f"weighted_loss_{m}", note, loss.meta["type"])
            self.losses[part.index, rank].add(m, weighted, note)
        if phase != "F" and plan.counts:
            self.gradients[part.index, rank].add(m, self.values.get((f"gradients@{part.index}", m)), note)

    def finish(self) -> Program:
        """Buffers last (every backward has read them), then the results of each rank."""
        stages = self.step.microbatches[0].staged.stages
        for stage in stages:
            self._write_buffers(stage)
        loss = self._loss()
        results = {rank: self._results(rank, loss) for rank in range(len(self.schedule.ranks))}
        return self.writer.program(stages, results, self.schedule)

    def _write_buffers(self, stage: Stage) -> None:
        """What the first replica's forwards gave, on every replica: as DistributedDataParallel's are rank 0's."""
        first, *others = self.replicas[stage.index]
        newest = self.buffers.get((stage.index, first))
        if newest is None:
            return
        for rank in (first, *others):
            note = note_of(rank, stage.index, None, "")
            values = newest if rank == first else self.writer.copied_buffers(stage, first, note, newest)
            self.writer.call(ops.write_buffers, (values,), {"stage": stage.index, "rank": rank}, "write_buffers", note)

    def _loss(self) -> fx.Node | None:
        """Of the whole batch: the replicas' sums, added in their order on the first of them."""
        sums = [(rank, total.node) for (_, rank), total in self.losses.items() if total.node is not None]
        if not sums:
            return None
        (rank, loss), *others = sums
        for _, part in others:
            note = note_of(rank, loss.meta["stage"], None, "F")
            loss = self.writer.call(ops.accumulate, (loss, part), {}, "loss", note, loss.meta["type"])
        return loss

    def _results(self, rank: int, loss: fx.Node | None) -> dict[str, Any]:
        results: dict[str, Any] = {}
        if loss is not None:
            results["loss"] = loss
        totals = {s: total.node for (s, own), total in self.gradients.items() if own == rank and total.node is not None}
        if totals:
            results["gradients"] = totals
        last = self.replicas[max(self.replicas)]
        if self.step.outputs == "all" or (self.step.outputs == "last" and rank in last):
            leaves = range(len(self.step.microbatches[0].staged.outputs))
            results["outputs"] = [
                [self.values[plan.staged.outputs[leaf], m] for m, plan in enumerate(self.step.microbatches)] for leaf in leaves
            ]
        return results


@dataclass
class _Total:
    """A sum over microbatches in their order; a value that comes early waits for those before it."""

    writer: ProgramWriter
    name: str
    counted: list[int]
    node: fx.Node | None = None
    waiting: dict[int, tuple[fx.Node | None, Note]] = field(default_factory=dict)
    next: int = 0

    def add(self, m: int, value: fx.Node | None, note: Note) -> None:
        """Take the value of microbatch m (None: it has none)."""
        self.waiting[m] = (value, note)
        while self.next < len(self.counted) and self.counted[self.next] in self.waiting:
            value, note = self.waiting.pop(self.counted[self.next])
            self.next += 1
            if value is None:
                continue
            if self.node is None:
                self.node = value
            else:
                type = self.node.meta["type"]
                self.node = self.writer.call(ops.accumulate, (self.node, value), {}, self.name, note, type)
