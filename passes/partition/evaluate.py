"""What a plan takes, from the definitions. It judges every plan, the user's own too, and trusts no search.

    compute    sum of the layers' forward and backward on the slowest device of the stage (with recompute: and the forward again)
    entering   bytes of the values made before the stage and read in it, there and back, by the slowest link that the border meets
    leaving    bytes of the values made in it and read after it, the same
    reduce     factor * (r-1)/r * parameters / bandwidth of the stage's devices, and the same once more over whole pipelines
    seconds    devices that compute while messages travel: max(compute * share + reduce / n, entering * share, leaving * share)
               others:                                     (compute + entering + leaving) * share + reduce / n

`share` is the part of the microbatches that the busiest replica runs; n, between two reductions, is the number of
microbatches of a step, or with `pipedream` the stage's replicas. A step takes

    gpipe, 1f1b                max over stages of (own microbatches - 1) * once
                               + sum over stages of once (+ entering, where the stage's own time hides it)
    pipedream, pipedream-2bw   max over stages of seconds, per microbatch

where `own` are those of a stage's busiest replica, and once = seconds / share is what each of them takes there: replicas share
out microbatches, but each microbatch passes one of them. Without replicas that is (microbatches - 1) * slowest + sum. With
several pipelines, each has its part of the microbatches. A value is charged once to each stage that it touches.
"""

from __future__ import annotations

from collections.abc import Iterator

from pdcompiler.core.errors import CompileError
from pdcompiler.core.machine import Level, Machine
from pdcompiler.core.plan import Evaluation, Plan, StageCost, Training
from pdcompiler.core.workload import Workload


def evaluate(plan: Plan, workload: Workload, machine: Machine, training: Training) -> Evaluation:
    """Raises CompileError where the plan is none for this workload and machine."""
    check_plan(plan, workload, machine)
    own = training.of_one(plan.pipelines)
    devices, borders = list(_ranges(plan)), _border_bytes(plan, workload)
    stages = tuple(_stage(plan, i, devices[i], borders[i], workload, machine, own) for i in range(len(plan.stages)))
    fits = all(cost.memory <= _memory(machine, *devices[i]) for i, cost in enumerate(stages))
    if not training.flushes:
        return Evaluation(max(cost.seconds for cost in stages) / plan.pipelines, stages, fits)
    held, passing = 0.0, 0.0
    for stage, cost in zip(plan.stages, stages, strict=True):
        held = max(held, own.held(stage.replicas, cost.seconds))
        passing += own.once(stage.replicas, cost.seconds) + (cost.entering if machine.overlap else 0.0)
    return Evaluation(held + passing, stages, fits)


def check_plan(plan: Plan, workload: Workload, machine: Machine) -> None:
    """Every layer on one stage, groups whole, no value against the order, and as many devices as there are."""
    where = {layer: index for index, stage in enumerate(plan.stages) for layer in stage.layers}
    counted = sum(len(stage.layers) for stage in plan.stages)
    missing = [name for layer, name in enumerate(workload.names) if layer not in where]
    if missing or counted != workload.layers:
        what = f"leaves out layer {missing[0]!r}" if missing else "holds a layer twice"
        raise CompileError(f"the plan {what} ({counted} of {workload.layers} layers)")
    for producer, consumer in workload.edges():
        if where[producer] > where[consumer]:
            names = f"{workload.names[consumer]!r} (stage {where[consumer]}) reads {workload.names[producer]!r}"
            raise CompileError(f"the plan is not in order: {names} of the later stage {where[producer]}")
    for group in workload.together:
        if len({where[layer] for layer in group}) > 1:
            raise CompileError(f"the plan parts layers that must stand together: {[workload.names[i] for i in group][:4]}")
    if any(stage.replicas < 1 for stage in plan.stages) or plan.pipelines < 1:
        raise CompileError(f"the plan {plan} has a stage without replicas")
    if plan.devices > machine.world_size:
        raise CompileError(f"the plan {plan} needs {plan.devices} devices, the machine has {machine.world_size}")


