"""Whether a partition that a user wrote or edited can be the stages of this model.

    names    its parameters and modules are the model's, none is left out, none is said twice     before anything is traced
    places   with its words every operation of a trace gets a stage; no value goes back to an earlier one; nothing is parted
             that must stand together; each parameter is read on each of its stages

A module call may be missing from a partition where its place follows: its parameters have one, the module around it stands wholly
on a stage, other calls of its module are known, or it lies on several stages, as whole models do. The places are those of the
four rules in `assign_stages`, taken at their word: there a call may stand later than it says, since other traces differ.
"""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Iterable
from typing import NoReturn

from torch import fx, nn

from pdcompiler.core.errors import CompileError
from pdcompiler.core.ir import ModuleCall, Trace, is_backward, is_integer, module_of, where
from pdcompiler.core.partition import Partition, Problem
from pdcompiler.core.plan import Plan, PlannedStage
from pdcompiler.core.values import Origins, inseparable, is_view, readers_of

PLANNED = "let pdcompiler choose the partition"


def check_names(partition: Partition, model: nn.Module) -> None:
    """Raise CompileError where the partition speaks of what the model does not have, or leaves out a parameter."""
    known = dict(model.named_parameters())
    modules = {path for path, _ in model.named_modules()}
    stands: dict[object, int] = {}
    for index, stage in enumerate(partition.stages):
        for name in stage.parameters:
            if name not in known:
                raise CompileError(
                    f"stage {index} of the partition has the parameter {name!r}, the model does not", ways_out=_other(name, model)
                )
            if stands.get(name) == index:
                raise CompileError(f"stage {index} of the partition has the parameter {name!r} twice")
            stands[name] = index
        for call in stage.calls:
            if call.path not in modules:
                close = difflib.get_close_matches(call.path, sorted(modules), 3)
                ways_out = (f"one of {close}" if close else "a path of model.named_modules()",)
                raise CompileError(
                    f"stage {index} of the partition has the module call {str(call)!r}, the model has no such module",
                    ways_out=ways_out,
                )
            if (other := stands.setdefault(call, index)) != index:
                raise CompileError(
                    f"the partition puts the module call {str(call)!r} on stages {other} and {index}",
                    ways_out=("name it on one; a call that lies on several stages is not named, the calls inside it are",),
                )
    if forgotten := [name for name in known if name not in stands]:
        raise CompileError(
            f"the partition forgets {len(forgotten)} of the model's parameters: {_some(forgotten)}",
            ways_out=("add each to the stage that reads it", PLANNED),
        )


def check_partition(trace: Trace, partition: Partition) -> dict[fx.Node, int]:
    """The stage of each forward operation. Raises CompileError where the partition is not contiguous or parts something."""
    places = _Places(trace, partition)
    places.check_groups()
    places.check_readers()
    places.check_forgotten()
    return places.stage


def plan_of_stages(problem: Problem, stage: dict[fx.Node, int]) -> Plan | None:
    """What the operations' stages are as a plan of layers: a layer stands where its last operation does, one replica a stage.
    None where some stage has no layer (in this trace; another may have)."""
    starts = [*problem.places, len(problem.nodes)]
    where_made: list[int] = []
    before: dict[int, list[int]] = defaultdict(list)
    for producer, consumer in problem.workload.edges():
        before[consumer].append(producer)
    for layer in range(problem.workload.layers):
        own = [stage[node] for node in problem.nodes[starts[layer] : starts[layer + 1]]]
        where_made.append(max([*own, *(where_made[producer] for producer in before[layer])]))
    layers = [tuple(k for k, at in enumerate(where_made) if at == index) for index in range(max(where_made) + 1)]
    return Plan(tuple(PlannedStage(own) for own in layers)) if all(layers) else None


