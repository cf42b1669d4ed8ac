"""The best plan by trying all of them: the planner's oracle. It knows evaluate() and nothing of any search."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from math import inf

from pdcompiler.core.machine import Machine
from pdcompiler.core.plan import Plan, PlannedStage, Training
from pdcompiler.core.workload import Workload
from pdcompiler.passes.partition.evaluate import evaluate
from pdcompiler.planner import pipeline_counts


def best_by_force(workload: Workload, machine: Machine, training: Training) -> tuple[float, Plan | None]:
    """The least seconds of all plans whose memory is there; infinite where there is none."""
    best: tuple[float, Plan | None] = (inf, None)
    for plan in all_plans(workload, machine, training):
        found = evaluate(plan, workload, machine, training)
        if found.fits and found.seconds < best[0]:
            best = (found.seconds, plan)
    return best


def all_plans(workload: Workload, machine: Machine, training: Training) -> Iterator[Plan]:
    """Every plan of the class: stages in order, replicas, pipelines, recompute where allowed."""
    variants = (False, True) if training.recompute else (False,)
    for pipelines in pipeline_counts(machine, training):
        devices = machine.world_size // pipelines
        for stages in cuts(workload, devices):
            most = training.of_one(pipelines).most_replicas(devices - len(stages) + 1)
            choices = itertools.product(range(1, most + 1), repeat=len(stages))
            for replicas in choices:
                if sum(replicas) > devices:
                    continue
                for recompute in itertools.product(variants, repeat=len(stages)):
                    planned = zip(stages, replicas, recompute, strict=True)
                    yield Plan(tuple(PlannedStage(*stage) for stage in planned), pipelines)


def cuts(workload: Workload, most: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Every way to lay the layers on at most `most` stages so that no value goes back."""
    edges, groups = workload.edges(), workload.together
    for count in range(1, min(most, workload.layers) + 1):
        for where in itertools.product(range(count), repeat=workload.layers):
            if len(set(where)) < count or any(where[a] > where[b] for a, b in edges):
                continue
            if all(len({where[i] for i in group}) == 1 for group in groups):
                yield tuple(tuple(i for i, stage in enumerate(where) if stage == s) for s in range(count))