def _stage(
    plan: Plan, index: int, devices: tuple[int, int], borders: tuple[float, float], workload: Workload, machine: Machine,
    training: Training,
) -> StageCost:  # fmt: skip
    stage, layers = plan.stages[index], list(plan.stages[index].layers)
    first, last = devices
    kinds = _kinds(machine, first, last)
    replicas, downstream = stage.replicas, first
    forward = max(float(workload.forward[kind, layers].sum()) for kind in kinds)
    compute = max(float(workload.seconds[kind, layers].sum()) for kind in kinds) + (forward if stage.recompute else 0.0)
    entering_bytes, leaving_bytes = borders
    entering = _transfer(entering_bytes, machine, last) if entering_bytes else 0.0
    leaving = _transfer(leaving_bytes, machine, first - 1) if leaving_bytes else 0.0
    parameters, saved = float(workload.parameters[layers].sum()), float(workload.saved[layers].sum())
    reduce = _reduce(replicas, parameters, _level(machine, first, last), training)
    reduce += _reduce(plan.pipelines, parameters, _level(machine, 0, _last_device(plan, machine)), training)
    share = training.share(replicas)
    shared = reduce / (replicas if training.schedule == "pipedream" else training.microbatches)
    if machine.overlap:
        seconds = max(compute * share + shared, entering * share, leaving * share)
    else:
        seconds = (compute + entering + leaving) * share + shared
    flights, versions = training.in_flight(replicas, downstream), training.versions(replicas, downstream)
    working = float(workload.working[layers].max()) + entering_bytes + leaving_bytes
    if stage.recompute:
        saved, working = entering_bytes, working + saved
    optimizer, gradients = parameters * training.optimizer_bytes, parameters * training.gradient_bytes
    return StageCost(
        compute, entering, leaving, reduce, seconds,
        parameters * versions, gradients, optimizer, saved * flights, working, flights, versions, forward,
    )  # fmt: skip


def _ranges(plan: Plan) -> Iterator[tuple[int, int]]:
    """First and last device of each stage in the last pipeline, counted from the machine's end."""
    first = sum(stage.replicas for stage in plan.stages)
    for stage in plan.stages:
        first -= stage.replicas
        yield first, first + stage.replicas - 1


def _last_device(plan: Plan, machine: Machine) -> int:
    """Of all pipelines, counted from the machine's end: each stands at the end of its part of the machine."""
    apart = machine.world_size // plan.pipelines
    return (plan.pipelines - 1) * apart + plan.devices // plan.pipelines - 1


def _border_bytes(plan: Plan, workload: Workload) -> list[tuple[float, float]]:
    """What enters and leaves each stage."""
    where = {layer: index for index, stage in enumerate(plan.stages) for layer in stage.layers}
    entering, leaving = [0.0] * len(plan.stages), [0.0] * len(plan.stages)
    for value in workload.values:
        made, read = where[value.producer], {where[reader] for reader in value.consumers}
        for stage in read - {made}:
            entering[stage] += value.bytes
        if read - {made}:
            leaving[made] += value.bytes
    return list(zip(entering, leaving, strict=True))


def _transfer(nbytes: float, machine: Machine, border: int) -> float:
    """There and back, the value and its gradient, between the devices `border` and `border + 1`."""
    level = _level(machine, border, border + 1)
    return 2 * (nbytes / level.bytes_per_second + level.latency_seconds)


def _reduce(replicas: int, parameters: float, level: Level, training: Training) -> float:
    moved = training.reduce_factor * (replicas - 1) / replicas * parameters
    return moved / level.bytes_per_second + 2 * (replicas - 1) * level.latency_seconds if parameters else 0.0


def _level(machine: Machine, first: int, last: int) -> Level:
    """The innermost level of which one unit holds both devices, counted from the machine's end."""
    end = machine.world_size - 1
    return machine.levels[machine.level_of(end - last, end - first)]


def _kinds(machine: Machine, first: int, last: int) -> range:
    """The kinds of device in a range, counted from the machine's end."""
    end = machine.world_size - 1
    return range(machine.kind_of(end - last), machine.kind_of(end - first) + 1)


def _memory(machine: Machine, first: int, last: int) -> float:
    return min(machine.devices[kind][0].memory_bytes for kind in _kinds(machine, first, last))
