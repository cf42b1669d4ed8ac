"""The best plan for every number of devices: the exact recurrence, for every schedule, kind of device and level of bandwidth.

    best[i][d] = min over stages from state i to j and replicas r of  combine(best[j][d - r], seconds of that stage)

where d counts the devices from the machine's end, and `combine` is max, or for a flushing step the sum under a cap on every
stage's seconds. Its loops grow with pairs of states x devices x degrees of replication, so large asynchronous problems on equal
devices go to `probe.py`, which needs no axis of devices.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy

from pdcompiler.core.native import native
from pdcompiler.core.plan import Choice
from pdcompiler.core.spans import Spans
from pdcompiler.core.stage_time import Terms, border_seconds, level_of, reduce_seconds, stage_memory, stage_seconds
from pdcompiler.core.workload import Floats


@dataclass(frozen=True)
class Table:
    """best: (states, devices + 1); the choices behind it, of the same shape."""

    best: Floats
    pair: numpy.ndarray
    replicas: numpy.ndarray
    recompute: numpy.ndarray
    end: numpy.ndarray

    def devices(self, exactly: int | None = None) -> int:
        """With which number of devices it is best: the fewest among equals."""
        return int(self.best[0].argmin()) if exactly is None else exactly

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
    spans: Spans, terms: Terms, devices: int, degrees: numpy.ndarray, *, cap: float = numpy.inf, total: bool = False,
    recompute: bool = False,
) -> Table:
    """degrees: the numbers of replicas that are tried.   cap: no stage takes longer.   total: add the stages' seconds (and what
    a first microbatch waits for at borders) instead of taking the largest."""  # fmt: skip
    columns = (spans.parameters, spans.saved, spans.working, spans.entering, spans.leaving)
    best, pair, replicas, again = _fill(
        spans.start, spans.end, spans.forward, spans.backward, *columns, terms, devices, degrees, cap, total, recompute
    )
    return Table(best, pair, replicas, again, spans.end)


@native
def _kind_range(ends: numpy.ndarray, first: int, last: int) -> tuple[int, int]:
    """The kinds of the devices from first to last, counted from the machine's end."""
    low = high = 0
    while low < len(ends) - 1 and first >= ends[low]:
        low += 1
    high = low
    while high < len(ends) - 1 and last >= ends[high]:
        high += 1
    return low, high


@native
def _fill(
    start: numpy.ndarray, end: numpy.ndarray, forward: Floats, backward: Floats, parameters: Floats, saved: Floats,
    working: Floats, entering: Floats, leaving: Floats, terms: Terms, devices: int, degrees: numpy.ndarray, cap: float,
    total: bool, recompute: bool,
) -> tuple[Floats, numpy.ndarray, numpy.ndarray, numpy.ndarray]:  # fmt: skip
    states = len(start) - 1
    best = numpy.full((states, devices + 1), numpy.inf)
    chosen = numpy.full((states, devices + 1), -1, dtype=numpy.int64)
    replicas = numpy.zeros((states, devices + 1), dtype=numpy.int64)
    again = numpy.zeros((states, devices + 1), dtype=numpy.bool_)
    best[states - 1, 0] = 0.0
    levels, kinds = len(terms.units), forward.shape[0]
    for i in range(states - 2, -1, -1):
        for p in range(start[i], start[i + 1]):
            j = end[p]
            for variant in range(2 if recompute else 1):
                for degree in degrees:
                    seconds = numpy.full((kinds, kinds, levels, levels, levels), -1.0)
                    for before in range(devices - degree + 1):
                        if best[j, before] == numpy.inf:
                            continue
                        after = before + degree
                        low, high = _kind_range(terms.ends, before, after - 1)
                        own = level_of(terms, before, after - 1)
                        inner = level_of(terms, before - 1, before) if before > 0 else 0
                        outer = level_of(terms, after - 1, after)
                        taken = seconds[low, high, own, inner, outer]
                        enter = border_seconds(terms, entering[p], outer)
                        if taken < 0.0:
                            compute = 0.0
                            for kind in range(low, high + 1):
                                row = kinds - 1 - kind
                                work = forward[row, p] * (1 + variant) + backward[row, p]
                                compute = max(compute, work)
                            reduce = reduce_seconds(terms, parameters[p], degree, own)
                            leave = border_seconds(terms, leaving[p], inner)
                            taken = stage_seconds(terms, compute, enter, leave, reduce, degree)
                            seconds[low, high, own, inner, outer] = taken
                        if taken > cap:
                            continue
                        value = max(best[j, before], taken)
                        if total:
                            value = best[j, before] + taken + (enter if terms.overlap else 0.0)
                        if value >= best[i, after]:
                            continue
                        kept = entering[p] if variant else saved[p]
                        extra = working[p] + entering[p] + leaving[p] + (saved[p] if variant else 0.0)
                        memory = terms.memory[low]
                        for kind in range(low, high + 1):
                            memory = min(memory, terms.memory[kind])
                        if stage_memory(terms, parameters[p], kept, extra, degree, before) > memory:
                            continue
                        best[i, after] = value
                        chosen[i, after] = p
                        replicas[i, after] = degree
                        again[i, after] = variant == 1
    return best, chosen, replicas, again
