"""The best few plans, ranked by a walk over what their ranks really do, in place of the formulas that searches work with.

    gpipe, 1f1b                each replica's own list; microbatch i runs on replica i mod replicas (core/timing.py)
    pipedream, pipedream-2bw   ticks in steady state, at PipeDream's depths or the smallest deeper ones that are faster and fit

The formula of a flushing step is no bound of its walk: slow stages hide the others' warm-up, and unequal ones make each other
wait. Not here: the searches (`search.py`), what a stage takes (`passes/partition/evaluate.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from pdcompiler.core.depths import least_depths
from pdcompiler.core.errors import CompileError
from pdcompiler.core.machine import Machine
from pdcompiler.core.period import Seconds, drained, period
from pdcompiler.core.plan import Evaluation, Plan, StageCost, Training
from pdcompiler.core.schedule import Schedule
from pdcompiler.core.ticks import Ticks, pipedream_depths
from pdcompiler.core.timing import timing
from pdcompiler.found import Found
from pdcompiler.passes.schedules.named import replicated

EQUAL = 1e-6
UNLIMITED = 10**6
MOST_ACTIONS = 1000
"""Of a schedule that is made and walked as it is; longer ones are walked by `drained`, which says the same of the same order."""


@dataclass(frozen=True)
class Walked:
    """seconds: of a step; asynchronous: of one microbatch in steady state.   depths: how many ticks after its forward a backward
    runs on each stage; None: the schedule flushes.   memory: bytes per device of each stage, at these depths."""

    seconds: float
    depths: tuple[int, ...] | None
    memory: tuple[float, ...]
    fits: bool


def best_of(founds: Sequence[Found], machine: Machine, training: Training) -> tuple[Found, Walked]:
    """The fastest as walked, of those that fit if any does; of equal ones that with the better formula, then the first."""
    best: tuple[Found, Walked] | None = None
    for found in founds:
        own = walked(found.plan, found.evaluation, machine, training)
        if best is None or _better(found, own, *best):
            best = found, own
    if best is None:
        raise CompileError("there is no plan to choose from")
    return best


def _better(found: Found, own: Walked, other: Found, best: Walked) -> bool:
    if own.fits != best.fits:
        return own.fits
    if math.isclose(own.seconds, best.seconds, rel_tol=EQUAL):
        return found.evaluation.seconds < other.evaluation.seconds * (1 - EQUAL)
    return own.seconds < best.seconds


def walked(plan: Plan, evaluation: Evaluation, machine: Machine, training: Training) -> Walked:
    """What the plan takes, walked: one of its pipelines, with its part of the microbatches."""
    own = training.of_one(plan.pipelines)
    seconds = seconds_of(evaluation, machine)
    if not training.flushes:
        return _asynchronous(plan, evaluation, machine, own, seconds)
    memory = tuple(cost.memory for cost in evaluation.stages)
    return Walked(step_seconds(plan, own, seconds), None, memory, evaluation.fits)


def seconds_of(evaluation: Evaluation, machine: Machine) -> Seconds:
    """For the walks. A border takes what the one of its two stages takes that sends or receives more, half of it each way."""
    stages = evaluation.stages
    borders = tuple(max(a.leaving, b.entering) / 2 for a, b in pairwise(stages))
    return Seconds(
        tuple(cost.forward for cost in stages), tuple(cost.compute - cost.forward for cost in stages),
        borders, borders, tuple(cost.reduce for cost in stages), machine.overlap,
    )  # fmt: skip


def step_seconds(plan: Plan, training: Training, seconds: Seconds) -> float:
    """Of a step with a flush. No link carries two messages at once, which the walk does not know."""
    counts, many = [stage.replicas for stage in plan.stages], training.microbatches
    links = zip(seconds.forward_transfer, seconds.backward_transfer, counts, counts[1:], strict=False)
    busiest = max((-(-many // min(one, two)) * (there + back) for there, back, one, two in links), default=0.0)
    if 2 * many * len(counts) <= MOST_ACTIONS:
        return max(busiest, timing(
            schedule_of(plan, training), forward=seconds.forward, backward=seconds.backward, reduce=seconds.reduce,
            forward_transfer=seconds.forward_transfer, backward_transfer=seconds.backward_transfer, overlap=seconds.overlap,
        ).finish)  # fmt: skip
    depths = pipedream_depths(counts) if training.schedule == "1f1b" else _all_forwards_first(counts, many)
    return max(busiest, drained(counts, depths, many, seconds))


def _all_forwards_first(replicas: Sequence[int], microbatches: int) -> tuple[int, ...]:
    """Depths that no backward reaches before the last forward."""
    depths = [microbatches - 1]
    for count in reversed(replicas):
        depths.insert(0, (depths[0] // count + 1) * count)
    return tuple(depths[:-1])


def schedule_of(plan: Plan, training: Training) -> Schedule:
    """Who runs what when, in one of the plan's pipelines."""
    return replicated(training.schedule, [stage.replicas for stage in plan.stages], training.microbatches)


