"""The planner on one page: from layers with costs and a machine to the best plan, with its bound and its reasons.

    Workload --spans--> every possible stage --search, for each number of pipelines--> Plan --evaluate--> what it takes

One device and pure data parallelism are plans with one stage, so they are always among the candidates. A plan is judged by
`evaluate` alone, the user's own too. Not here: how one class of plans is searched (`search.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy

from pdcompiler.core.errors import CompileError
from pdcompiler.core.explanation import Border, Explanation, amount
from pdcompiler.core.lattice import graph_of
from pdcompiler.core.machine import Machine
from pdcompiler.core.partition import Problem
from pdcompiler.core.plan import Plan, PlannedStage, StageCost, Training
from pdcompiler.core.spans import Spans
from pdcompiler.core.workload import Workload
from pdcompiler.core.workload import in_order as reordered
from pdcompiler.passes.partition.evaluate import evaluate
from pdcompiler.passes.partition.fold import Parts, fold_workload, merge
from pdcompiler.passes.partition.ideals import ideals
from pdcompiler.passes.partition.lattice_spans import lattice_spans
from pdcompiler.passes.partition.orders import depth_first_orders
from pdcompiler.passes.partition.spans import chain_spans
from pdcompiler.passes.partition.thin import narrow_parts
from pdcompiler.search import Found, Search, work_bound

STRAIGHT = "all cuts in the model's own order, one rank a stage"
IN_ORDER = "all cuts in the model's own order"
ALL = "all stages with which no value goes back"
MOST_LATTICE = 20_000
FEWEST_PLACES, MOST_PLACES = 100, 400
"""Where a stage may begin, for plans of traces: the more the fewer devices and replicas there are."""
ORDERS = 12
"""Of a graph with more states than MOST_LATTICE."""


def plan(workload: Workload, machine: Machine, training: Training, *, in_order: bool = False, where: str = "") -> Found:
    """The best plan on at most the machine's devices. in_order: only stages that are contiguous in the workload's own order.
    where: which of a model's cuts the workload has, if not all, in words.

    Raises CompileError where none fits the devices' memory, naming the stage that comes nearest and what to change.
    """
    classes = [(chain_spans(workload), where or IN_ORDER)] if in_order else candidate_stages(workload)
    best = _best(workload, classes, machine, training)
    return best or _refuse(machine, training, classes[0][1], lambda *other: _any(workload, classes, *other))


def candidate_stages(workload: Workload) -> list[tuple[Spans, str]]:
    """Every stage that a plan may have, with the class in words: all downsets where there are few enough, else those along some
    topological orders."""
    folded, parts = fold_workload(workload)
    graph = graph_of(folded)
    lattice = ideals(graph, MOST_LATTICE)
    if lattice is not None and lattice.states == folded.layers + 1:
        return [(_along(folded, parts, range(folded.layers)), ALL)]
    spans = None if lattice is None else lattice_spans(folded, lattice, parts)
    if spans is not None:
        return [(spans, ALL)]
    orders = list(depth_first_orders(graph, ORDERS))
    return [(_along(folded, parts, order), f"the stages along {ORDERS} topological orders") for order in orders]


def _along(folded: Workload, parts: Parts, order: Sequence[int]) -> Spans:
    spans = chain_spans(reordered(folded, order))
    layers = spans.layers
    return replace(spans, layers=lambda pair: tuple(sorted(layer for k in layers(pair) for layer in parts[order[k]])))


def straight_plan(workload: Workload, machine: Machine, training: Training) -> Found:
    """The best plan in the workload's own order with one stage on each of the machine's devices.

    Raises CompileError where there are fewer layers, or where no such plan fits the devices' memory.
    """
    if workload.layers < machine.world_size:
        most = workload.layers
        raise CompileError(
            f"{machine.world_size} ranks asked for, but the model can be cut in at most {most} stages",
            ways_out=(f"world_size={most} or less",),
        )
    spans = chain_spans(workload)
    found, bound = Search(workload, spans, machine, training, straight=True).run(numpy.inf)
    if found is None:
        return _refuse(machine, training, STRAIGHT, lambda m, t: Search(workload, spans, m, t, straight=True).any_plan())
    return replace(found, bound=min(bound, found.evaluation.seconds), how=STRAIGHT)


def plan_in_order(problem: Problem, machine: Machine, training: Training) -> tuple[Problem, Found]:
    """The best plan of a trace, its stages contiguous; and the problem with the layers that the plan speaks of: the narrowest
    cuts of a large one, so that the search ends within seconds."""
    choices = machine.world_size * training.most_replicas(machine.world_size)
    most = round(min(max((1.2e9 / choices) ** 0.5, FEWEST_PLACES), MOST_PLACES))
    if problem.workload.layers <= most:
        return problem, plan(problem.workload, machine, training, in_order=True)
    parts = narrow_parts(problem.workload, most)
    places = tuple(problem.places[part[0]] for part in parts)
    narrow = replace(problem, places=places, workload=merge(problem.workload, parts))
    found = plan(narrow.workload, machine, training, in_order=True, where=f"{most} narrowest cuts in the model's own order")
    return narrow, replace(found, bound=min(found.evaluation.seconds, work_bound(narrow.workload, machine, training)))


def _best(workload: Workload, classes: list[tuple[Spans, str]], machine: Machine, training: Training) -> Found | None:
    best: Found | None = None
    bounds = []
    for spans, how in classes:
        for pipelines in pipeline_counts(machine, training):
            search = Search(workload, spans, machine, training, pipelines)
            found, bound = search.run(best.evaluation.seconds if best else numpy.inf)
            bounds.append(bound if search.all_degrees else work_bound(workload, machine, training))
            best = replace(found, how=f"{how}, {search.replications()}") if found else best
    if best is None:
        return None
    bound = min(bounds) if len(classes) == 1 else work_bound(workload, machine, training)
    return replace(best, bound=min(bound, best.evaluation.seconds))


def _any(workload: Workload, classes: list[tuple[Spans, str]], machine: Machine, training: Training) -> Found | None:
    """Some plan that fits the devices' memory."""
    for spans, _ in classes:
        for pipelines in pipeline_counts(machine, training):
            if found := Search(workload, spans, machine, training, pipelines).any_plan():
                return found
    return None


