"""The planner on one page: from layers with costs and a machine to the best plan, with its bound and its reasons.

    Workload --spans--> every possible stage --search, for each number of pipelines--> Plan --evaluate--> what it takes

One device and pure data parallelism are plans with one stage, so they are always among the candidates. A plan is judged by
`evaluate` alone, the user's own too. Not here: how one class of plans is searched (`search.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy

from pdcompiler.core.errors import CompileError
from pdcompiler.core.explanation import Border, Explanation
from pdcompiler.core.lattice import graph_of
from pdcompiler.core.machine import Machine
from pdcompiler.core.partition import Problem
from pdcompiler.core.plan import Plan, PlannedStage, Training
from pdcompiler.core.spans import Spans
from pdcompiler.core.workload import Workload
from pdcompiler.core.workload import in_order as reordered
from pdcompiler.found import Found
from pdcompiler.in_step import near, pipeline_counts, plans_in_step
from pdcompiler.passes.partition.evaluate import evaluate
from pdcompiler.passes.partition.fold import Parts, fold_workload, merge
from pdcompiler.passes.partition.ideals import ideals
from pdcompiler.passes.partition.lattice_spans import lattice_spans
from pdcompiler.passes.partition.orders import depth_first_orders
from pdcompiler.passes.partition.spans import chain_spans
from pdcompiler.passes.partition.thin import narrow_parts
from pdcompiler.ranking import best_of
from pdcompiler.refusal import refuse
from pdcompiler.search import Search, work_bound

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
    return best or refuse(machine, training, classes[0][1], lambda *other: _any(workload, classes, *other))


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
            f"{machine.world_size} stages asked for, but the model can be cut in at most {most} stages",
            ways_out=(f"world_size={most} or less",),
        )
    spans = chain_spans(workload)
    search = Search(workload, spans, machine, training, straight=True)
    found, bound = search.run(numpy.inf)
    if found is None:
        return refuse(
            machine, training, STRAIGHT, lambda m, t: Search(workload, spans, m, t, straight=True).any_plan(), may_recompute=False
        )
    others = near(found, search.seen)
    return replace(found, bound=min(bound, found.evaluation.seconds), how=STRAIGHT, others=others)


def plan_in_order(problem: Problem, machine: Machine, training: Training) -> tuple[Problem, Found]:
    """The best plan of a trace, its stages contiguous; and the problem with the layers that the plan speaks of: the narrowest
    cuts of a large one, so that the search ends within seconds. Raises CompileError as `plan`."""
    narrow, where = _narrowed(problem, machine, training)
    found = plan(narrow.workload, machine, training, in_order=True, where=where)
    return narrow, _bounded(found, narrow is problem, narrow.workload, machine, training)


def faster_in_order(
    problem: Problem, machine: Machine, training: Training, beat: float
) -> tuple[Problem, Found | None]:  # fmt: skip
    """As `plan_in_order`, a plan that by the formula takes less than `beat`, or None."""
    narrow, where = _narrowed(problem, machine, training)
    found = _best(narrow.workload, [(chain_spans(narrow.workload), where)], machine, training, beat)
    return narrow, found and _bounded(found, narrow is problem, narrow.workload, machine, training)


def _narrowed(problem: Problem, machine: Machine, training: Training) -> tuple[Problem, str]:
    """The problem with its narrowest cuts, if it is large, and its class in words."""
    choices = machine.world_size * training.most_replicas(machine.world_size)
    most = round(min(max((1.2e9 / choices) ** 0.5, FEWEST_PLACES), MOST_PLACES))
    if problem.workload.layers <= most:
        return problem, IN_ORDER
    parts = narrow_parts(problem.workload, most)
    places = tuple(problem.places[part[0]] for part in parts)
    narrow = replace(problem, places=places, workload=merge(problem.workload, parts))
    return narrow, f"{most} narrowest cuts in the model's own order"


def _bounded(found: Found, is_whole: bool, workload: Workload, machine: Machine, training: Training) -> Found:
    """With a bound that holds for all cuts."""
    return found if is_whole else replace(found, bound=min(found.evaluation.seconds, work_bound(workload, machine, training)))


def _best(
    workload: Workload, classes: list[tuple[Spans, str]], machine: Machine, training: Training, beat: float = numpy.inf
) -> Found | None:  # fmt: skip
    best: Found | None = None
    bounds, seen = [], list[Found]()
    for spans, how in classes:
        for pipelines in pipeline_counts(machine, training):
            search = Search(workload, spans, machine, training, pipelines)
            found, bound = search.run(best.evaluation.seconds if best else beat)
            bounds.append(bound if search.all_degrees else work_bound(workload, machine, training))
            best = replace(found, how=f"{how}, {search.replications()}") if found else best
            seen += search.seen
    if best is None:
        return None
    bound = min(bounds) if len(classes) == 1 else work_bound(workload, machine, training)
    best = replace(best, bound=min(bound, best.evaluation.seconds), others=near(best, seen))
    if not training.flushes:
        return best
    return replace(best, others=(*best.others, *plans_in_step(best, workload, classes, machine, training)))


def ranked(found: Found, machine: Machine, training: Training) -> Found:
    """Of a plan and those nearly as good, the one that is the fastest when it is walked as its ranks will run it. Raises
    CompileError where an update has too few microbatches for each of them."""
    chosen, walk = best_of((found, *found.others), machine, training)
    if walk.seconds == numpy.inf:
        assert walk.depths is not None
        least = walk.depths[0] * chosen.plan.pipelines
        raise CompileError(
            f"{training.schedule} has {training.microbatches} microbatches an update, the plan {chosen.plan} needs {least}",
            ways_out=(f"{least} microbatches or more", "schedule pipedream, or one that flushes"),
        )
    return replace(chosen, bound=found.bound, how=found.how, walked=walk.seconds, depths=walk.depths)


def _any(workload: Workload, classes: list[tuple[Spans, str]], machine: Machine, training: Training) -> Found | None:
    """Some plan that fits the devices' memory."""
    for spans, _ in classes:
        for pipelines in pipeline_counts(machine, training):
            if found := Search(workload, spans, machine, training, pipelines).any_plan():
                return found
    return None


def judge(chosen: Plan, workload: Workload, machine: Machine, training: Training) -> Found:
    """What the user's own plan takes, beside the best of one rank a stage if it has one rank a stage."""
    evaluation = evaluate(chosen, workload, machine, training)
    if chosen.devices != len(chosen.stages):
        bound = work_bound(workload, machine, training)
        return Found(chosen, evaluation, min(bound, evaluation.seconds), "the cuts and replicas that were given")
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
        found.walked, found.depths,
    )  # fmt: skip


def _known(nbytes: float) -> float | None:
    return nbytes if nbytes < numpy.inf else None


def _moved(own: Plan, index: int, before: tuple[int, ...], after: tuple[int, ...]) -> Plan | None:
    """The plan with other layers on two neighbouring stages; None where one would be empty."""
    if not before or not after:
        return None
    pair = (replace(own.stages[index], layers=before), replace(own.stages[index + 1], layers=after))
    return replace(own, stages=(*own.stages[:index], *pair, *own.stages[index + 2 :]))
