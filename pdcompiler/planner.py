"""The planner on one page: from layers with costs and a machine to the best plan, with a bound that says how good it is.

    Workload --spans--> every possible stage --search--> Plan --evaluate--> what it takes, and a bound that no plan beats

Every number of pipelines that fits the machine's levels is searched. Asynchronous plans on equal devices: by the fewest devices
within a time (`probe.py`), bisected. All others: by the recurrence over devices (`by_devices.py`); for a flushing step under caps
on the slowest stage, each interval of caps bounded from below, until none can beat the best (PLANNER 4.3).

One device and pure data parallelism are plans with one stage, so they are always among the candidates.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy

from pdcompiler.core.errors import CompileError
from pdcompiler.core.explanation import Border, Explanation
from pdcompiler.core.machine import Machine
from pdcompiler.core.plan import Choice, Evaluation, Plan, PlannedStage, Training
from pdcompiler.core.spans import Spans
from pdcompiler.core.stage_time import Terms, terms_of
from pdcompiler.core.workload import Workload
from pdcompiler.passes.partition.by_devices import Table, best_by_devices
from pdcompiler.passes.partition.evaluate import evaluate
from pdcompiler.passes.partition.probe import fewest_devices
from pdcompiler.passes.partition.spans import chain_spans

CLOSE = 1e-9
"""Two values this near are equal; a plan within it of the bound is the best."""
MOST_STEPS = 3e9
"""Of the recurrence over devices with all degrees of replication; above it, only some degrees are tried."""
MOST_CAPS = 60


@dataclass(frozen=True)
class Found:
    """A plan and what it takes. bound: seconds below which there is no plan of the class that was searched.   how: the class,
    and what was not searched, in words."""

    plan: Plan
    evaluation: Evaluation
    bound: float
    how: str

    @property
    def gap(self) -> float:
        """How far the plan may be from the best, relative to the bound."""
        return max(0.0, self.evaluation.seconds / self.bound - 1) if self.bound > 0 else 0.0

    @property
    def proven(self) -> bool:
        """Whether no plan is better."""
        return self.gap <= 2 * CLOSE


def plan(workload: Workload, machine: Machine, training: Training) -> Found:
    """The best plan on at most the machine's devices.

    Raises CompileError where none fits the devices' memory, naming the stage that comes nearest and what to change.
    """
    spans, exact = chain_spans(workload), True
    best: Found | None = None
    bounds = []
    for pipelines in pipeline_counts(machine, training):
        search = Search(workload, spans, machine, training, pipelines)
        found, bound = search.run(best.evaluation.seconds if best else numpy.inf)
        bounds.append(bound)
        best = found or best
    if best is None:
        raise too_little_memory(workload, machine, training)
    return replace(best, bound=min([*bounds, best.evaluation.seconds]) if exact else work_bound(workload, machine, training))


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
    found, bound = Search(workload, chain_spans(workload), machine, training, straight=True).run(numpy.inf)
    if found is None:
        raise too_little_memory(workload, machine, training)
    return replace(found, bound=min(bound, found.evaluation.seconds), how="all cuts in the model's own order, one rank a stage")


def pipeline_counts(machine: Machine, training: Training) -> Iterator[int]:
    """How often the whole pipeline may be replicated: its devices fill whole units of each level, or a part of one evenly.
    With one level, replicated stages say the same more finely."""
    size, units = machine.world_size, machine.unit_sizes[:-1]
    for pipelines in range(1, size + 1):
        own = size // pipelines
        aligned = all(own % unit == 0 or unit % own == 0 for unit in units)
        enough = training.schedule == "pipedream" or training.microbatches >= pipelines
        if pipelines == 1 or (units and size % pipelines == 0 and aligned and enough):
            yield pipelines


class Search:
    """The best plan with a given number of pipelines."""

    def __init__(
        self, workload: Workload, spans: Spans, machine: Machine, training: Training, pipelines: int = 1, straight: bool = False
    ) -> None:
        self.workload, self.spans, self.machine, self.training, self.pipelines = workload, spans, machine, training, pipelines
        self.devices = machine.world_size // pipelines
        self.exactly = self.devices if straight else None
        self.terms: Terms = terms_of(machine, training, pipelines, self.devices)
        self.degrees, self.all_degrees = (numpy.array([1]), True) if straight else degrees_of(spans, self.devices)

    def run(self, beat: float) -> tuple[Found | None, float]:
        """A plan that takes less than `beat`, and a bound of all plans of this class; no plan where none is better."""
        if self.training.schedule == "pipedream" and len(self.machine.devices) == 1 and self.exactly is None:
            return self._bisect(beat)
        if not self.training.flushes:
            return self._recur(beat)
        return self._caps(beat)

    def _found(self, stages: list[Choice]) -> Found:
        planned = tuple(PlannedStage(self.spans.layers(c.pair), c.replicas, c.recompute) for c in stages)
        made = Plan(planned, self.pipelines)
        evaluation = evaluate(made, self.workload, self.machine, self.training)
        how = "all replications" if self.all_degrees else f"replications {', '.join(map(str, self.degrees))}"
        return Found(made, evaluation, 0.0, how)

    def _probe(self, seconds: float) -> Found | None:
        recompute = self.training.recompute
        stages = fewest_devices(self.spans, self.terms, self.devices, seconds * self.pipelines, recompute=recompute)
        return None if stages is None else self._found(stages)

    def _bisect(self, beat: float) -> tuple[Found | None, float]:
        low = work_bound(self.workload, self.machine, self.training)
        best = self._probe(beat * (1 - CLOSE) if beat < numpy.inf else 1e30)
        if best is None:
            return None, beat
        high = best.evaluation.seconds
        low = min(low, high)
        while high > low * (1 + 2 * CLOSE):
            middle = min((low * high) ** 0.5, high * (1 - CLOSE))
            found = self._probe(middle)
            if found is None:
                low = middle
            else:
                best, high = found, min(found.evaluation.seconds, middle)
        return best, low

    def _table(self, cap: float, total: bool) -> Table:
        recompute = self.training.recompute
        return best_by_devices(self.spans, self.terms, self.devices, self.degrees, cap=cap, total=total, recompute=recompute)

    def _solve(self, cap: float, total: bool) -> tuple[float, Found | None]:
        """The least sum, or the least of the slowest stage, under a cap; and a plan that has it."""
        table = self._table(cap, total)
        devices = table.devices(self.exactly)
        value = float(table.best[0, devices])
        return value, self._found(table.stages(devices)) if value < numpy.inf else None

    def _recur(self, beat: float) -> tuple[Found | None, float]:
        value, found = self._solve(numpy.inf, total=False)
        return (found if value / self.pipelines < beat * (1 - CLOSE) else None), value / self.pipelines

    def _caps(self, beat: float) -> tuple[Found | None, float]:
        """Branch and bound over the cap on the slowest stage. In an interval (low, high] of it, a step takes at least
        (microbatches - 1) * low + the least sum under the cap high."""
        more = self.terms.microbatches - 1
        least, found = self._solve(numpy.inf, total=False)
        if found is None:
            return None, numpy.inf
        best: Found | None = None
        value = beat

        def under(cap: float) -> tuple[float, float]:
            nonlocal best, value
            least_sum, found = self._solve(cap * (1 + 1e-12), total=True)
            assert found is not None  # the plan with the least cap is under every other
            if found.evaluation.seconds < value * (1 - CLOSE):
                best, value = found, found.evaluation.seconds
            return least_sum, max(cost.seconds for cost in found.evaluation.stages)

        low_sum, _ = under(least)
        high_sum, high = under(numpy.inf)
        open_, closed = [(more * least + high_sum, least, low_sum, high, high_sum)], [value]
        for _ in range(MOST_CAPS):
            if not open_ or open_[0][0] >= value * (1 - CLOSE):
                break
            _, low, low_sum, high, high_sum = heapq.heappop(open_)
            if low_sum <= high_sum * (1 + CLOSE) or high <= low * (1 + CLOSE):
                continue  # nothing between is better than the plan at its low end
            middle_sum, middle = under((low + high) / 2)
            heapq.heappush(open_, (more * low + middle_sum, low, low_sum, middle, middle_sum))
            heapq.heappush(open_, (more * (low + high) / 2 + high_sum, (low + high) / 2, middle_sum, high, high_sum))
        closed += [bound for bound, *_ in open_[:1]]
        return best, min(closed)


def degrees_of(spans: Spans, devices: int) -> tuple[numpy.ndarray, bool]:
    """The replications that the recurrence tries, and whether they are all."""
    pairs = len(spans.end)
    if pairs * devices * devices / 2 <= MOST_STEPS:
        return numpy.arange(1, devices + 1), True
    few = {n for n in range(1, devices + 1) if n <= 8 or devices % n == 0 or n & (n - 1) == 0}
    return numpy.array(sorted(few)), False


def work_bound(workload: Workload, machine: Machine, training: Training) -> float:
    """No plan is faster: all devices compute all the time, each as fast as the fastest kind."""
    work = float(workload.seconds.min(axis=0).sum()) / machine.world_size
    return work * (training.microbatches if training.flushes else 1)


def judge(chosen: Plan, workload: Workload, machine: Machine, training: Training) -> Found:
    """What the user's own plan of one rank a stage takes, beside the best such plan."""
    evaluation = evaluate(chosen, workload, machine, training)
    _, bound = Search(workload, chain_spans(workload), machine, training, straight=True).run(numpy.inf)
    return Found(chosen, evaluation, min(bound, evaluation.seconds), "all cuts in the model's own order, one rank a stage")


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


def too_little_memory(workload: Workload, machine: Machine, training: Training) -> CompileError:
    """What would fit, by how much."""
    return CompileError("no plan fits the devices' memory")

