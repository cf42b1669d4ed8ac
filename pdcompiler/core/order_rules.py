"""Orders for costs, room and messages, found by walking: each rank by a rule of its own, and the rules by trying.

    grid       every rank the same rule: which phase first, how patient, how much of its room
    changes    the best rule so far with one rank's changed, again and again: where W must make room for the next forward at once
               on one rank, it may wait on the others

Not here: the walk (`order_walk.py`), and what improves its orders (`core/order_search.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import numpy

from pdcompiler.core.order_search import finish
from pdcompiler.core.order_table import Integers, Table
from pdcompiler.core.order_walk import first_microbatches, walk
from pdcompiler.core.schedule_problem import ROUNDING, ScheduleProblem
from pdcompiler.core.workload import Floats

PLACES = ((1.0, 0.0, 2.0), (0.0, 1.0, 2.0), (2.0, 0.0, 1.0), (2.0, 1.0, 0.0))
"""Of F, B and W: what a walk likes best has the least."""
PATIENCE = (0.0, 0.5, 1.0)
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
MOST_CHANGES = 1_500
WORK = 1_500_000
"""Actions of all walks with a changed rule: about a second."""


class Rule(NamedTuple):
    """How each rank walks: places and patience as of `walk`, and its share of the room beyond what one microbatch needs."""

    places: Floats
    patience: Floats
    share: Floats

    @staticmethod
    def equal(ranks: int, places: Sequence[float], patience: float, share: float) -> Rule:
        """All ranks'."""
        return Rule(numpy.tile(places, (ranks, 1)), numpy.full(ranks, patience), numpy.full(ranks, share))

    def changed(self, random: numpy.random.Generator) -> Rule:
        """With other places, patience or share on one rank."""
        other, rank, what = Rule(*(array.copy() for array in self)), random.integers(len(self.share)), random.integers(3)
        if what == 0:
            other.places[rank] = random.permutation(3)
        elif what == 1:
            other.patience[rank] = random.uniform(0, 2)
        else:
            other.share[rank] = random.uniform()
        return other


class Walker:
    """Walks by rules, and remembers the orders."""

    def __init__(self, table: Table, problem: ScheduleProblem) -> None:
        self.table, self.problem = table, problem
        self.least = numpy.array(problem.least_room()) * ROUNDING
        self.most = numpy.minimum(table.room, self.least * problem.microbatches)
        self.ends, self.place = numpy.empty(len(table.rank)), numpy.empty(problem.ranks, dtype=numpy.int64)
        self.orders: dict[bytes, tuple[float, Integers]] = {}

    def seconds(self, rule: Rule) -> float:
        """What the order of a rule takes."""
        room = self.least + rule.share * (self.most - self.least)
        order = walk(self.table, rule.places, rule.patience, room, first_microbatches(self.problem))
        found = finish(self.table, order, self.ends, self.place)
        self.orders[order.tobytes()] = found, order
        return found


def walked(table: Table, problem: ScheduleProblem) -> list[Integers]:
    """Orders that differ, the fastest first."""
    walker, random = Walker(table, problem), numpy.random.default_rng(0)
    rules = [Rule.equal(problem.ranks, *choice) for choice in product(PLACES, PATIENCE, SHARES)]
    least, best = min(((walker.seconds(rule), number) for number, rule in enumerate(rules)))
    rule = rules[best]
    for _ in range(min(MOST_CHANGES, WORK // int(table.first[-1]))):
        other = rule.changed(random)
        seconds = walker.seconds(other)
        if seconds <= least:
            least, rule = seconds, other
    return [order for _, order in sorted(walker.orders.values(), key=lambda found: found[0])]
