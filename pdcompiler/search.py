"""The searches, driven: from every possible stage and a machine to the best plan of one class, with a bound.

A class is a number of pipelines, each over its own devices, and the numbers of replicas that a stage may have. Asynchronous plans
on equal devices: by the fewest devices within a time (`probe.py`), bisected. All others: by the recurrence over devices
(`by_devices.py`); for a flushing step under caps (`caps.py`). Not here: which classes there are, and what is told to the user
(`planner.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import numpy

from pdcompiler.bisection import UNLIMITED, fastest
from pdcompiler.caps import Caps
from pdcompiler.core.machine import Machine
from pdcompiler.core.plan import Choice, Plan, PlannedStage, Training
from pdcompiler.core.spans import Spans
from pdcompiler.core.stage_time import Terms, terms_of
from pdcompiler.core.workload import Workload
from pdcompiler.found import CLOSE, Found
from pdcompiler.passes.partition.by_devices import ByDevices, flush_weights
from pdcompiler.passes.partition.evaluate import evaluate
from pdcompiler.passes.partition.one_each import OneEach
from pdcompiler.passes.partition.probe import fewest_devices, stages_of

NEARLY = 0.01
"""Two values this near are, for a plan to begin with."""
MOST_STEPS = 3e8
"""Of the recurrence over devices with all degrees of replication; above it, only some degrees are tried."""
MOST_SEARCHED = 2e8
"""Steps of the recurrence in all; after them, no further cap is tried."""


class Search:
    """The best plan with a given number of pipelines. straight: with one rank a stage, on all devices.   replicas: those that a
    stage may have; None: any."""

    def __init__(
        self, workload: Workload, spans: Spans, machine: Machine, training: Training, pipelines: int = 1, straight: bool = False,
        replicas: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        self.workload, self.spans, self.machine, self.training, self.pipelines = workload, spans, machine, training, pipelines
        self.devices = machine.world_size // pipelines
        self.terms: Terms = terms_of(machine, training, pipelines, self.devices)
        self.equal_devices = len(machine.devices) == 1 and not straight
        self.by_probes = self.equal_devices and not training.flushes
        most = training.of_one(pipelines).most_replicas(1 if straight else self.devices)
        self.degrees, self.all_degrees = numpy.arange(1, most + 1), True
        self.probed = self.degrees
        if replicas is not None:
            self.probed = numpy.array(replicas, dtype=numpy.int64)
            self.degrees, self.all_degrees = self.probed, False
        elif not self.by_probes:
            self.degrees, self.all_degrees = degrees_of(spans, self.devices, most)
        self.one_each = OneEach(spans, self.terms, self.devices, recompute=training.recompute) if straight else None
        self.work = float(workload.seconds.min(axis=0).sum())
        self.steps = 0
        self.seen: list[Found] = []

    def run(self, beat: float) -> tuple[Found | None, float]:
        """A plan that takes less than `beat`, and a bound of all plans of this class; no plan where none is better."""
        if beat <= 0.0:
            return None, beat
        if self.by_probes:
            return self._bisect(beat)
        return self._caps(beat) if self.training.flushes else self._recur(beat)

    @cached_property
    def by_devices(self) -> ByDevices:
        """The recurrence over devices."""
        weights = flush_weights(self.degrees, self.terms.microbatches) if self.training.flushes else None
        return ByDevices(
            self.spans, self.terms, self.devices, self.degrees, recompute=self.training.recompute, weights=weights
        )  # fmt: skip

    def any_plan(self) -> Found | None:
        """Some plan that fits the devices' memory, whatever it takes."""
        if self.equal_devices:
            some = self._prober()(UNLIMITED)
            return some and some[1]
        return self._solve(numpy.inf, total=False)[1]

    def _found(self, stages: list[Choice]) -> Found:
        planned = tuple(PlannedStage(self.spans.layers(c.pair), c.replicas, c.recompute) for c in stages)
        made = Plan(planned, self.pipelines)
        evaluation = evaluate(made, self.workload, self.machine, self.training)
        self.seen.append(Found(made, evaluation, 0.0, ""))
        return self.seen[-1]

    def _prober(self) -> Callable[[float], tuple[float, Found] | None]:
        """A plan in which no stage takes longer than some seconds, and how long its slowest stage does."""
        stages = stages_of(self.spans, self.terms, recompute=self.training.recompute)
        degrees = None if len(self.probed) == self.devices else self.probed

        def probe(seconds: float) -> tuple[float, Found] | None:
            choices = fewest_devices(stages, self.terms, self.devices, seconds * self.pipelines, degrees=degrees)
            if choices is None:
                return None
            found = self._found(choices)
            return max(cost.seconds for cost in found.evaluation.stages) / self.pipelines, found

        return probe

    def replications(self) -> str:
        """Which are tried, in words."""
        return "any replication" if self.all_degrees else f"replicated {', '.join(map(str, self.degrees))} times"

    def _bisect(self, beat: float, close: float = CLOSE) -> tuple[Found | None, float]:
        """The plan with the fastest slowest stage, and a bound of that."""
        best, bound = fastest(self._prober(), self.work / self.machine.world_size, beat, close)
        return best and best[1], bound

    def _solve(self, cap: float, total: bool, below: float = numpy.inf) -> tuple[float, Found | None]:
        """The least sum, or the least of the slowest stage, under a cap; and a plan that has it, None where none is below. Of a
        flushing step: the least sum of what a microbatch takes, or the least time that a stage holds a step up."""
        if self.one_each:
            more = self.terms.microbatches - 1 if self.training.flushes else 1
            value, stages = self.one_each.solve(cap / more if more else numpy.inf, total=total)
            value = value if total or not stages else value * more
            return (value, self._found(stages)) if value < below else (numpy.inf, None)
        table = self.by_devices.solve(cap=cap, total=total, below=below)
        self.steps += table.steps
        devices = table.devices()
        value = float(table.best[0, devices])
        return value, self._found(table.stages(devices)) if value < numpy.inf else None

    def _slowest(self, limit: float) -> tuple[float, Found | None]:
        """The least that the slowest stage of a plan can take, and such a plan; none where it is not below the limit. Under a cap
        that grows until there is a plan, so that the recurrence looks at few numbers of devices."""
        start = self.work / self.devices * (1.0 if self.one_each else self.by_devices.weights.spread)
        cap = 1.1 * start
        while True:
            if self.one_each or not 0 < cap <= 50 * start or cap >= limit:
                cap = limit
            value, found = self._solve(cap, total=False, below=limit)
            if found is not None or cap >= limit:
                return value, found
            cap *= 1.3

    def _recur(self, beat: float) -> tuple[Found | None, float]:
        value, found = self._slowest(beat * self.pipelines * (1 - CLOSE))
        if found is None:
            return None, beat
        _, smaller = self._solve(value * (1 + 1e-12), total=True)  # of plans as fast, one with the least in all its stages
        return smaller or found, value / self.pipelines

    def _caps(self, beat: float) -> tuple[Found | None, float]:
        """See caps.py."""
        found, least = self._first_step(beat)
        if found is None:
            return None, beat
        best = found if found.evaluation.seconds < beat * (1 - CLOSE) else None
        caps = Caps(lambda cap, below: self._solve(cap, True, below), self._held, lambda: self.steps > MOST_SEARCHED)
        return caps.run(best, min(beat, found.evaluation.seconds), least, self.work)

    def _first_step(self, beat: float) -> tuple[Found | None, float]:
        """A plan to begin with, and no more than what the slowest stage of each plan holds a step up. On equal devices, the best
        of those that probes find on their way to the fastest slowest stage."""
        if not self.equal_devices:
            least, found = self._slowest(beat - self.work)
            return found, least
        before = len(self.seen)
        self._bisect(numpy.inf, close=NEARLY)
        best = min(self.seen[before:], key=lambda found: found.evaluation.seconds, default=None)
        if best is None:
            return best, 0.0
        if not self.all_degrees and len(self.probed) > len(self.degrees):
            also = {stage.replicas for found in self.seen[before:] for stage in found.plan.stages}
            self.degrees = numpy.union1d(self.degrees, numpy.array(sorted(also), dtype=numpy.int64))
        if self.by_devices.weights.spread <= 0:  # no cap says how many devices the layers before need: its recurrence is long
            return best, 0.0
        return best, self._slowest(min(beat, best.evaluation.seconds) - self.work)[0]

    def _held(self, found: Found) -> float:
        """How long the stage that holds a step up the longest does: all its microbatches but one."""
        own, pairs = self.training.of_one(self.pipelines), zip(found.plan.stages, found.evaluation.stages, strict=True)
        return max(own.held(stage.replicas, cost.seconds) for stage, cost in pairs)


def degrees_of(spans: Spans, devices: int, most: int) -> tuple[numpy.ndarray, bool]:
    """The replications that the recurrence tries, and whether they are all."""
    if len(spans.end) * devices * most / 2 <= MOST_STEPS:
        return numpy.arange(1, most + 1), True
    few = {n for n in range(1, most + 1) if n <= 8 or devices % n == 0 or n & (n - 1) == 0}
    return numpy.array(sorted(few)), False


def work_bound(workload: Workload, machine: Machine, training: Training) -> float:
    """No plan is faster: all devices compute all the time, each as fast as the fastest kind; in a step with a flush, a microbatch
    passes all layers."""
    work = float(workload.seconds.min(axis=0).sum())
    shared = work / machine.world_size
    return max(shared * training.microbatches, work) if training.flushes else shared
