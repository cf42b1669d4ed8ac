"""The fewest devices with which no stage takes longer than a given time: asynchronous plans, equal devices, levels of bandwidth.

    fewest[i][m] = the smallest o such that the layers from state i on run on o devices, and o = m modulo one unit

Given the time, every constraint on the stages before is easier with fewer devices behind them: weight versions and the devices
that are left. What a stage meets of the levels of bandwidth depends on where it begins within one unit of the last level but
the outermost, so the smallest o is kept for each such place; with one level there is one. Devices are counted from the
machine's end. Bisecting on the time, with the last probe just below the plan found, gives the best plan and its proof.

Not here: flushing schedules and several kinds of device (`by_devices.py`).
"""

from __future__ import annotations

import numpy

from pdcompiler.core.native import native
from pdcompiler.core.plan import Choice
from pdcompiler.core.spans import Spans
from pdcompiler.core.stage_time import Terms, border_seconds, level_of, reduce_seconds, stage_memory, stage_seconds
from pdcompiler.core.workload import Floats

NONE = 1 << 40


def fewest_devices(spans: Spans, terms: Terms, devices: int, seconds: float, *, recompute: bool = False) -> list[Choice] | None:
    """A plan of at most `devices` devices in which no stage takes longer than `seconds`, or None where there is none."""
    per_unit = int(terms.units[-2]) if len(terms.units) > 1 else 1
    columns = (spans.parameters, spans.saved, spans.working, spans.entering, spans.leaving)
    fewest, pair, came, replicas, again = _fill(
        spans.start, spans.end, spans.forward[0], spans.backward[0], *columns, terms, devices, per_unit, seconds, recompute
    )
    place = int(fewest[0].argmin())
    if fewest[0, place] - (-terms.size) % per_unit > devices:
        return None
    state, found = 0, []
    while state < spans.states - 1:
        at = (state, place)
        found.append(Choice(int(pair[at]), int(replicas[at]), bool(again[at])))
        state, place = int(spans.end[pair[at]]), int(came[at])
    return found


@native
def _seconds(terms: Terms, work: float, parameters: float, entering: float, leaving: float, first: int, replicas: int) -> float:
    """Of a stage on the devices first .. first + replicas - 1."""
    reduce = reduce_seconds(terms, parameters, replicas, level_of(terms, first, first + replicas - 1))
    enter = border_seconds(terms, entering, level_of(terms, first + replicas - 1, first + replicas))
    leave = border_seconds(terms, leaving, level_of(terms, first - 1, first))
    return stage_seconds(terms, work, enter, leave, reduce, replicas)


@native
def _root(terms: Terms, work: float, parameters: float, entering: float, leaving: float, limit: float) -> float:
    """From which number of replicas on a stage over units meets the limit, its borders over the innermost level:
    (limit - y) r^2 - (work + q + x - y) r + q >= 0, where reduce = q (r-1)/r + y (r-1) + x."""
    top = len(terms.units) - 1
    q = terms.reduce_factor * parameters / terms.bandwidth[top]
    latency = 2.0 * terms.latency[top] if parameters > 0.0 else 0.0
    x = reduce_seconds(terms, parameters, 1, top)
    fastest = int(numpy.argmin(1.0 / terms.bandwidth))
    enter, leave = border_seconds(terms, entering, fastest), border_seconds(terms, leaving, fastest)
    least = 1.0
    if terms.overlap:
        least = max(enter, leave) / limit
    else:
        work = work + enter + leave
    a, b = limit - latency, work + q + x - latency
    if a <= 0.0:
        return 1e18
    inside = b * b - 4.0 * a * q
    return max(least, (b + numpy.sqrt(inside)) / (2.0 * a)) if inside > 0.0 else least


@native
def _fill(
    start: numpy.ndarray, end: numpy.ndarray, forward: Floats, backward: Floats, parameters: Floats, saved: Floats,
    working: Floats, entering: Floats, leaving: Floats, terms: Terms, devices: int, unit: int, limit: float, recompute: bool,
) -> tuple[numpy.ndarray, numpy.ndarray, numpy.ndarray, numpy.ndarray, numpy.ndarray]:  # fmt: skip
    states = len(start) - 1
    missing = (-terms.size) % unit  # of the last unit: the machine's end need not be a unit's end
    largest = devices + missing
    fewest = numpy.full((states, unit), NONE)
    pair = numpy.full((states, unit), -1)
    came = numpy.zeros((states, unit), dtype=numpy.int64)
    replicas = numpy.zeros((states, unit), dtype=numpy.int64)
    again = numpy.zeros((states, unit), dtype=numpy.bool_)
    fewest[states - 1, missing % unit] = missing
    for i in range(states - 2, -1, -1):
        for p in range(start[i], start[i + 1]):
            j = end[p]
            for variant in range(2 if recompute else 1):
                work = forward[p] * (1 + variant) + backward[p]
                kept = entering[p] if variant else saved[p]
                extra = working[p] + entering[p] + leaving[p] + (saved[p] if variant else 0.0)
                room = terms.memory[0] - extra - parameters[p] * (terms.weight_factor - 1.0)
                each = kept + parameters[p]
                versions = numpy.floor(room / each + 1e-9) if each > 0.0 else (1e18 if room >= 0.0 else 0.0)
                if versions < 1.0 or work > limit * devices:
                    continue
                root = -1.0
                for place in range(unit):
                    begin = fewest[j, place]
                    if begin >= largest:
                        continue
                    downstream = begin - missing
                    low = max(1, int(numpy.ceil(work / limit - 1e-9)))
                    if downstream > 0:
                        if versions < 2.0:
                            continue
                        low = max(low, int(numpy.ceil(downstream / (versions - 1.0) - 1e-9)))
                    worst = fewest[i].max()
                    if begin + low >= worst or begin + low > largest:
                        continue
                    if root < 0.0:
                        root = _root(terms, work, parameters[p], entering[p], leaving[p], limit)
                    step, settled = low, 0
                    while settled < unit and begin + step <= min(largest, worst - 1):
                        inside = place + step <= unit and unit > 1
                        if not inside and step > 2 and step < root - 1.0:
                            step = max(step + 1, int(numpy.ceil(root - 1e-6)) - 1 if root < 1e17 else NONE)
                            continue
                        settled = 0 if inside else settled + 1
                        goal = (place + step) % unit
                        if begin + step < fewest[i, goal]:
                            taken = _seconds(terms, work, parameters[p], entering[p], leaving[p], downstream, step)
                            memory = stage_memory(terms, parameters[p], kept, extra, step, downstream)
                            if taken <= limit and memory <= terms.memory[0]:
                                fewest[i, goal] = begin + step
                                pair[i, goal] = p
                                came[i, goal] = place
                                replicas[i, goal] = step
                                again[i, goal] = variant == 1
                                worst = fewest[i].max()
                            else:
                                settled = 0
                        step += 1
    return fewest, pair, came, replicas, again