def pipeline_counts(machine: Machine, training: Training) -> Iterator[int]:
    """How often the whole pipeline may be replicated: its devices fill whole units of each level, or a part of one evenly.
    With one level, replicated stages say the same more finely; with several kinds of devices, the pipelines would differ."""
    size, units = machine.world_size, machine.unit_sizes[:-1]
    for pipelines in range(1, size + 1):
        own = size // pipelines
        aligned = all(own % unit == 0 or unit % own == 0 for unit in units)
        enough = training.schedule == "pipedream" or training.microbatches >= pipelines
        alike = len(machine.devices) == 1 and size % pipelines == 0
        if pipelines == 1 or (units and alike and aligned and enough):
            yield pipelines


def judge(chosen: Plan, workload: Workload, machine: Machine, training: Training) -> Found:
    """What the user's own plan of one rank a stage takes, beside the best such plan."""
    evaluation = evaluate(chosen, workload, machine, training)
    _, bound = Search(workload, chain_spans(workload), machine, training, straight=True).run(numpy.inf)
    return Found(chosen, evaluation, min(bound, evaluation.seconds), STRAIGHT)


def explain(found: Found, workload: Workload, machine: Machine, training: Training) -> Explanation:
    """Why: what else there is, and what moving each border by one layer would cost."""

    def seconds(other: Plan | None) -> float | None:
        if other is None:
            return None
        try:
            evaluation = evaluate(other, workload, machine, training)
        except CompileError:
            return None
        return evaluation.seconds if evaluation.fits else None

    every = tuple(range(workload.layers))
    borders = []
    for index in range(len(found.plan.stages) - 1):
        before, after = found.plan.stages[index].layers, found.plan.stages[index + 1].layers
        earlier = _moved(found.plan, index, before[:-1], (before[-1], *after))
        later = _moved(found.plan, index, (*before, after[0]), after[1:])
        sent = sum(v.bytes for v in workload.values if v.producer <= max(before) and max(v.consumers) >= min(after))
        borders.append(Border(workload.names[after[0]], sent, seconds(earlier), seconds(later)))
    return Explanation(
        machine.name, machine.world_size, _known(machine.devices[0][0].memory_bytes), training.schedule, training.microbatches,
        workload.rows, found.evaluation.seconds, found.bound, found.how,
        seconds(Plan((PlannedStage(every),))), seconds(Plan((PlannedStage(every, machine.world_size),))), tuple(borders),
    )  # fmt: skip


