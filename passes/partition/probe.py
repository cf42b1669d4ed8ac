"""The fewest devices with which no stage takes longer than a given time: equal devices, levels of bandwidth.

    fewest[i][m] = the smallest o such that the layers from state i on run on o devices, and o = m modulo one unit

Given the time, every constraint on the stages before is easier with fewer devices behind them: weight versions and the devices
that are left. What a stage meets of the levels of bandwidth depends on where it begins within one unit of the last level but
the outermost, so the smallest o is kept for each such place; with one level there is one. Devices are counted from the
machine's end. Bisecting on the time, with the last probe just below the plan found, gives the best asynchronous plan and its
proof; with unlimited time it says for every schedule whether any plan fits the memory.

Not here: sums over stages, as flushing schedules take, and several kinds of device (`by_devices.py`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy

from pdcompiler.core.native import native
from pdcompiler.core.plan import Choice
from pdcompiler.core.spans import Integers, Spans
from pdcompiler.core.stage_time import (
    GPIPE,
    ONE_F_ONE_B,
    PIPEDREAM,
    Terms,
    border_seconds,
    level_of,
    reduce_seconds,
    stage_memory,
    stage_seconds,
)
from pdcompiler.core.workload import Floats

NONE = 1 << 40


class Stages(NamedTuple):
    """What does not depend on the time, of each pair: by variant (saved, recomputed) and pair. before: the work of all
    layers before each state.   shared: no less than that, divided
    by the time, are the replicas, if they are two or more.   versions: the most that the memory holds, with as many microbatches'
    saved values.   kept: saved bytes of a microbatch.   extra: working bytes."""

    start: Integers
    end: Integers
    before: Floats
    work: Floats
    shared: Floats
    versions: Floats
    kept: Floats
    extra: Floats
    parameters: Floats
    entering: Floats
    leaving: Floats


def stages_of(spans: Spans, terms: Terms, *, recompute: bool = False) -> Stages:
    """Once for all probes."""
    both = spans.forward[0] + spans.backward[0]
    border = spans.working + spans.entering + spans.leaving
    work, kept, extra = numpy.array([both]), numpy.array([spans.saved]), numpy.array([border])
    if recompute:
        work = numpy.array([both, both + spans.forward[0]])
        kept, extra = numpy.array([spans.saved, spans.entering]), numpy.array([border, border + spans.saved])
    stashed = spans.parameters * float(terms.kind == PIPEDREAM)  # weights of each microbatch in flight
    room = terms.memory[0] - extra - spans.parameters * terms.weight_factor + stashed
    each = kept + stashed
    with numpy.errstate(divide="ignore", invalid="ignore"):
        versions = numpy.where(each > 0, numpy.floor(room / each + 1e-9), numpy.where(room >= 0, NONE, 0))
    columns = (spans.parameters, spans.entering, spans.leaving)
    reduced = terms.reduce_factor * spans.parameters / terms.bandwidth.max()
    shared = work + reduced / 2 if terms.kind == PIPEDREAM else work  # work + reduced (r - 1) / r <= time * r
    return Stages(spans.start, spans.end, spans.before, work, shared, numpy.minimum(versions, NONE), kept, extra, *columns)


def fewest_devices(
    stages: Stages, terms: Terms, devices: int, seconds: float, *, degrees: Integers | None = None
) -> list[Choice] | None:
    """A plan of at most `devices` devices in which no stage takes longer than `seconds`, or None where there is none.
    degrees: the numbers of replicas that a stage may have; None: all."""
    per_unit = int(terms.units[-2]) if len(terms.units) > 1 else 1
    allowed = _next_degrees(numpy.arange(1, devices + 1) if degrees is None else degrees, devices)
    fewest, pair, came, replicas, again = _fill(stages, terms, devices, per_unit, seconds, allowed, degrees is None)
    place = int(fewest[0].argmin())
    if fewest[0, place] - (-terms.size) % per_unit > devices:
        return None
    state, found = 0, []
    while state < len(fewest) - 1:
        at = (state, place)
        found.append(Choice(int(pair[at]), int(replicas[at]), bool(again[at])))
        state, place = int(stages.end[pair[at]]), int(came[at])
    return found


def _next_degrees(degrees: Integers, devices: int) -> Integers:
    """For each number of replicas up to one more than there are devices, the least allowed one that is no smaller; or NONE."""
    ordered = numpy.append(numpy.unique(degrees[degrees <= devices]), NONE).astype(numpy.int64)
    return ordered[numpy.searchsorted(ordered, numpy.arange(devices + 2))]


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
def _least(terms: Terms, work: float, parameters: float, entering: float, leaving: float, limit: float) -> float:
    """No fewer replicas meet the limit where the microbatches of an update are shared out and gradients are added once."""
    fastest = int(numpy.argmin(1.0 / terms.bandwidth))
    enter, leave = border_seconds(terms, entering, fastest), border_seconds(terms, leaving, fastest)
    least: float = max(work, enter, leave) / limit if terms.overlap else (work + enter + leave) / limit
    if least <= 1.0:
        return 1.0
    reduced = terms.reduce_factor / 2 * parameters / terms.bandwidth[fastest]  # at least, over two replicas or more
    return least if reduced <= limit * terms.microbatches * (1.0 + 1e-12) else float(NONE)


@native
def _held(terms: Terms, versions: float, downstream: int) -> int:
    """With how many replicas no more microbatches are in flight than the memory holds."""
    own = int(numpy.ceil(terms.microbatches / versions - 1e-9))
    if terms.kind == GPIPE:
        return own
    warm = 1
    if downstream > 0:
        warm = int(numpy.ceil(downstream / (versions - 1.0) - 1e-9)) if versions >= 2.0 else NONE
    return min(warm, own) if terms.kind == ONE_F_ONE_B else warm


@native
def _fill(
    stages: Stages, terms: Terms, devices: int, unit: int, limit: float, allowed: Integers, every: bool
) -> tuple[Integers, Integers, Integers, Integers, numpy.ndarray]:
    states = len(stages.start) - 1
    enough = unit if every else (1 if unit == 1 else NONE)  # settled degrees in a row: then all places are
    missing = (-terms.size) % unit  # of the last unit: the machine's end need not be a unit's end
    largest = devices + missing
    fewest = numpy.full((states, unit), NONE)
    pair = numpy.full((states, unit), -1)
    came = numpy.zeros((states, unit), dtype=numpy.int64)
    replicas = numpy.zeros((states, unit), dtype=numpy.int64)
    again = numpy.zeros((states, unit), dtype=numpy.bool_)
    fewest[states - 1, missing % unit] = missing
    most_work = limit * devices
    for i in range(states - 2, -1, -1):
        budget = largest + 1 - int(numpy.ceil(stages.before[i] / limit - 1e-6))  # the layers before need the other devices
        worst = budget
        for p in range(stages.start[i], stages.start[i + 1]):
            j = stages.end[p]
            for variant in range(len(stages.work)):
                work, versions = stages.work[variant, p], stages.versions[variant, p]
                if work > most_work or versions < 1.0:
                    continue
                least = 1
                if work > limit:
                    shared = stages.shared[variant, p]
                    least = max(2, int(numpy.ceil(shared / limit - 1e-9)))
                    shared += (shared - work) * (1.0 - 2.0 / least)  # the reduction over so many, or more
                    least = max(least, int(numpy.ceil(shared / limit - 1e-9)))
                root = -1.0
                for place in range(unit):
                    begin = fewest[j, place]
                    if begin + least >= worst or begin + least > largest:
                        continue
                    downstream = begin - missing
                    low = max(least, _held(terms, versions, downstream))
                    if begin + low >= worst or begin + low > largest:
                        continue
                    parameters, entering, leaving = stages.parameters[p], stages.entering[p], stages.leaving[p]
                    if root < 0.0 and terms.kind == PIPEDREAM:
                        root = _root(terms, work, parameters, entering, leaving, limit)
                    elif root < 0.0:
                        root = _least(terms, work, parameters, entering, leaving, limit)
                    if terms.kind != PIPEDREAM:
                        low = max(low, int(numpy.ceil(root - 1e-9)))
                        if begin + low >= worst or begin + low > largest:
                            continue
                    step, settled = allowed[min(low, devices + 1)], 0
                    while settled < enough and begin + step <= min(largest, worst - 1):
                        inside = place + step <= unit and unit > 1
                        if terms.kind == PIPEDREAM and not inside and step > 2 and step < root - 1.0:
                            step = max(step + 1, int(numpy.ceil(root - 1e-6)) - 1 if root < 1e17 else NONE)
                            step = allowed[min(step, devices + 1)]
                            continue
                        settled = 0 if inside else settled + 1
                        goal = (place + step) % unit
                        if begin + step < fewest[i, goal]:
                            taken = _seconds(terms, work, parameters, entering, leaving, downstream, step)
                            kept, extra = stages.kept[variant, p], stages.extra[variant, p]
                            memory = stage_memory(terms, parameters, kept, extra, step, downstream)
                            if taken <= limit and memory <= terms.memory[0]:
                                fewest[i, goal] = begin + step
                                pair[i, goal] = p
                                came[i, goal] = place
                                replicas[i, goal] = step
                                again[i, goal] = variant == 1
                                worst = min(budget, fewest[i].max())
                            else:
                                settled = 0
                        step = allowed[min(step + 1, devices + 1)]
    return fewest, pair, came, replicas, again
