"""The best plan for every number of devices: the exact recurrence, for every schedule, kind of device and level of bandwidth.

    best[i][d] = min over stages from state i to j and replicas r of  combine(best[j][d - r], seconds of that stage)

where d counts the devices from the machine's end, and `combine` is max, or the sum under a cap on every stage. Under a cap only
some d are worth a look: the layers before state i need devices too, so many that none of them works for longer than the cap.

              d = 1 .. 8        layers from i on: 20 s of work, layers before: 25 s, cap: 10 s
    best[i]   - x x x x - - -   2 devices at least, and 3 are left to the layers before

What the cap and the sum mean for each number of replicas is in Weights. The loops grow with pairs of states x (such d)^2, so
large asynchronous problems on equal devices go to `probe.py`, which needs no axis of devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy

from pdcompiler.core.native import native, plain
from pdcompiler.core.plan import Choice
from pdcompiler.core.spans import Integers, Spans
from pdcompiler.core.stage_time import Terms, border_seconds, level_of, reduce_seconds, stage_memory, stage_seconds
from pdcompiler.core.workload import Floats


class Weights(NamedTuple):
    """Factors, by number of the degree. once, held: of a stage's seconds, what is added, and what is capped or maximised.   work:
    of a stage's work, no more than what is capped.   spread: the same, of the share of some work that each of some devices has.
    whole: whether layers add no less than their work."""

    once: Floats
    held: Floats
    work: Floats
    spread: float
    whole: bool


def plain_weights(degrees: Integers) -> Weights:
    """The stages' seconds per microbatch, as they are."""
    ones = numpy.ones(len(degrees))
    return Weights(ones, ones, 1.0 / degrees, 1.0, False)


def flush_weights(degrees: Integers, microbatches: int) -> Weights:
    """Of a flushing step, see evaluate.py: a microbatch passes one replica of each stage, which runs `own` of them."""
    own = numpy.ceil(microbatches / degrees)
    once = microbatches / own
    return Weights(once, (own - 1) * once, own - 1.0, float(((own - 1) * degrees).min()), True)


@dataclass(frozen=True)
class Table:
    """best: (states, devices + 1); the choices behind it, of the same shape.   steps: how many places of stages were tried."""

    steps: int
    best: Floats
    pair: numpy.ndarray
    replicas: numpy.ndarray
    recompute: numpy.ndarray
    end: numpy.ndarray

    def devices(self) -> int:
        """With which number of devices it is best: the fewest among equals."""
        return int(self.best[0].argmin())

    def stages(self, devices: int) -> list[Choice]:
        """Of the best plan with so many devices."""
        state, found = 0, list[Choice]()
        while state < len(self.best) - 1:
            at = (state, devices)
            choice = Choice(int(self.pair[at]), int(self.replicas[at]), bool(self.recompute[at]))
            found.append(choice)
            state, devices = int(self.end[choice.pair]), devices - choice.replicas
        return found


class ByDevices:
    """The recurrence for one class of plans, for any cap. degrees: the numbers of replicas that are tried.   weights: None: plain
    ones."""

    def __init__(
        self, spans: Spans, terms: Terms, devices: int, degrees: Integers, *, recompute: bool = False,
        weights: Weights | None = None,
    ) -> None:  # fmt: skip
        self.spans, self.terms, self.devices, self.degrees, self.recompute = spans, terms, devices, degrees, recompute
        self.weights = weights or plain_weights(degrees)
        self.meets, self.which = _places(terms, devices, degrees)

    def solve(self, *, cap: float = numpy.inf, total: bool = False, below: float = numpy.inf) -> Table:
        """cap: no stage takes longer.   total: add the stages' seconds (and what a first microbatch waits for at borders) instead
        of taking the largest.   below: results that are no less are left out."""
        own = self.spans
        columns = (own.parameters, own.saved, own.working, own.entering, own.leaving, own.before)
        steps, best, pair, replicas, again = _fill(
            own.start, own.end, own.forward, own.backward, *columns, self.terms, self.devices, self.degrees, self.meets,
            self.which, self.weights, cap, below, total, self.recompute,
        )  # fmt: skip
        return Table(steps, best, pair, replicas, again, own.end)


def _places(terms: Terms, devices: int, degrees: Integers) -> tuple[Integers, Integers]:
    """What a stage meets: kinds (first, last) and levels (own, of the border behind it, of the border before it), each
    combination once; and which of them, by number of the degree and devices behind the stage."""
    before, degree = numpy.arange(devices + 1)[None, :], degrees[:, None]
    last = numpy.minimum(before + degree, devices) - 1  # behind the machine's last device nothing is looked up
    kind = [numpy.searchsorted(terms.ends, place, side="right").clip(max=len(terms.ends) - 1) for place in (before, last)]
    levels = plain(level_of)
    behind = numpy.where(before > 0, levels(terms, before - 1, before), 0)
    columns = numpy.broadcast_arrays(kind[0], kind[1], levels(terms, before, last), behind, levels(terms, last, last + 1))
    meets, which = numpy.unique(numpy.stack(columns, axis=-1).reshape(-1, 5), axis=0, return_inverse=True)
    return meets.astype(numpy.int64), which.reshape(len(degrees), devices + 1).astype(numpy.int64)


