"""Write one step of all ranks as one program: the stages' functions, called in the schedule's order.

    stages 0, 1; schedule F0 F1 B0 B1 / F0 B0 F1 B1          x_0 = microbatch(x, start=0, stop=2)                 # rank 0
                                                             weights_0 = weights(stage=0)                         # rank 0
                                                             stage0_forward_0 = stage0_forward(weights_0, x_0)    # rank 0
                                                             h_0, saved_0 = stage0_forward_0                      # rank 0
                                                             stage1_forward_0 = stage1_forward(weights_1, h_0)    # rank 1
                                                             ...
                                                             return {0: {loss, gradients}, 1: {loss, gradients}}

Values cross ranks freely here (`insert_transfers` comes later). Gradients and losses are accumulated in the order of the
microbatches, whatever the order of the backwards. Buffers are dataflow: each forward takes the values that the forward of the
microbatch before it gave. Not here: messages, reductions over holders of a tied weight.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn

from pdcompiler.core import ops
from pdcompiler.core.errors import CompileError
from pdcompiler.core.ir import RESERVED, Function, Program, Stage, Step, ValueType, describe, eliminate_dead_code
from pdcompiler.core.names import identifier
from pdcompiler.core.schedule import Action, Schedule


def lower_schedule(step: Step, schedule: Schedule) -> Program:
    """The program of one step. `step` says what is computed for each microbatch, `schedule` in which order."""
    _check_variants(step)
    lowering = _Lowering(step, schedule)
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


class _Lowering:
    """The program while it grows: one `action` at a time, in global order."""

    def __init__(self, step: Step, schedule: Schedule) -> None:
        self.step = step
        self.schedule = schedule
        self.rank_of = schedule.rank_of_stage()
        self.graph = fx.Graph()
        self.root = nn.Module()
        self.values: dict[tuple[str, int], fx.Node] = {}
        self.inputs = {name: self._placeholder(identifier(name, {*RESERVED, *ops.VOCABULARY})) for name in step.dims}
        self.loss_weights = self._placeholder("loss_weights")
        self.weights: dict[int, fx.Node] = {}
        self.buffers: dict[int, fx.Node] = {}
        self.cut: dict[tuple[int, str, int], fx.Node] = {}
        self.gradients = {stage: _Total(self, f"stage{stage}_gradients") for stage in self.rank_of}
        self.loss = _Total(self, "loss")
        for node in self.graph.nodes:
            describe(node, rank=0)

    def _placeholder(self, name: str) -> fx.Node:
        """An input; what fx made of its name to keep names apart is the name of the argument too."""
        node = self.graph.placeholder(name)
        node.target = node.name
        return node

    def action(self, rank: int, action: Action) -> None:
        """Call one function of one stage for one microbatch, and name what it gives."""
        stage, m = action.stage, action.microbatch
        part = self.step.microbatches[m].staged.stages[stage]
        function = part.forward if action.phase == "F" else part.backward
        if function is None:
            self._accumulate(part, None, rank, m)
            return
        note: dict[str, Any] = {"rank": rank, "stage": stage, "microbatch": m, "phase": action.phase}
        arguments = tuple(self._take(name, part, note) for name in function.takes)
        call = self.graph.create_node("call_module", self._module(function, stage, m, action.phase), arguments)
        describe(call, **note)
        for place, name in enumerate(function.gives):
            self._give(name, call, place, part, note)
        self._accumulate(part, action.phase, rank, m)

    def _take(self, name: str, part: Stage, note: dict[str, Any]) -> Any:
        stage, m, rank = note["stage"], note["microbatch"], note["rank"]
        if name == "weights":
            if stage not in self.weights:
                self.weights[stage] = self._call(ops.weights, (), {"stage": stage, "rank": rank}, f"stage{stage}_weights", note)
            return self.weights[stage]
        if name == "buffers":
            return self._buffers_of(stage, m, note)
        if name == "rows":
            return self.step.microbatches[m].rows
        if name == "loss_weight":
            return self._loss_weight(note)
        if name in part.batch:
            return self._microbatch(part.batch[name], note)
        return self.values[f"saved@{stage}" if name == "saved" else name, m]

    def _buffers_of(self, stage: int, m: int, note: dict[str, Any]) -> fx.Node:
        """The newest values for a forward; for a backward, those that the forward of its microbatch saw."""
        if stage not in self.buffers:
            where = {"stage": stage, "rank": note["rank"]}
            self.buffers[stage] = self._call(ops.buffers, (), where, f"stage{stage}_buffers", note)
        if note["phase"] == "F":
            self.values[f"buffers@{stage}", m] = self.buffers[stage]
        return self.values.get((f"buffers@{stage}", m), self.buffers[stage])

    def _loss_weight(self, note: dict[str, Any]) -> fx.Node:
        key = (note["rank"], "loss_weights", note["microbatch"])
        if key not in self.cut:
            arguments = (self.loss_weights, note["microbatch"])
            self.cut[key] = self._call(operator.getitem, arguments, {}, f"loss_weight_{note['microbatch']}", note)
        return self.cut[key]

    def _microbatch(self, tensor: str, note: dict[str, Any]) -> fx.Node:
        dim, m = self.step.dims[tensor], note["microbatch"]
        if dim is None:
            return self.inputs[tensor]
        key = (note["rank"], tensor, m)
        if key not in self.cut:
            plan = self.step.microbatches[m]
            where = {"start": plan.start, "stop": plan.stop, "dim": dim}
            self.cut[key] = self._call(ops.microbatch, (self.inputs[tensor],), where, f"{identifier(tensor)}_{m}", note)
        return self.cut[key]

    def _module(self, function: Function, stage: int, m: int, phase: str) -> str:
        """The name of a function in the program; a second trace of the same stage (other rows) gets a number."""
        base = f"stage{stage}_{'forward' if phase == 'F' else 'backward'}"
        variants = list(dict.fromkeys(id(plan.staged) for plan in self.step.microbatches))
        number = variants.index(id(self.step.microbatches[m].staged))
        name = base if number == 0 else f"{base}_{number}"
        if not hasattr(self.root, name):
            self.root.add_module(name, function.module)
        return name

    def _give(self, name: str, call: fx.Node, place: int, part: Stage, note: dict[str, Any]) -> None:
        stage, m = note["stage"], note["microbatch"]
        type = part.types.get(name)
        node = self._call(operator.getitem, (call, place), {}, f"{name}_{m}", note)
        node.meta["type"] = type.at(self.step.microbatches[m].rows) if isinstance(type, ValueType) else None
        if name == "buffers":
            self.buffers[stage] = node
        elif name == "gradients":
            self.values[f"gradients@{stage}", m] = node
        else:
            self.values[f"saved@{stage}" if name == "saved" else name, m] = node

    def _accumulate(self, part: Stage, phase: str | None, rank: int, m: int) -> None:
        note = {"rank": rank, "stage": part.index, "microbatch": m, "phase": phase or "B"}
        plan = self.step.microbatches[m]
        loss = self.values.get((plan.staged.loss, m)) if plan.staged.loss else None
        if loss is not None and plan.counts and loss.meta["stage"] == part.index and phase == "F":
            weighted = self._call(operator.mul, (loss, self._loss_weight(note)), {}, f"weighted_loss_{m}", note)
            weighted.meta["type"] = loss.meta["type"]
            self.loss.add(m, weighted, note)
        if phase != "F" and plan.counts:
            self.gradients[part.index].add(m, self.values.get((f"gradients@{part.index}", m)), note)

    def _call(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str, note: Mapping[str, Any]) -> fx.Node:
        node = self.graph.create_node("call_function", target, args, kwargs, name=name)
        node.meta["name"] = name
        return describe(node, **note)

    def finish(self) -> Program:
        """Buffers last (every backward has read them), then the results of each rank."""
        stages = self.step.microbatches[0].staged.stages
        for stage, node in self.buffers.items():
            if node.target is not ops.buffers:
                note = {"rank": self.rank_of[stage], "stage": stage, "microbatch": None, "phase": ""}
                where = {"stage": stage, "rank": self.rank_of[stage]}
                self._call(ops.write_buffers, (node,), where, "write_buffers", note)
        results = {rank: self._results(rank) for rank in range(len(self.schedule.ranks))}
        describe(self.graph.output(results), rank=0)  # type: ignore[arg-type]
        eliminate_dead_code(self.graph)
        return Program(
            self.graph, self.root, len(self.schedule.ranks), self.schedule,
            {stage.index: stage.gradients for stage in stages},
            {name: type for stage in stages for name, type in zip(stage.gradients, stage.gradient_types, strict=True)},
            {stage.index: stage.buffers for stage in stages},
        )

    def _results(self, rank: int) -> dict[str, Any]:
        results: dict[str, Any] = {}
        if self.loss.node is not None:
            results["loss"] = self.loss.node
        totals = {s: total.node for s, total in self.gradients.items() if self.rank_of[s] == rank and total.node is not None}
        if totals:
            results["gradients"] = totals
        last = self.rank_of[max(self.rank_of)]
        if self.step.outputs == "all" or (self.step.outputs == "last" and rank == last):
            leaves = range(len(self.step.microbatches[0].staged.outputs))
            results["outputs"] = [
                [self.values[plan.staged.outputs[leaf], m] for m, plan in enumerate(self.step.microbatches)] for leaf in leaves
            ]
        return results


@dataclass
class _Total:
    """A sum over microbatches in their order; a value that comes early waits for those before it."""

    lowering: _Lowering
    name: str
    node: fx.Node | None = None
    waiting: dict[int, tuple[fx.Node | None, dict[str, Any]]] = field(default_factory=dict)
    next: int = 0

    def add(self, m: int, value: fx.Node | None, note: dict[str, Any]) -> None:
        """Take the value of microbatch m (None: it has none)."""
        self.waiting[m] = (value, note)
        counted = [i for i, plan in enumerate(self.lowering.step.microbatches) if plan.counts]
        while self.next < len(counted) and counted[self.next] in self.waiting:
            value, note = self.waiting.pop(counted[self.next])
            self.next += 1
            if value is None:
                continue
            if self.node is None:
                self.node = value
            else:
                type = self.node.meta["type"]
                self.node = self.lowering._call(ops.accumulate, (self.node, value), {}, self.name, note)
                self.node.meta["type"] = type