class _Places:
    """One walk over the forward operations. stage: of each.   said: those whose stage the partition says.   cause: of each
    operation, the one because of which it stands no earlier."""

    def __init__(self, trace: Trace, partition: Partition) -> None:
        self.trace, self.partition = trace, partition
        self.owners = partition.owners()
        origins = Origins(trace)
        self.views = origins.weight_values - origins.parameter_values
        self.free = origins.batch_values | origins.weight_values
        self.reads: dict[fx.Node, list[str]] = defaultdict(list)
        for node in trace.graph.find_nodes(op="placeholder"):
            if trace.inputs[node.name].kind == "parameter":
                for reader in readers_of(node):
                    self.reads[reader].append(trace.canonical[trace.inputs[node.name].name])
        self.stage: dict[fx.Node, int] = {}
        self.said: set[fx.Node] = set()
        self.cause: dict[fx.Node, fx.Node] = {}
        for node in trace.graph.nodes:
            if node.op == "call_function" and not is_backward(node):
                self._place(node)

    def _place(self, node: fx.Node) -> None:
        inputs = [i for i in node.all_input_nodes if i in self.stage and i not in self.views]
        latest = max(inputs, key=self.stage.__getitem__, default=None)
        lowest = 0 if latest is None else self.stage[latest]
        said = self._said(node, lowest)
        if said is not None and said < lowest:
            assert latest is not None
            self._refuse_order(node, said, self.cause[latest], lowest)
        self.stage[node] = lowest if said is None else said
        if said is not None:
            self.said.add(node)
        self.cause[node] = node if said is not None or latest is None else self.cause[latest]

    def _said(self, node: fx.Node, lowest: int) -> int | None:
        call = self.partition.stage_of(module_of(node))
        if node not in self.reads:
            return None if is_view(node) or is_integer(node) else call
        names = self.reads[node]
        possible = set.intersection(*(set(self.owners[name]) for name in names))
        if not possible:
            apart = " and ".join(f"{name} of stage {self.owners[name][0]}" for name in names)
            raise CompileError(
                f"the partition parts what must stand together: one operation reads {apart}", where=where(node),
                ways_out=("put them on one stage", PLANNED),
            )  # fmt: skip
        if call is not None and call not in possible:
            raise CompileError(
                f"the partition parts what must stand together: {_named(node)} of stage {call} reads {names[0]} of stage "
                f"{self.owners[names[0]][0]}", where=where(node), ways_out=("put both on one stage", PLANNED),
            )  # fmt: skip
        if call is not None:
            return call
        return min((stage for stage in possible if stage >= lowest), default=max(possible))

    @staticmethod
    def _refuse_order(node: fx.Node, said: int, other: fx.Node, lowest: int) -> NoReturn:
        raise CompileError(
            f"the partition is not contiguous: {_named(other)} of stage {lowest} runs before {_named(node)} of stage {said}, "
            "which needs what it makes", where=where(node),
            ways_out=(f"put {_named(node)} on stage {lowest} or later, or {_named(other)} on stage {said} or earlier", PLANNED),
        )  # fmt: skip

    def check_groups(self) -> None:
        """Operations that may not be parted; those of which the partition says nothing may follow the others."""
        for why, group in inseparable(self.trace):
            last = max(group, key=self.stage.__getitem__)
            for node in group:
                if node in self.said and self.stage[node] < self.stage[last] and node not in self.free:
                    self._refuse_parted(why, node, last)

    @staticmethod
    def _refuse_parted(why: str, node: fx.Node, other: fx.Node) -> NoReturn:
        raise CompileError(
            f"the partition parts what must stand together: {why}", where=f"{where(node)} and {where(other)}",
            ways_out=("put both on one stage", PLANNED),
        )  # fmt: skip

    def check_readers(self) -> None:
        """All reads of a parameter within one module call are on one stage; one of several stages is read on each, as far as
        the partition says where."""
        used: dict[str, set[int | None]] = defaultdict(set)
        by_call: dict[tuple[str, ModuleCall], list[fx.Node]] = defaultdict(list)
        for node in self.stage:
            for name in self.reads.get(node, ()):
                used[name].add(self.partition.stage_of(module_of(node)))
                if node not in self.free:
                    by_call[name, module_of(node)].append(node)
        for (name, _), nodes in by_call.items():
            first, last = (choose(nodes, key=self.stage.__getitem__) for choose in (min, max))
            if (low := self.stage[first]) < (high := self.stage[last]):
                self._refuse_parted(f"{_named(first)} reads {name} on stages {low} and {high}", first, last)
        for name, stages in self.owners.items():
            idle = [stage for stage in stages if stage not in used[name]]
            if idle and len(stages) > 1 and None not in used[name]:
                both = f"stages {' and '.join(map(str, stages))}"
                raise CompileError(
                    f"the partition puts {name} on {both}, but no operation of stage {idle[-1]} reads it",
                    ways_out=(f"leave it out of stage {idle[-1]}", PLANNED),
                )

    def check_forgotten(self) -> None:
        """Module calls of which nothing says where they stand, though all of it stands on one stage."""
        known = {call.path for stage in self.partition.stages for call in stage.calls}
        inside: dict[str, set[int]] = defaultdict(set)
        unsaid: dict[ModuleCall, int] = {}
        for node, stage in self.stage.items():
            call = module_of(node)
            if is_view(node) or is_integer(node) or node in self.free:
                continue
            for end in [place for place, letter in enumerate(call.path) if letter == "."] + [len(call.path)]:
                inside[call.path[:end]].add(stage)
            if node not in self.said and call.path and call.path not in known:
                unsaid.setdefault(call, stage)
        if forgotten := {call: stage for call, stage in unsaid.items() if len(inside[call.path]) == 1}:
            call, stage = next(iter(forgotten.items()))
            raise CompileError(
                f"the partition forgets {len(forgotten)} of the model's module calls: {_some(map(str, forgotten))}",
                ways_out=(f"add {str(call)!r} to the calls of stage {stage}, which makes its inputs, or of a later one", PLANNED),
            )


def _named(node: fx.Node) -> str:
    return str(module_of(node)) or f"the model's own {node.name}"


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:3]) + (", ..." if len(listed) > 3 else "")


def _other(name: str, model: nn.Module) -> tuple[str, ...]:
    """Ways out of a wrong parameter name: the first name of the same tensor, or a name like it."""
    first = {id(parameter): known for known, parameter in model.named_parameters()}
    every = dict(model.named_parameters(remove_duplicate=False))
    if name in every:
        return (f"{first[id(every[name])]!r}, the first name of the same parameter",)
    close = difflib.get_close_matches(name, list(first.values()), 3)
    return (f"one of {close}" if close else "a name of model.named_parameters()",)
