"""The best plan for every number of devices: the exact recurrence, for every schedule, kind of device and level of bandwidth.

    best[i][d] = min over stages from state i to j and replicas r of  combine(best[j][d - r], seconds of that stage)

where d counts the devices from the machine's end, and `combine` is max, or for a flushing step the sum under a cap on every
stage's seconds. Under a cap only some d are worth a look: the layers before state i need devices too, so many that none of them
works for longer than the cap.

              d = 1 .. 8        layers from i on: 20 s of work, layers before: 25 s, cap: 10 s
    best[i]   - x x x x - - -   2 devices at least, and 3 are left to the layers before

Its loops grow with pairs of states x (such d)^2, so large asynchronous problems on equal devices go to `probe.py`, which needs no
axis of devices.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy

from pdcompiler.core.native import native
from pdcompiler.core.plan import Choice
from pdcompiler.core.spans import Integers, Spans
from pdcompiler.core.stage_time import Terms, border_seconds, level_of, reduce_seconds, stage_memory, stage_seconds
from pdcompiler.core.workload import Floats


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


def best_by_devices(
    spans: Spans, terms: Terms, devices: int, degrees: Integers, *, cap: float = numpy.inf, total: bool = False,
    below: float = numpy.inf, recompute: bool = False,
) -> Table:
    """degrees: the numbers of replicas that are tried.   cap: no stage takes longer.   total: add the stages' seconds (and what
    a first microbatch waits for at borders) instead of taking the largest.   below: results that are no less are left out."""
    columns = (spans.parameters, spans.saved, spans.working, spans.entering, spans.leaving)
    meets, which = _places(terms, devices, degrees)
    steps, best, pair, replicas, again = _fill(
        spans.start, spans.end, spans.forward, spans.backward, *columns, spans.before(), terms, devices, degrees, meets, which,
        cap, below, total, recompute,
    )  # fmt: skip
    return Table(steps, best, pair, replicas, again, spans.end)


def _places(terms: Terms, devices: int, degrees: Integers) -> tuple[Integers, Integers]:
    """What a stage meets: kinds (first, last) and levels (own, of the border behind it, of the border before it), each
    combination once; and which of them, by number of the degree and devices behind the stage."""
    kinds = numpy.minimum(numpy.searchsorted(terms.ends, numpy.arange(devices), side="right"), len(terms.ends) - 1)
    found: dict[tuple[int, ...], int] = {}
    which = numpy.zeros((len(degrees), devices + 1), dtype=numpy.int64)
    for number, degree in enumerate(degrees.tolist()):
        for before in range(devices - degree + 1):
            last = before + degree - 1
            levels = (level_of(terms, before, last), level_of(terms, before - 1, before) if before else 0)
            meets = (int(kinds[before]), int(kinds[last]), *levels, level_of(terms, last, last + 1))
            which[number, before] = found.setdefault(meets, len(found))
    return numpy.array(list(found), dtype=numpy.int64), which


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
    which: Integers, cap: float, below: float, total: bool, recompute: bool,
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
    for i in range(states - 2, -1, -1):
        most = devices
        if work_before[i] > 0.0:
            most -= int(numpy.ceil(min(work_before[i] / cap, devices) - 1e-9)) if cap > 0.0 else devices
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
                    if work > cap * degree * (1 + 1e-12):
                        continue
                    seconds[:] = -1.0
                    steps += most - degree + 1 - first[j]
                    for before in range(first[j], most - degree + 1):
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
                        if taken > cap:
                            continue
                        value = so_far + taken + passing[place] if total else max(so_far, taken)
                        if value >= best[i, after] or _at_least(value, work_before[i], devices - after, total) >= below:
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
def _at_least(value: float, work_before: float, devices: int, total: bool) -> float:
    """What a plan takes whose later stages take `value`, if its earlier layers share what devices are left."""
    if work_before <= 0.0:
        return value
    earlier = work_before / devices if devices > 0 else numpy.inf
    return value + earlier if total else max(value, earlier)
