"""Which plans are walked: the best by the formula, those nearly as good, and plans whose stages keep in step.

    2-3-1          rounds of two, three and one: at times nobody feeds a replica, and the walk takes longer than the formula says
    2-2-2  4-2-2   in step: whole rounds feed whole rounds

The searches know nothing of that, so where their best plan takes longer as walked, the classes in step are searched, too; they
are small. Not here: the walk (`ranking.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

from pdcompiler.core.machine import Machine
from pdcompiler.core.plan import Training
from pdcompiler.core.spans import Spans
from pdcompiler.core.workload import Workload
from pdcompiler.found import Found
from pdcompiler.ranking import EQUAL, best_of
from pdcompiler.search import Search

FEW, NEAR = 30, 1.25
"""How many plans are walked beside the best, and how much longer they may take by the formula."""
MOST_DEVICES = 16
"""Of a pipeline in which all numbers of equal replicas are tried; with more, those that divide them or that the best plan has."""
MULTIPLES, FEW_IN_STEP = (2, 3, 4), 3
"""Of replicas, beside one number of them; and how many plans of each such class are walked beside the best."""


def plans_in_step(
    best: Found, workload: Workload, classes: list[tuple[Spans, str]], machine: Machine, training: Training
) -> list[Found]:
    """Plans whose stages have r replicas each, or r and k r, those that are faster by the formula than the best plan of all is as
    walked; none where that takes what the formula says."""
    found, least = list[Found](), best_of((best, *best.others), machine, training)[1].seconds
    if least <= best.evaluation.seconds * (1 + EQUAL):
        return []
    for spans, _ in classes:
        for pipelines in pipeline_counts(machine, training):
            for replicas in _replicas_in_step(best, machine.world_size // pipelines, training.of_one(pipelines)):
                search = Search(workload, spans, machine, training, pipelines, replicas=replicas)
                own, _ = search.run(least)
                if own is not None:
                    few = (own, *near(own, search.seen)[:FEW_IN_STEP])
                    found += few
                    least = min(least, best_of(few, machine, training)[1].seconds)
    return found


def _replicas_in_step(best: Found, devices: int, training: Training) -> Iterator[tuple[int, ...]]:
    """Of a pipeline of so many devices: first one number for all stages, then two."""
    most = training.most_replicas(devices)
    used = {stage.replicas for stage in best.plan.stages}
    ones = [r for r in range(1, most + 1) if devices <= MOST_DEVICES or devices % r == 0 or r in used]
    yield from ((r,) for r in ones)
    yield from ((r, k * r) for r in ones for k in MULTIPLES if k * r <= most and r < devices)


def near(best: Found, seen: list[Found]) -> tuple[Found, ...]:
    """The best few of the plans that a search saw on its way, apart from the best of all."""
    most = best.evaluation.seconds * NEAR
    few = {found.plan: found for found in seen if found.evaluation.fits and found.evaluation.seconds <= most}
    few.pop(best.plan, None)
    return tuple(sorted(few.values(), key=lambda found: found.evaluation.seconds)[:FEW])


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
