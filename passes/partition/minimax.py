"""The stages whose slowest is fastest, over all paths through a lattice: one device a stage, no replication. Exact.

    a stage takes      the seconds of its layers, and those of every value that it touches without containing it, each once
    a spare device     may take any one stage, with its own seconds per layer; nothing is charged for its transfers
    limit              plans that take as long are not sought: none found is the proof that there is none below it

A state is reached with k devices only if what is done so far, and every value cut there, fits k stages within the limit, and
what is left the rest of them (PLANNER 4.5). From such a state all stages are walked layer by layer, in rising order so that each
is met once, as long as its layers, the values that enter it, and those of which a member has been passed over stay within the
limit. Not here: replication, memory in flight, several links (`probe.py`, `by_devices.py` over `lattice_spans.py`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy

from pdcompiler.core.lattice import Graph, Lattice
from pdcompiler.core.native import native
from pdcompiler.core.spans import Integers
from pdcompiler.core.straight import CLOSE, Loads, spare_work
from pdcompiler.core.workload import Floats

MOST_STEPS = 20_000_000
"""Candidate stages that a search looks at before it gives up: some seconds."""


class Stages(NamedTuple):
    """states: where the stages begin and, last, where the last one ends.   spare: which stage is on the spare device, or -1."""

    seconds: float
    states: tuple[int, ...]
    spare: int


class GivenUp(Exception):
    """More candidate stages than the search may look at."""


def fastest_slowest(
    graph: Graph, lattice: Lattice, loads: Loads, devices: int, limit: float = numpy.inf, most_steps: int = MOST_STEPS
) -> Stages | None:
    """The stages whose slowest takes the least, on at most `devices` devices and the spare one; None where it takes `limit`.
    Raises GivenUp where that is not known after `most_steps` candidate stages."""
    if limit <= 0:
        return None
    below = limit * (1 - CLOSE)
    if limit == numpy.inf:
        below = 1.0 + 2 * float(loads.seconds.sum() + graph.cost.sum() + loads.spare.sum())
    low, high = _windows(graph, lattice, loads, devices, below)
    width = int(max(1, (high - low).max() + 1))
    best, came, on_spare, steps = _fill(graph, lattice, loads, low, high, width, below, most_steps)
    if steps > most_steps:
        raise GivenUp
    ends = [(float(best[kind, -1, k]), kind, k) for kind in range(2) for k in range(width)]
    seconds, kind, k = min(ends)
    if seconds == numpy.inf:
        return None
    used, state, states, spare = k + int(low[kind, -1]), lattice.states - 1, [lattice.states - 1], -1
    while state > 0:
        at = (kind, state, used - int(low[kind, state]))
        state, was_spare = int(came[at]), bool(on_spare[at])
        states.append(state)
        spare = len(states) - 2 if was_spare else spare
        kind, used = (0, used) if was_spare else (kind, used - 1)
    return Stages(seconds, tuple(states[::-1]), len(states) - 2 - spare if spare >= 0 else -1)


def _windows(graph: Graph, lattice: Lattice, loads: Loads, devices: int, limit: float) -> tuple[Integers, Integers]:
    """(spare device used or not, state): the fewest and the most devices with which a plan within the limit passes the state."""
    done = lattice.sums(loads.seconds)
    cut = _cut_costs(graph, lattice.words)
    spare = spare_work(loads, limit) if len(loads.spare) else 0.0
    has_spare = len(loads.spare) > 0

    def stages(seconds: Floats) -> Integers:
        return numpy.ceil(numpy.maximum(0.0, seconds) / limit - CLOSE).astype(numpy.int64)

    before, after = done + cut, done[-1] - done + cut
    unused = (stages(before), devices - stages(done[-1] - done - spare if has_spare else after))
    used = (stages(done - spare), devices - stages(after) if has_spare else numpy.full(lattice.states, -1))
    return numpy.array([unused[0], used[0]]), numpy.array([unused[1], used[1]])


@native
def _cut_costs(graph: Graph, words: numpy.ndarray) -> Floats:
    """Of each state: the values that it cuts."""
    cut = numpy.zeros(len(words))
    for s in range(len(words)):
        for h in range(len(graph.cost)):
            inside = outside = False
            for k in range(graph.member_start[h], graph.member_start[h + 1]):
                v = graph.member[k]
                if (words[s, v >> 6] >> numpy.uint64(v & 63)) & numpy.uint64(1):
                    inside = True
                else:
                    outside = True
                if inside and outside:
                    cut[s] += graph.cost[h]
                    break
    return cut


@native
def _mark_begun(graph: Graph, words: numpy.ndarray, done: numpy.ndarray) -> None:
    for h in range(len(graph.cost)):
        done[h] = False
        for k in range(graph.member_start[h], graph.member_start[h + 1]):
            v = graph.member[k]
            if (words[v >> 6] >> numpy.uint64(v & 63)) & numpy.uint64(1):
                done[h] = True
                break


@native
def _pass_over(graph: Graph, layer: int, done: numpy.ndarray, held: Integers, passed: Integers) -> float:
    """The stage will not hold this layer: what values that it touches cost that it now can't hold whole."""
    sure = 0.0
    for k in range(graph.touch_start[layer], graph.touch_start[layer + 1]):
        h = graph.touch[k]
        passed[h] += 1
        if passed[h] == 1 and held[h] > 0 and not done[h]:
            sure += graph.cost[h]
    return sure


