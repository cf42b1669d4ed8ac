"""The schedule `auto`: the fastest order that is found for the seconds, bytes and room that there are.

    walked      orders by rules (core/order_rules.py)
    candidates  the named schedules that fit, if they are given: so none of these is faster
    search      from the best few of them, exchanging what holds up the end (core/order_search.py)

Same problem, same schedule: nothing depends on time or on random numbers from outside. Not here: where the costs come from.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy

from pdcompiler.core.order_rules import walked
from pdcompiler.core.order_search import finish, improve
from pdcompiler.core.order_table import fullest, least_seconds, order_of, schedule_of, table_of
from pdcompiler.core.schedule import Schedule
from pdcompiler.core.schedule_problem import ScheduleProblem

STARTS = 4
"""Orders from which is searched."""
WORK = 60_000_000
"""Actions looked at in a search, from all starts together: some seconds."""
MOST_ROUNDS = 40_000
CLOSE = 1e-6
"""Times that differ by no larger part are equal."""
MOST_EQUALS = 30
LIMIT = 0.05
"""Of the least seconds: by so much may an order be worse on the way."""


def automatic(problem: ScheduleProblem, candidates: Iterable[Schedule] = ()) -> Schedule:
    """The fastest found; of equals that with the least memory on the fullest rank. candidates: of the problem's ranks, stages and
    microbatches; those that do not fit its room are passed over. It takes no longer than any of them, by `problem.timing`."""
    table = table_of(problem)
    enough = least_seconds(table) * (1 + 1e-9)
    ends, place = numpy.empty(len(table.rank)), numpy.empty(problem.ranks, dtype=numpy.int64)
    given = [schedule for schedule in candidates if problem.fits(schedule)]
    orders = [order_of(schedule, table, problem) for schedule in given] + walked(table, problem)
    found = sorted(((finish(table, order, ends, place), number) for number, order in enumerate(orders)))
    starts = [orders[number] for _, number in found[:STARTS]]
    rounds = min(MOST_ROUNDS, WORK // (len(starts) * len(starts[0])))
    for seed, order in enumerate(starts):
        better, seconds = improve(table, order, rounds, LIMIT * enough, enough, seed + 1)
        found.append((seconds, len(orders)))
        orders.append(better)
        if seconds <= enough:
            break
    least = min(found)[0]
    near = [(seconds, number) for seconds, number in sorted(found) if seconds <= least * (1 + CLOSE)][:MOST_EQUALS]
    best = min(near, key=lambda one: (_steps(one[0], least), fullest(table, orders[one[1]])))[1]
    schedules = [schedule_of(orders[best], table, problem, "auto"), *given]
    return min(schedules, key=lambda schedule: _time_and_room(problem, schedule, least))


def _steps(seconds: float, least: float) -> float:
    """Times, so that equal ones are equal."""
    return round(seconds / least / CLOSE) if least else 0.0


def _time_and_room(problem: ScheduleProblem, schedule: Schedule, least: float) -> tuple[float, float]:
    return _steps(problem.timing(schedule).finish, least), max(problem.peaks(schedule))