def _known(nbytes: float) -> float | None:
    return nbytes if nbytes < numpy.inf else None


def _moved(own: Plan, index: int, before: tuple[int, ...], after: tuple[int, ...]) -> Plan | None:
    """The plan with other layers on two neighbouring stages; None where one would be empty."""
    if not before or not after:
        return None
    pair = (replace(own.stages[index], layers=before), replace(own.stages[index + 1], layers=after))
    return replace(own, stages=(*own.stages[:index], *pair, *own.stages[index + 2 :]))


AnyPlan: TypeAlias = Callable[[Machine, Training], Found | None]


def _refuse(machine: Machine, training: Training, where: str, any_plan: AnyPlan) -> Found:
    """Say which stage lacks how much memory in the plan that needs least of it, and what would need less."""
    found = _least_memory(machine, training, any_plan)
    costs = found.evaluation.stages
    worst = max(range(len(costs)), key=lambda index: costs[index].memory)
    ways = []
    if not training.recompute and where != STRAIGHT:  # such plans can't be run with recompute
        other = _least_memory(machine, replace(training, recompute=True), any_plan)
        ways.append(f"stages that recompute ({amount(_most(other))}B)")
    if training.optimizer_bytes > 0:
        other = _least_memory(machine, replace(training, optimizer_bytes=0.0), any_plan)
        ways.append(f"an optimizer without state ({amount(_most(other))}B)")
    raise CompileError(
        f"stage {worst} of {len(costs)} needs {amount(costs[worst].memory)}B, "
        f"the device has {amount(machine.devices[0][0].memory_bytes)}B\n"
        f"  with {where}, no plan needs less; of it: {memory_parts(costs[worst])}",
        ways_out=(*ways, "fewer rows in a microbatch", "more devices, or some with more memory"),
    )


def _least_memory(machine: Machine, training: Training, any_plan: AnyPlan) -> Found:
    """A plan whose fullest device is as empty as it can be, within a thousandth."""
    low, high, found = 0.0, 1.0, None
    while found is None:
        high *= 4
        found = any_plan(_with_memory(machine, high), training)
    high = min(high, _most(found) / machine.devices[0][0].memory_bytes)
    while high > low * 1.001:
        middle = (low + high) / 2
        other = any_plan(_with_memory(machine, middle), training)
        low, high, found = (middle, high, found) if other is None else (low, middle, other)
    return found


def _with_memory(machine: Machine, factor: float) -> Machine:
    kinds = tuple((replace(device, memory_bytes=device.memory_bytes * factor), count) for device, count in machine.devices)
    return replace(machine, devices=kinds)


def _most(found: Found) -> float:
    return max(cost.memory for cost in found.evaluation.stages)


def memory_parts(cost: StageCost) -> str:
    """A stage's memory by kind, in words."""
    named = {
        "weights": cost.weights, "gradients": cost.gradients, "optimizer": cost.optimizer,
        f"saved values of {cost.in_flight} microbatches in flight": cost.saved, "working memory": cost.working,
    }  # fmt: skip
    return ", ".join(f"{name} {amount(nbytes)}B" for name, nbytes in named.items() if nbytes)