@native
def _forget_passed(graph: Graph, lattice: Lattice, state: int, last: int, until: int, passed: Integers) -> None:
    """Undo it for all next layers behind `last` up to the entry `until`."""
    for e in range(lattice.next_start[state], until):
        v = lattice.next_layer[e]
        if v > last:
            for k in range(graph.touch_start[v], graph.touch_start[v + 1]):
                passed[graph.touch[k]] -= 1


@native
def _fill(
    graph: Graph, lattice: Lattice, loads: Loads, low: Integers, high: Integers, width: int, limit: float, most_steps: int
) -> tuple[Floats, numpy.ndarray, numpy.ndarray, int]:
    """best[spare used, state, k]: the least slowest stage up to the state with low + k devices; how it was reached; steps."""
    states, layers, values = len(lattice.words), len(graph.before_start) - 1, len(graph.cost)
    best = numpy.full((2, states, width), numpy.inf)
    came = numpy.full((2, states, width), -1, dtype=numpy.int32)
    on_spare = numpy.zeros((2, states, width), dtype=numpy.bool_)
    best[0, 0, 0] = 0.0
    done = numpy.zeros(values, dtype=numpy.bool_)  # whether a value has members before the stage
    held = numpy.zeros(values, dtype=numpy.int64)  # how many it has in the stage
    passed = numpy.zeros(values, dtype=numpy.int64)  # how many that the stage will not hold
    path = numpy.zeros(layers + 1, dtype=numpy.int64)
    state, at = numpy.zeros(layers + 1, dtype=numpy.int64), numpy.zeros(layers + 1, dtype=numpy.int64)
    work, size, spare = numpy.zeros(layers + 1), numpy.zeros(layers + 1), numpy.zeros(layers + 1)
    crossing, sure = numpy.zeros(layers + 1), numpy.zeros(layers + 1)
    alive_kind = numpy.zeros(2 * width, dtype=numpy.int64)
    alive_used = numpy.zeros(2 * width, dtype=numpy.int64)
    alive_best = numpy.zeros(2 * width)
    steps = 0
    path[0] = -1
    for begin in range(states - 1):
        alive = 0
        for kind in range(2):
            least = numpy.inf
            for k in range(high[kind, begin] - low[kind, begin] + 1):
                if best[kind, begin, k] < least:
                    least = best[kind, begin, k]
                    alive_kind[alive], alive_used[alive], alive_best[alive] = kind, k + low[kind, begin], least
                    alive += 1
        may_spare = len(loads.spare) > 0 and alive > 0 and alive_kind[0] == 0
        if alive == 0:
            continue
        if steps > most_steps:
            break
        _mark_begun(graph, lattice.words[begin], done)
        depth, state[0], at[0], sure[0] = 0, begin, lattice.next_start[begin], 0.0
        while True:
            here = state[depth]
            over = work[depth] + sure[depth] >= limit and not may_spare
            if over or at[depth] == lattice.next_start[here + 1]:
                _forget_passed(graph, lattice, here, path[depth], at[depth], passed)
                if depth == 0:
                    break
                v = path[depth]
                for k in range(graph.touch_start[v], graph.touch_start[v + 1]):
                    held[graph.touch[k]] -= 1
                depth -= 1
                sure[depth] += _pass_over(graph, v, done, held, passed)
                continue
            e = at[depth]
            at[depth] += 1
            v = lattice.next_layer[e]
            if v < path[depth]:
                continue
            steps += 1
            own = work[depth] + loads.seconds[v]
            own_size = size[depth] + loads.sizes[v]
            own_spare = spare[depth] + loads.spare[v] if may_spare else numpy.inf
            within = own + sure[depth] < limit and own_size <= loads.most_size
            if not within and not own_spare < limit:
                sure[depth] += _pass_over(graph, v, done, held, passed)
                continue
            cross, certain = crossing[depth], sure[depth]
            for k in range(graph.touch_start[v], graph.touch_start[v + 1]):
                h = graph.touch[k]
                if held[h] == 0:
                    cross += graph.cost[h]
                    if done[h] or passed[h] > 0:
                        certain += graph.cost[h]
                held[h] += 1
                if held[h] == graph.member_start[h + 1] - graph.member_start[h]:
                    cross -= graph.cost[h]
            depth += 1
            end = lattice.next_state[e]
            path[depth], state[depth], at[depth] = v, end, lattice.next_start[end]
            work[depth], size[depth], spare[depth] = own, own_size, own_spare
            crossing[depth], sure[depth] = cross, certain
            seconds = own + cross
            if within and seconds < limit:
                for a in range(alive):
                    kind, used = alive_kind[a], alive_used[a] + 1
                    k = used - low[kind, end]
                    slowest = max(alive_best[a], seconds)
                    if k >= 0 and used <= high[kind, end] and slowest < best[kind, end, k]:
                        best[kind, end, k], came[kind, end, k], on_spare[kind, end, k] = slowest, begin, False
            if own_spare < limit:
                for a in range(alive):
                    used = alive_used[a]
                    k = used - low[1, end]
                    slowest = max(alive_best[a], own_spare)
                    if alive_kind[a] == 0 and k >= 0 and used <= high[1, end] and slowest < best[1, end, k]:
                        best[1, end, k], came[1, end, k], on_spare[1, end, k] = slowest, begin, True
    return best, came, on_spare, steps
