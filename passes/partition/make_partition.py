"""Say a cut of one trace in words that hold for every trace: parameters and module calls.

    cuts [4] of: embed, block 0, block 1 | block 2, block 3, head
    becomes      stage 0: parameters of embed, block 0, block 1; calls "embed", "blocks.0", "blocks.0.linear", ...
                 stage 1: the others

A parameter belongs to every stage with an operation that reads it, views of it apart; a module call belongs to a stage where
all its operations lie on it.
"""

from __future__ import annotations

import bisect
import difflib
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from torch import fx

from pdcompiler.core.errors import CompileError
from pdcompiler.core.ir import ModuleCall, Trace, evaluate, module_of, type_of
from pdcompiler.core.partition import Partition, Problem, StagePlan
from pdcompiler.core.plan import Evaluation, Plan, PlannedStage
from pdcompiler.core.values import is_view, readers_of
from pdcompiler.core.workload import Workload


def cuts_at_modules(problem: Problem, paths: Sequence[str]) -> list[int]:
    """The positions at which the given modules begin, in the model's order. Raises CompileError for what is no such place."""
    cuts: list[int] = []
    known = {prefix for node in problem.nodes for prefix in _prefixes(module_of(node).path)}
    for path in paths:
        place = next((i for i, node in enumerate(problem.nodes) if path in _prefixes(module_of(node).path)), None)
        if place is None:
            close = difflib.get_close_matches(path, sorted(known), 3) or _beside(path, known)
            way_out = f"one of {close}" if close else "a path of model.named_modules()"
            raise CompileError(f"no module {path!r} runs in this model", ways_out=(way_out,))
        if not problem.legal[place]:
            parts = "a buffer's update, a value of data-dependent shape, or the uses of one parameter in one module call"
            reason = "the model begins there" if place == 0 else f"that would part {parts}"
            raise CompileError(f"no stage can begin at {path!r}: {reason}")
        if cuts and place <= cuts[-1]:
            raise CompileError(f"the stage that begins at {path!r} does not come after the one before it in the model's order")
        cuts.append(place)
    return cuts


def _beside(path: str, known: set[str]) -> list[str]:
    """Some of the known paths inside the innermost known module of an unknown path."""
    parent = next((prefix for prefix in reversed(_prefixes(path)) if prefix in known), "")
    return sorted(p for p in known if p.startswith(f"{parent}.") or not parent)[:5]


def _prefixes(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:n]) for n in range(1, len(parts) + 1)]


def make_partition(trace: Trace, problem: Problem, cuts: Sequence[int], model: str) -> Partition:
    """The Partition of a trace cut before the positions `cuts`."""
    stage = {node: bisect.bisect_right(cuts, i) for i, node in enumerate(problem.nodes)}
    parameters: list[dict[str, int]] = [{} for _ in range(len(cuts) + 1)]
    for node in trace.graph.nodes:
        if node.op == "placeholder" and trace.inputs[node.name].kind == "parameter":
            name = trace.canonical[trace.inputs[node.name].name]
            for reader in sorted({stage[user] for user in readers_of(node) if user in stage}):
                parameters[reader][name] = evaluate(type_of(node).nbytes(), 1)
    _place_unread(trace, parameters)
    stages = zip(parameters, _whole_calls(stage), strict=True)
    return Partition(tuple(StagePlan(tuple(held), tuple(calls), sum(held.values())) for held, calls in stages), model)


def with_costs(partition: Partition, workload: Workload, plan: Plan, evaluation: Evaluation) -> Partition:
    """The same with what a plan and its evaluation say of each stage."""
    sent = _sent_bytes(workload, plan)
    costs = zip(partition.stages, plan.stages, evaluation.stages, sent, strict=True)
    stages = tuple(
        replace(stage, seconds=cost.compute, sent_bytes=nbytes, replicas=planned.replicas, recompute=planned.recompute, cost=cost)
        for stage, planned, cost, nbytes in costs
    )
    return replace(partition, stages=stages, pipelines=plan.pipelines)


def cuts_of(problem: Problem, plan: Plan) -> list[int]:
    """The positions at which a plan's stages begin, but the first."""
    return [problem.places[stage.layers[0]] for stage in plan.stages[1:]]


def plan_of_cuts(problem: Problem, cuts: Sequence[int]) -> Plan:
    """The inverse: one replica a stage."""
    firsts = [0, *(bisect.bisect_right(problem.places, cut) - 1 for cut in cuts), len(problem.places)]
    return Plan(tuple(PlannedStage(tuple(range(first, last))) for first, last in pairwise(firsts)))


def _sent_bytes(workload: Workload, plan: Plan) -> list[int]:
    """What crosses the border behind each stage per microbatch, one way."""
    stage = {layer: index for index, planned in enumerate(plan.stages) for layer in planned.layers}
    sent = [0.0] * len(plan.stages)
    for value in workload.values:
        for border in range(stage[value.producer], max(stage[reader] for reader in value.consumers)):
            sent[border] += value.bytes
    return [int(nbytes) for nbytes in sent]


def _place_unread(trace: Trace, parameters: list[dict[str, int]]) -> None:
    """A parameter that nothing reads belongs to the first stage, so that none is lost."""
    placed = {name for stage in parameters for name in stage}
    for node in trace.graph.nodes:
        meaning = trace.inputs.get(node.name) if node.op == "placeholder" else None
        if meaning is not None and meaning.kind == "parameter" and trace.canonical[meaning.name] not in placed:
            parameters[0].setdefault(trace.canonical[meaning.name], evaluate(type_of(node).nbytes(), 1))


def _whole_calls(stage: dict[fx.Node, int]) -> list[list[ModuleCall]]:
    """Per stage the module calls of which every operation lies on it; views do not count, they follow what they read."""
    stages_of: dict[ModuleCall, set[int]] = {}
    inside: dict[str, set[int]] = {}
    moving = {module_of(node) for node in stage if not is_view(node)}
    for node, index in stage.items():
        call = module_of(node)
        if is_view(node) and call in moving:
            continue
        stages_of.setdefault(call, set()).add(index)
        for prefix in _prefixes(call.path):
            inside.setdefault(prefix, set()).add(index)
    calls: list[list[ModuleCall]] = [[] for _ in range(max(stage.values()) + 1)]
    for call, stages in stages_of.items():
        if call.path and len(stages) == 1:
            calls[next(iter(stages))].append(call)
    for path, stages in inside.items():
        if path and len(stages) == 1 and ModuleCall(path) not in stages_of:
            calls[next(iter(stages))].append(ModuleCall(path))
    return calls