def _asynchronous(plan: Plan, evaluation: Evaluation, machine: Machine, training: Training, seconds: Seconds) -> Walked:
    replicas = tuple(stage.replicas for stage in plan.stages)
    depths = pipedream_depths(replicas)
    batch = training.microbatches if training.schedule == "pipedream-2bw" else None
    if batch is not None and batch < depths[0]:
        return Walked(math.inf, depths, tuple(cost.memory for cost in evaluation.stages), False)
    ticks, per_round = Ticks(replicas, depths, batch), _bytes_per_round(evaluation, training)
    spare = [
        (room - cost.memory) / own if own else math.inf
        for cost, room, own in zip(evaluation.stages, _device_memory(plan, machine), per_round, strict=True)
    ]  # fmt: skip
    if evaluation.fits:
        rounds = [int(min(room, UNLIMITED)) for room in spare]
        most = [depth + count * more for depth, count, more in zip(depths, replicas, rounds, strict=True)]
        ticks = replace(ticks, depths=least_depths(ticks, seconds, most))
    memory = tuple(cost.memory for cost in evaluation_at(evaluation, ticks).stages)
    return Walked(period(ticks, seconds) / plan.pipelines, ticks.depths, memory, evaluation.fits)


def at_depths(found: Found, ticks: Ticks, machine: Machine) -> Found:
    """A plan at the depths that its ticks will really have: `compile` runs those that the user asked for, perhaps with vertical
    sync, which keeps more versions."""
    walk = period(ticks, seconds_of(found.evaluation, machine))
    return replace(found, evaluation=evaluation_at(found.evaluation, ticks), walked=walk, depths=ticks.depths)


def evaluation_at(evaluation: Evaluation, ticks: Ticks) -> Evaluation:
    """What its stages hold then: weight versions, and saved values of what is in flight."""
    return replace(evaluation, stages=tuple(_cost_at(cost, ticks, stage) for stage, cost in enumerate(evaluation.stages)))


def _cost_at(cost: StageCost, ticks: Ticks, stage: int) -> StageCost:
    flights, versions = ticks.in_flight(stage), ticks.versions(stage)
    saved, weights = cost.saved / cost.in_flight * flights, cost.weights / cost.versions * versions
    return replace(cost, saved=saved, weights=weights, in_flight=flights, versions=versions)


def _bytes_per_round(evaluation: Evaluation, training: Training) -> list[float]:
    """What one more round in flight takes on a device of each stage: saved values, and weights if each round has its own."""
    versions = training.schedule == "pipedream"
    return [cost.saved / cost.in_flight + (cost.weights / cost.versions if versions else 0.0) for cost in evaluation.stages]


def _device_memory(plan: Plan, machine: Machine) -> list[float]:
    """Of the smallest device of each stage; the last stage stands at the machine's end."""
    rooms, end = [], machine.world_size
    for stage in reversed(plan.stages):
        kinds = range(machine.kind_of(end - stage.replicas), machine.kind_of(end - 1) + 1)
        rooms.append(min(machine.devices[kind][0].memory_bytes for kind in kinds))
        end -= stage.replicas
    return rooms[::-1]
