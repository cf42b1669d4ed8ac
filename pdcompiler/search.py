"""The searches, driven: from every possible stage and a machine to the best plan of one class, with a bound.

A class is a number of pipelines, each over its own devices. Asynchronous plans on equal devices: by the fewest devices within a
time (`probe.py`), bisected. All others: by the recurrence over devices (`by_devices.py`); for a flushing step under caps on the
slowest stage, each interval of caps bounded from below, until none can beat the best (PLANNER 4.3). Not here: which classes there
are, and what is told to the user (`planner.py`).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import numpy

from pdcompiler.core.machine import Machine
from pdcompiler.core.plan import Choice, Evaluation, Plan, PlannedStage, Training
from pdcompiler.core.spans import Spans
from pdcompiler.core.stage_time import Terms, terms_of
from pdcompiler.core.workload import Workload
from pdcompiler.passes.partition.by_devices import best_by_devices
from pdcompiler.passes.partition.evaluate import evaluate
from pdcompiler.passes.partition.one_each import OneEach
from pdcompiler.passes.partition.probe import fewest_devices, stages_of

CLOSE = 1e-7
"""Two values this near are equal; a plan within it of the bound is the best."""
MOST_STEPS = 3e9
"""Of the recurrence over devices with all degrees of replication; above it, only some degrees are tried."""
UNLIMITED = 1e30
"""Seconds: a time that every stage keeps."""
MOST_CAPS = 60
FEWEST_CAPS = 1
MOST_SEARCHED = 2e8
"""Steps of the recurrence in all, over all caps, beyond the fewest."""


@dataclass(frozen=True)
class Found:
    """A plan and what it takes. bound: seconds below which there is no plan of the class that was searched.   how: the class,
    and what was not searched, in words.   others: plans nearly as good, best first.   walked: seconds, as `ranking.py` finds
    them.   depths: of an asynchronous plan, which it is walked with."""

    plan: Plan
    evaluation: Evaluation
    bound: float
    how: str
    others: tuple[Found, ...] = ()
    walked: float | None = None
    depths: tuple[int, ...] | None = None

    @property
    def gap(self) -> float:
        """How far the plan may be from the best, relative to the bound."""
        return max(0.0, self.evaluation.seconds / self.bound - 1) if self.bound > 0 else 0.0

    @property
    def proven(self) -> bool:
        """Whether no plan is better."""
        return self.gap <= 2 * CLOSE


class Search:
    """The best plan with a given number of pipelines."""

    def __init__(
        self, workload: Workload, spans: Spans, machine: Machine, training: Training, pipelines: int = 1, straight: bool = False
    ) -> None:
        self.workload, self.spans, self.machine, self.training, self.pipelines = workload, spans, machine, training, pipelines
        self.devices = machine.world_size // pipelines
        self.terms: Terms = terms_of(machine, training, pipelines, self.devices)
        self.equal_devices = len(machine.devices) == 1 and not straight
        self.by_probes = self.equal_devices and not training.flushes
        most = training.of_one(pipelines).most_replicas(1 if straight else self.devices)
        self.degrees, self.all_degrees = numpy.arange(1, most + 1), True
        if not self.by_probes:
            self.degrees, self.all_degrees = degrees_of(spans, self.devices, most)
        self.one_each = OneEach(spans, self.terms, self.devices, recompute=training.recompute) if straight else None
        self.steps = 0
        self.seen: list[Found] = []

    def run(self, beat: float) -> tuple[Found | None, float]:
        """A plan that takes less than `beat`, and a bound of all plans of this class; no plan where none is better."""
        if beat <= 0.0:
            return None, beat
        if self.by_probes:
            return self._bisect(beat)
        if self.equal_devices and self.any_plan() is None:
            return None, beat
        return self._caps(beat) if self.training.flushes else self._recur(beat)

    def any_plan(self) -> Found | None:
        """Some plan that fits the devices' memory, whatever it takes."""
        if self.equal_devices:
            return self._prober()(UNLIMITED)
        return self._solve(numpy.inf, total=False)[1]

    def _found(self, stages: list[Choice]) -> Found:
        planned = tuple(PlannedStage(self.spans.layers(c.pair), c.replicas, c.recompute) for c in stages)
        made = Plan(planned, self.pipelines)
        evaluation = evaluate(made, self.workload, self.machine, self.training)
        self.seen.append(Found(made, evaluation, 0.0, ""))
        return self.seen[-1]

    def _prober(self) -> Callable[[float], Found | None]:
        """A plan in which no stage takes longer than some seconds."""
        stages = stages_of(self.spans, self.terms, recompute=self.training.recompute)
        degrees = None if len(self.degrees) == self.devices else self.degrees

        def probe(seconds: float) -> Found | None:
            found = fewest_devices(stages, self.terms, self.devices, seconds * self.pipelines, degrees=degrees)
            return None if found is None else self._found(found)

        return probe

    def replications(self) -> str:
        """Which are tried, in words."""
        return "any replication" if self.all_degrees else f"replicated {', '.join(map(str, self.degrees))} times"

    def _bisect(self, beat: float) -> tuple[Found | None, float]:
        probe = self._prober()
        low = work_bound(self.workload, self.machine, self.training)
        best = probe(beat * (1 - CLOSE)) if beat < numpy.inf else self._first(probe, low)
        if best is None:
            return None, beat
        high = best.evaluation.seconds
        while high > low * (1 + 2 * CLOSE):
            middle = min((low * high) ** 0.5, high * (1 - CLOSE)) if low else high / 4
            found = probe(middle)
            if found is None:
                low = middle
            else:
                best, high = found, min(found.evaluation.seconds, middle)
        return best, low

    @staticmethod
    def _first(probe: Callable[[float], Found | None], low: float) -> Found | None:
        """Any plan; one not far from the bound where that is easy."""
        for factor in (1.02, 1.1, 1.4, 2.0, 4.0) if low else ():
            if found := probe(low * factor):
                return found
        return probe(UNLIMITED)

    def _solve(self, cap: float, total: bool, below: float = numpy.inf) -> tuple[float, Found | None]:
        """The least sum, or the least of the slowest stage, under a cap; and a plan that has it, None where none is below."""
        if self.one_each:
            value, stages = self.one_each.solve(cap, total=total)
            return (value, self._found(stages)) if value < below else (numpy.inf, None)
        table = best_by_devices(
            self.spans, self.terms, self.devices, self.degrees, cap=cap, total=total, below=below,
            recompute=self.training.recompute,
        )  # fmt: skip
        self.steps += table.steps
        devices = table.devices()
        value = float(table.best[0, devices])
        return value, self._found(table.stages(devices)) if value < numpy.inf else None

    def _slowest(self, limit: float) -> tuple[float, Found | None]:
        """The least that the slowest stage of a plan can take, and such a plan; none where it is not below the limit. Under a cap
        that grows until there is a plan, so that the recurrence looks at few numbers of devices."""
        start = float(self.workload.seconds.min(axis=0).sum()) / self.devices
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
        """Branch and bound over the cap on the slowest stage. In an interval (low, high] of it, a step takes at least
        (microbatches - 1) * low + the least sum under the cap high, and at least microbatches * low."""
        more = self.terms.microbatches - 1
        least, found = self._slowest(beat / self.terms.microbatches)
        if found is None:
            return None, beat
        best: Found | None = None
        value = beat

        def under(cap: float, low: float) -> tuple[float, float]:
            """The least sum under a cap and the slowest stage of a plan that has it; a plan with a stage above `low` that is no
            better than the best counts as none."""
            nonlocal best, value
            least_sum, found = self._solve(cap * (1 + 1e-12), True, value * (1 - CLOSE) - more * low)
            if found is None:
                return numpy.inf, cap
            if found.evaluation.seconds < value * (1 - CLOSE):
                best, value = found, found.evaluation.seconds
            return least_sum, max(cost.seconds for cost in found.evaluation.stages)

        low_sum, _ = under(least, 0.0)
        high_sum, high = under(value / self.terms.microbatches, least)
        open_ = [(more * least + high_sum, least, low_sum, high, high_sum)]
        for tried in range(MOST_CAPS):
            if not open_ or open_[0][0] >= value * (1 - CLOSE):
                return best, value
            if tried >= FEWEST_CAPS and self.steps > MOST_SEARCHED:
                break
            _, low, low_sum, high, high_sum = heapq.heappop(open_)
            if low_sum <= high_sum * (1 + CLOSE) or high <= low * (1 + CLOSE):
                continue  # nothing between is better than the plan at its low end
            middle = (low + high) / 2
            if more and tried % 2 == 0:  # above it, nothing is better than the best
                middle = max(middle, min((value * (1 - CLOSE) - high_sum) / more, high * (1 - CLOSE)))
            middle_sum, slowest = under(middle, low)
            heapq.heappush(open_, (more * low + middle_sum, low, low_sum, slowest, middle_sum))
            heapq.heappush(open_, (more * middle + high_sum, middle, middle_sum, high, high_sum))
        return best, min(value, open_[0][0] if open_ else value)


def degrees_of(spans: Spans, devices: int, most: int) -> tuple[numpy.ndarray, bool]:
    """The replications that the recurrence tries, and whether they are all."""
    if len(spans.end) * devices * most / 2 <= MOST_STEPS:
        return numpy.arange(1, most + 1), True
    few = {n for n in range(1, most + 1) if n <= 8 or devices % n == 0 or n & (n - 1) == 0}
    return numpy.array(sorted(few)), False


def work_bound(workload: Workload, machine: Machine, training: Training) -> float:
    """No plan is faster: all devices compute all the time, each as fast as the fastest kind."""
    work = float(workload.seconds.min(axis=0).sum()) / machine.world_size
    return work * (training.microbatches if training.flushes else 1)
