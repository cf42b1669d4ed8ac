"""A ScheduleProblem as arrays, for the native loops: every action has a number, and an order is such numbers, rank by rank.

    number      phase * stages * microbatches + stage * microbatches + microbatch      F 0, B 1, W 2
    lane        phase * stages + stage: a rank runs the actions of one lane in the order of the microbatches
    order       [rank 0's actions | rank 1's | ...], rank r's from first[r] up to first[r + 1]

Not here: how orders are found (`order_rules.py`, `order_search.py`).
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy

from pdcompiler.core.schedule import PHASES, Action, Schedule
from pdcompiler.core.schedule_problem import ROUNDING, ScheduleProblem
from pdcompiler.core.workload import Floats

Integers: TypeAlias = numpy.ndarray

NOTHING = -1


class Table(NamedTuple):
    """Of each action: rank (-1: there is no such action), seconds; receive, send: seconds of messages that occupy its rank;
    own, other: what it needs of its rank and of another stage (-1: nothing);   lag: of other's message;   reader: who needs it on
    another stage;   after: seconds that must follow it;   head: seconds that must go before it, tail: and follow it;   takes,
    gives: bytes at its start and at its end.   first: see the module.   room: bytes of each rank.   replicas: of each stage."""

    rank: Integers
    seconds: Floats
    receive: Floats
    send: Floats
    own: Integers
    other: Integers
    lag: Floats
    reader: Integers
    after: Floats
    head: Floats
    tail: Floats
    takes: Floats
    gives: Floats
    first: Integers
    room: Floats
    replicas: Integers
    microbatches: int


def table_of(problem: ScheduleProblem) -> Table:
    """All but heads and tails stands in the problem."""
    stages, microbatches = problem.stages, problem.microbatches
    count = 3 * stages * microbatches
    rank, own, other, reader = (numpy.full(count, NOTHING, dtype=numpy.int64) for _ in range(4))
    seconds, receive, send, lag, after, takes, gives = (numpy.zeros(count) for _ in range(7))
    for number in range(count):
        action = action_of(number, problem)
        stage, split = action.stage, problem.splits(action.stage)
        if action.phase == "W" and not split:
            continue
        rank[number] = _rank(problem, action)
        weight = problem.weight[stage] if split else 0.0
        seconds[number] = {"F": problem.forward[stage], "B": problem.backward[stage] - weight, "W": weight}[action.phase]
        kept = problem.kept[stage] if split else 0.0
        takes[number] = problem.saved[stage] if action.phase == "F" else 0.0
        gives[number] = {"F": 0.0, "B": problem.saved[stage] - kept, "W": kept}[action.phase]
        after[number] = problem.reduce[stage] if action.phase != "F" else 0.0
        for need in action.needs(stages):
            needed = number_of(need, problem)
            if need.stage == stage:
                own[number] = needed
            else:
                other[number], reader[needed] = needed, number
                message = _message(problem, need, action)
                (lag if problem.overlap else receive)[number] = message
                send[needed] = 0.0 if problem.overlap else message
    first = numpy.concatenate(([0], numpy.cumsum(numpy.bincount(rank[rank >= 0], minlength=problem.ranks)))).astype(numpy.int64)
    replicas = numpy.array([len(ranks) for ranks in problem.rank_of], dtype=numpy.int64)
    table = Table(
        rank, seconds, receive, send, own, other, lag, reader, after, numpy.zeros(count), numpy.zeros(count), takes, gives, first,
        numpy.array(problem.room, dtype=numpy.float64) * ROUNDING, replicas, microbatches,
    )  # fmt: skip
    _measure(table, problem)
    return table


def number_of(action: Action, problem: ScheduleProblem) -> int:
    """See the module's docstring."""
    return (PHASES.index(action.phase) * problem.stages + action.stage) * problem.microbatches + action.microbatch


def action_of(number: int, problem: ScheduleProblem) -> Action:
    """The inverse."""
    lane, microbatch = divmod(number, problem.microbatches)
    phase, stage = divmod(lane, problem.stages)
    return Action(PHASES[phase], stage, microbatch)


def order_of(schedule: Schedule, table: Table, problem: ScheduleProblem) -> Integers:
    """A schedule as numbers, with backwards in as many parts as the problem has: the part that it lacks behind the other, which
    takes no longer. Its ranks must be those of the problem."""
    order: list[int] = []
    for actions in schedule.ranks:
        for action in actions:
            weight = number_of(Action("W", action.stage, action.microbatch), problem)
            if action.phase == "W" and table.rank[weight] == NOTHING:
                continue
            order.append(number_of(action, problem))
            if action.phase == "B" and table.rank[weight] >= 0 and (action.stage, action.microbatch) not in schedule.split:
                order.append(weight)
    return numpy.array(order, dtype=numpy.int64)


def schedule_of(order: Integers, table: Table, problem: ScheduleProblem, name: str) -> Schedule:
    """The inverse."""
    spans = zip(table.first, table.first[1:], strict=False)
    return Schedule(tuple(tuple(action_of(int(n), problem) for n in order[start:end]) for start, end in spans), name)


def least_seconds(table: Table) -> float:
    """No order takes less: the longest chain of needs; and each rank's work, between what must go before and after it."""
    there = table.rank >= 0
    occupied = table.seconds + table.receive + table.send
    least = float((table.head + table.receive + table.seconds + table.tail)[there].max())
    for rank in range(len(table.room)):
        own = table.rank == rank
        if own.any():
            least = max(least, float(table.head[own].min() + occupied[own].sum() + (table.tail - table.send)[own].min()))
    return least


def fullest(table: Table, order: Integers) -> float:
    """The most bytes that a rank holds at once."""
    held = table.takes[order].cumsum() - numpy.concatenate(([0.0], table.gives[order].cumsum()[:-1]))
    return float(held.max(initial=0.0))


def _rank(problem: ScheduleProblem, action: Action) -> int:
    ranks = problem.rank_of[action.stage]
    return ranks[action.microbatch % len(ranks)]


def _message(problem: ScheduleProblem, sent: Action, reader: Action) -> float:
    if _rank(problem, sent) == _rank(problem, reader):
        return 0.0
    border = min(sent.stage, reader.stage)
    return (problem.forward_transfer if sent.phase == "F" else problem.backward_transfer)[border]


def _measure(table: Table, problem: ScheduleProblem) -> None:
    """Heads and tails, in place: the forwards by stage, then the backwards against it, then W."""
    stages, microbatches = problem.stages, problem.microbatches
    lanes = [*range(stages), *reversed(range(stages, 2 * stages)), *range(2 * stages, 3 * stages)]
    numbers = [lane * microbatches + m for lane in lanes for m in range(microbatches)]
    numbers = [number for number in numbers if table.rank[number] >= 0]
    for number in numbers:
        for need, lag in ((table.own[number], 0.0), (table.other[number], table.lag[number])):
            if need >= 0:
                end = table.head[need] + table.receive[need] + table.seconds[need]
                table.head[number] = max(table.head[number], end + lag)
    table.tail[:] = table.after
    for number in reversed(numbers):
        for need, lag in ((table.own[number], 0.0), (table.other[number], table.lag[number])):
            if need >= 0:
                follows = table.receive[number] + table.seconds[number] + table.tail[number]
                table.tail[need] = max(table.tail[need], lag + follows)
