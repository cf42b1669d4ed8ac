"""A better order by exchanging neighbours that hold up the end, as native functions.

    rank 0   F0 F1 B0 W0 B1         the longest chain through an order is made of blocks, actions of one rank without a pause;
    rank 1      F0 B0 F1 B1 ...     only another order within a block can shorten it (Balas, 1969; van Laarhoven, 1992)

Each round moves an action past its neighbours in such a block, and keeps that where the order does not take longer than the best
by more than a limit that goes down to nothing (threshold accepting, Dueck and Scheuer, 1990). Actions of one lane keep their
order, ranks their room. Random numbers are its own, from a seed. Not here: where a search begins, and how long it lasts.
"""

from __future__ import annotations

import numpy

from pdcompiler.core.native import native
from pdcompiler.core.order_table import Integers, Table
from pdcompiler.core.workload import Floats

MOST_PLACES = 4
"""By which an action moves at once."""


@native
def finish(table: Table, order: Integers, ends: Floats, place: Integers) -> float:
    """When an order is done; inf where it waits for itself. ends: is filled.   place: how far each rank has come, likewise."""
    ends[:] = numpy.inf
    place[:] = table.first[:-1]
    free, waits = numpy.zeros(len(place)), numpy.full(len(place), -1, dtype=numpy.int64)
    ready = numpy.arange(len(place))
    count, latest, done = len(ready), 0.0, 0
    while count:
        count -= 1
        rank = ready[count]
        while place[rank] < table.first[rank + 1]:
            number = order[place[rank]]
            other, own, start = table.other[number], table.own[number], free[rank]
            if own >= 0 and ends[own] == numpy.inf:
                break
            if other >= 0:
                if ends[other] == numpy.inf:
                    waits[rank] = other
                    break
                start = max(start, ends[other] + table.lag[number])
            ends[number] = start + table.receive[number] + table.seconds[number]
            free[rank] = ends[number] + table.send[number]
            latest = max(latest, free[rank], ends[number] + table.after[number])
            place[rank] += 1
            done += 1
            reader = table.reader[number]
            if reader >= 0 and waits[table.rank[reader]] == number:
                waits[table.rank[reader]] = -1
                ready[count] = table.rank[reader]
                count += 1
    return latest if done == len(order) else numpy.inf


@native
def critical(table: Table, order: Integers, ends: Floats, at: Integers, found: Integers) -> int:
    """The places p in the order where the actions at p and p + 1 stand in one block of the longest chain; how many. at: is filled
    with the place of each action.   found: takes the places."""
    number, latest, count = -1, -1.0, 0
    for place in range(len(order)):
        at[order[place]] = place
        own = ends[order[place]] + max(table.send[order[place]], table.after[order[place]])
        if own > latest:
            number, latest = order[place], own
    while number >= 0:
        start = ends[number] - table.seconds[number] - table.receive[number]
        place, other = at[number], table.other[number]
        before = order[place - 1] if place > table.first[table.rank[number]] else -1
        if before >= 0 and ends[before] + table.send[before] >= start:
            if _may_swap(table, before, number):
                found[count] = place - 1
                count += 1
            number = before
        elif other >= 0 and ends[other] + table.lag[number] >= start:
            number = other
        else:
            number = -1
    return count


@native
def _may_swap(table: Table, before: int, number: int) -> bool:
    """Whether the second may stand before the first, whatever else."""
    return before // table.microbatches != number // table.microbatches and table.own[number] != before


@native
def _move(table: Table, order: Integers, place: int, places: int, earlier: bool) -> None:
    """Move the action at place + 1 forwards past up to so many others, or the one at place back."""
    rank = table.rank[order[place]]
    now = place + 1 if earlier else place
    while places > 0:
        to = now - 1 if earlier else now + 1
        if not table.first[rank] <= to < table.first[rank + 1]:
            break
        first, second = (to, now) if earlier else (now, to)
        if not _may_swap(table, order[first], order[second]):
            break
        order[now], order[to] = order[to], order[now]
        now, places = to, places - 1
    if earlier and table.takes[order[now]] > 0:
        _free_room(table, order, now)


@native
def _free_room(table: Table, order: Integers, place: int) -> None:
    """Let the weights' gradients that wait go before the action at a place, the oldest first, until there is room for it."""
    first, end, left = table.first[table.rank[order[place]]], table.first[table.rank[order[place]] + 1], 0.0
    for before in range(first, place):
        left += table.gives[order[before]] - table.takes[order[before]]
    left += table.room[table.rank[order[place]]] - table.takes[order[place]]
    weights, later = 2 * len(table.replicas) * table.microbatches, place + 1
    while left < 0 and later < end:
        number = order[later]
        if number >= weights and _stands_before(table, order, table.own[number], first, place):
            order[place + 1 : later + 1] = order[place:later].copy()
            order[place] = number
            left += table.gives[number]
            place += 1
        later += 1


@native
def _stands_before(table: Table, order: Integers, number: int, first: int, place: int) -> bool:
    return bool((order[first:place] == number).any())


@native
def has_room(table: Table, order: Integers, rank: int) -> bool:
    """Whether a rank never holds more than it may."""
    left = table.room[rank]
    for place in range(table.first[rank], table.first[rank + 1]):
        left -= table.takes[order[place]]
        if left < 0:
            return False
        left += table.gives[order[place]]
    return True


@native
def _random(state: Integers) -> float:
    """The next number from 0 up to 1 (xorshift, Marsaglia, 2003)."""
    bits = state[0]
    bits ^= bits << numpy.uint64(13)
    bits ^= bits >> numpy.uint64(7)
    bits ^= bits << numpy.uint64(17)
    state[0] = bits
    number: float = (bits >> numpy.uint64(11)) / 9007199254740992.0
    return number


@native
def improve(table: Table, order: Integers, rounds: int, limit: float, enough: float, seed: int) -> tuple[Integers, float]:
    """The best order found from this one, and what it takes. limit: by how much an order may take longer than the best, at first;
    it ends at nothing.   enough: no order takes less."""
    state = numpy.array([seed * 2654435769 + 88172645463325252], dtype=numpy.uint64)
    ends, at = numpy.empty(len(table.rank)), numpy.zeros(len(table.rank), dtype=numpy.int64)
    place, found = numpy.empty(len(table.room), dtype=numpy.int64), numpy.empty(len(order), dtype=numpy.int64)
    now, best, kept = order.copy(), order.copy(), order.copy()
    seconds = least = finish(table, now, ends, place)
    count = critical(table, now, ends, at, found)
    for done in range(rounds):
        if count == 0 or least <= enough:
            break
        where = found[int(_random(state) * count)]
        chance = _random(state)
        places = 1 if chance < 0.5 else 1 + int(_random(state) * MOST_PLACES)
        rank = table.rank[now[where]]
        start, end = table.first[rank], table.first[rank + 1]
        kept[start:end] = now[start:end]
        _move(table, now, where, places, _random(state) < 0.5)
        took = finish(table, now, ends, place) if has_room(table, now, rank) else numpy.inf
        if took <= least + limit * (1.0 - done / rounds) * _random(state) or took <= seconds:
            seconds = took
            count = critical(table, now, ends, at, found)
            if took < least:
                least = took
                best[:] = now
        else:
            now[start:end] = kept[start:end]
    return best, least