@native
def _seconds(
    terms: Terms, forward: Floats, backward: Floats, variant: int, parameters: float, entering: float, leaving: float,
    meets: Integers, replicas: int,
) -> float:  # fmt: skip
    """Of a stage that meets these kinds and levels. forward, backward: by kind, counted from the machine's first device."""
    compute = 0.0
    for kind in range(meets[0], meets[1] + 1):
        row = len(forward) - 1 - kind
        compute = max(compute, forward[row] * (1 + variant) + backward[row])
    enter, leave = border_seconds(terms, entering, meets[4]), border_seconds(terms, leaving, meets[3])
    return stage_seconds(terms, compute, enter, leave, reduce_seconds(terms, parameters, replicas, meets[2]), replicas)


@native
def _fill(
    start: Integers, end: Integers, forward: Floats, backward: Floats, parameters: Floats, saved: Floats, working: Floats,
    entering: Floats, leaving: Floats, work_before: Floats, terms: Terms, devices: int, degrees: Integers, meets: Integers,
    which: Integers, weights: Weights, cap: float, below: float, total: bool, recompute: bool,
) -> tuple[int, Floats, Integers, Integers, numpy.ndarray]:  # fmt: skip
    states, steps = len(start) - 1, 0
    best = numpy.full((states, devices + 1), numpy.inf)
    chosen = numpy.full((states, devices + 1), -1, dtype=numpy.int64)
    replicas = numpy.zeros((states, devices + 1), dtype=numpy.int64)
    again = numpy.zeros((states, devices + 1), dtype=numpy.bool_)
    best[states - 1, 0] = 0.0
    first = numpy.full(states, devices + 1)  # the fewest devices with which a state has a plan
    first[states - 1] = 0
    seconds, passing = numpy.zeros(len(meets)), numpy.zeros(len(meets))
    stride = degrees[0] if len(degrees) == 1 else 1
    for i in range(states - 2, -1, -1):
        most = devices
        if work_before[i] > 0.0:
            needed = work_before[i] * weights.spread
            most -= int(numpy.ceil(min(needed / cap, devices) - 1e-9)) if cap > 0.0 else devices * int(needed > 0.0)
        for p in range(start[i], start[i + 1]):
            j = end[p]
            for variant in range(2 if recompute else 1):
                kept = entering[p] if variant else saved[p]
                extra = working[p] + entering[p] + leaving[p] + (saved[p] if variant else 0.0)
                work = (forward[:, p] * (1 + variant) + backward[:, p]).min()
                for number in range(len(degrees)):
                    degree = degrees[number]
                    if first[j] + degree > most:
                        break
                    if work * weights.work[number] > cap * (1 + 1e-12):
                        continue
                    last = _last_place(terms, parameters[p], kept, extra, degree, first[j], most - degree)
                    if last < first[j]:
                        continue
                    once, held = weights.once[number], weights.held[number]
                    seconds[:] = -1.0
                    steps += (last + 1 - first[j]) // stride
                    for before in range(first[j], last + 1, stride):
                        so_far, after = best[j, before], before + degree
                        if so_far >= best[i, after]:
                            continue
                        place = which[number, before]
                        taken = seconds[place]
                        if taken < 0.0:
                            row = meets[place]
                            taken = _seconds(
                                terms, forward[:, p], backward[:, p], variant, parameters[p], entering[p], leaving[p], row, degree
                            )
                            seconds[place] = taken
                            passing[place] = border_seconds(terms, entering[p], row[4]) if terms.overlap else 0.0
                        if held * taken > cap:
                            continue
                        value = so_far + once * taken + passing[place] if total else max(so_far, held * taken)
                        if value >= best[i, after] or _at_least(value, work_before[i], devices - after, total, weights) >= below:
                            continue
                        memory = numpy.inf
                        for kind in range(meets[place, 0], meets[place, 1] + 1):
                            memory = min(memory, terms.memory[kind])
                        if stage_memory(terms, parameters[p], kept, extra, degree, before) > memory:
                            continue
                        best[i, after] = value
                        chosen[i, after] = p
                        replicas[i, after] = degree
                        again[i, after] = variant == 1
                        first[i] = min(first[i], after)
    return steps, best, chosen, replicas, again


@native
def _last_place(terms: Terms, parameters: float, saved: float, working: float, replicas: int, low: int, high: int) -> int:
    """The most devices, low to high, that a stage may have behind it, or low - 1: the more, the more microbatches it holds, and
    the largest memory must be enough."""
    memory = terms.memory.max()
    if stage_memory(terms, parameters, saved, working, replicas, high) <= memory:
        return high
    low -= 1
    while high > low + 1:
        middle = (low + high + 1) // 2
        if stage_memory(terms, parameters, saved, working, replicas, middle) <= memory:
            low = middle
        else:
            high = middle
    return low


@native
def _at_least(value: float, work_before: float, devices: int, total: bool, weights: Weights) -> float:
    """What a plan takes whose later stages take `value`, if its earlier layers share what devices are left."""
    if work_before <= 0.0:
        return value
    if devices <= 0:
        return numpy.inf
    if not total:
        return max(value, work_before * weights.spread / devices)
    return value + (work_before if weights.whole else work_before / devices)
