"""An order found by walking, as a native function: of all ranks the one that can go on first starts what its rule likes best.

    F F F . B F B F B ...      of what is there when the rank goes on, and what comes within `patience` of it, the phase with
                               the smallest of `places`; of a phase the latest stage
    room                       bytes that each rank may hold; a forward starts only where every microbatch under way can still
                               be brought to its end after it, the oldest first (Dijkstra's banker), so no walk gets stuck

Not here: which rules are good (`order_rules.py`).
"""

from __future__ import annotations

import numpy

from pdcompiler.core.native import native
from pdcompiler.core.order_table import Integers, Table
from pdcompiler.core.schedule_problem import ScheduleProblem
from pdcompiler.core.workload import Floats

NEXT = 1e-6
"""Between the places of two stages."""


@native
def walk(table: Table, places: Floats, patience: Floats, room: Floats, next_of: Integers) -> Integers:
    """The order. patience: in times the seconds of what could start.   next_of: of each rank and lane the first microbatch; it is
    used up. Empty where the room is not even that of one microbatch."""
    order = numpy.empty(table.first[-1], dtype=numpy.int64)
    ends = numpy.full(len(table.rank), numpy.inf)
    free, left, place = numpy.zeros(len(room)), room.copy(), table.first[:-1].copy()
    chosen, starts = numpy.full(len(room), -1, dtype=numpy.int64), numpy.full(len(room), numpy.inf)
    for rank in range(len(room)):
        chosen[rank], starts[rank] = _choose(table, places[rank], patience[rank], next_of[rank], ends, free[rank], left[rank])
    for _ in range(len(order)):
        rank = int(numpy.argmin(starts))
        best, start = chosen[rank], starts[rank]
        if best < 0:
            return order[:0]
        ends[best] = start + table.receive[best] + table.seconds[best]
        free[rank] = ends[best] + table.send[best]
        left[rank] += table.gives[best] - table.takes[best]
        order[place[rank]] = best
        place[rank] += 1
        lane = best // table.microbatches
        next_of[rank, lane] += table.replicas[lane % len(table.replicas)]
        for changed in (rank, table.rank[table.reader[best]] if table.reader[best] >= 0 else rank):
            found = _choose(table, places[changed], patience[changed], next_of[changed], ends, free[changed], left[changed])
            chosen[changed], starts[changed] = found
    return order


@native
def _choose(
    table: Table, places: Floats, patience: float, next_of: Integers, ends: Floats, free: float, left: float
) -> tuple[int, float]:
    """What a rank would start next, and when; inf: nothing."""
    own, other, lag, seconds, stages = table.own, table.other, table.lag, table.seconds, len(table.replicas)
    until, best, start, least = numpy.inf, -1, numpy.inf, numpy.inf
    times = numpy.full(len(next_of), numpy.inf)
    for lane in range(len(next_of)):
        number = lane * table.microbatches + next_of[lane]
        if next_of[lane] >= table.microbatches or table.rank[number] < 0:
            continue
        time = free
        if own[number] >= 0:
            time = max(time, ends[own[number]])
        if other[number] >= 0:
            time = max(time, ends[other[number]] + lag[number])
        if time < numpy.inf and (lane >= stages or _is_safe(table, next_of, lane, left - table.takes[number])):
            times[lane] = time
            until = min(until, time + patience * seconds[number])
    for lane in range(len(next_of)):
        place = places[lane // stages] - NEXT * (lane % stages)
        if times[lane] < numpy.inf and times[lane] <= until and place < least:
            best, start, least = lane * table.microbatches + next_of[lane], times[lane], place
    return best, start


@native
def _is_safe(table: Table, next_of: Integers, started: int, left: float) -> bool:
    """Whether all microbatches on a rank can be brought to their ends, one after the other, once a forward has started."""
    if left < 0:
        return False
    stages, oldest, end = len(table.replicas), table.microbatches, 0
    for stage in range(stages):
        if next_of[stage] < table.microbatches or next_of[stages + stage] < table.microbatches:
            oldest, end = min(oldest, next_of[stages + stage]), max(end, next_of[stage] + 1)
        for microbatch in range(next_of[2 * stages + stage], next_of[stages + stage], table.replicas[stage]):
            left += table.gives[(2 * stages + stage) * table.microbatches + microbatch]
    for microbatch in range(oldest, end):
        needs = has = 0.0
        for stage in range(stages):
            if next_of[stages + stage] <= microbatch and (microbatch - next_of[stages + stage]) % table.replicas[stage] == 0:
                takes = table.takes[stage * table.microbatches + microbatch]
                if microbatch < next_of[stage] or (stage == started and microbatch == next_of[stage]):
                    has += takes
                else:
                    needs += takes
        if has > 0 and needs > left:
            return False
        left += has
    return True


def first_microbatches(problem: ScheduleProblem) -> Integers:
    """Of each rank and lane; as many as there are microbatches where the stage is not on the rank."""
    stages = problem.stages
    found = numpy.full((problem.ranks, 3 * stages), problem.microbatches, dtype=numpy.int64)
    for stage, ranks in enumerate(problem.rank_of):
        for replica, rank in enumerate(ranks):
            found[rank, [stage, stages + stage, 2 * stages + stage]] = replica
    return found
