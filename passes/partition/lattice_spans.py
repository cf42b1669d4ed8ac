"""The table of all candidate stages of a branching workload (`core/spans.py`): every pair of its lattice's states.

From each state all later ones that contain it are walked layer by layer, in rising order, so that each is met once. Sums are
differences of the two states' sums; what enters and leaves is kept along the walk, each value once. Not here: a row of layers
without branches (`spans.py`), and how states are found (`ideals.py`).
"""

from __future__ import annotations

import numpy

from pdcompiler.core.lattice import Graph, Lattice, graph_of
from pdcompiler.core.native import native
from pdcompiler.core.spans import Integers, Spans
from pdcompiler.core.workload import Floats, Workload

MOST_PAIRS = 2_000_000
"""About 200 bytes each while the table is made."""


def lattice_spans(
    workload: Workload, lattice: Lattice, parts: tuple[tuple[int, ...], ...] | None = None, most_pairs: int = MOST_PAIRS
) -> Spans | None:
    """parts: the layers of a larger workload that each of this one's stands for (`fold.py`); the table's `layers` are then
    those. None where there are more pairs than `most_pairs`. The workload's groups must be layers already: fold first."""
    graph = graph_of(workload)
    pairs, start = _walk(graph, lattice, workload.working, most_pairs, False, *_columns(0))
    if pairs > most_pairs:
        return None
    end, working, entering, leaving, messages = _columns(pairs)
    _walk(graph, lattice, workload.working, most_pairs, True, end, working, entering, leaving, messages)
    begin = numpy.repeat(numpy.arange(lattice.states), numpy.diff(start))

    def between(per_layer: Floats) -> Floats:
        sums = lattice.sums(per_layer)
        return numpy.asarray(sums[end] - sums[begin])

    def layers(pair: int) -> tuple[int, ...]:
        own = lattice.between(int(begin[pair]), int(end[pair]))
        return own if parts is None else tuple(sorted(layer for part in own for layer in parts[part]))

    return Spans(
        lattice.states, start, end,
        numpy.array([between(row) for row in workload.forward]), numpy.array([between(row) for row in workload.backward]),
        between(workload.parameters), between(workload.saved), working, entering, leaving, messages, layers,
    )  # fmt: skip


def _columns(pairs: int) -> tuple[Integers, Floats, Floats, Floats, Floats]:
    return numpy.zeros(pairs, dtype=numpy.int64), *(numpy.zeros(pairs) for _ in range(4))  # type: ignore[return-value]


@native
def _walk(
    graph: Graph, lattice: Lattice, per_layer: Floats, most: int, fill: bool,
    ends: Integers, working: Floats, entering: Floats, leaving: Floats, messages: Floats,
) -> tuple[int, Integers]:  # fmt: skip
    """How many pairs there are, and where each state's begin. fill: write them."""
    states, layers = len(lattice.words), len(graph.before_start) - 1
    starts = numpy.zeros(states + 1, dtype=numpy.int64)
    held = numpy.zeros(len(graph.cost), dtype=numpy.int64)
    path = numpy.zeros(layers + 1, dtype=numpy.int64)
    state, at = numpy.zeros(layers + 1, dtype=numpy.int64), numpy.zeros(layers + 1, dtype=numpy.int64)
    largest, count = numpy.zeros(layers + 1), numpy.zeros(layers + 1)
    enter, leave = numpy.zeros(layers + 1), numpy.zeros(layers + 1)
    pairs = 0
    for begin in range(states):
        starts[begin] = pairs
        depth, state[0], at[0] = 0, begin, lattice.next_start[begin]
        while depth >= 0:
            if at[depth] == lattice.next_start[state[depth] + 1]:
                if depth > 0:
                    v = path[depth]
                    for k in range(graph.touch_start[v], graph.touch_start[v + 1]):
                        held[graph.touch[k]] -= 1
                depth -= 1
                continue
            e = at[depth]
            at[depth] += 1
            v = lattice.next_layer[e]
            if depth > 0 and v < path[depth]:
                continue
            entered, left, values = enter[depth], leave[depth], count[depth]
            for k in range(graph.touch_start[v], graph.touch_start[v + 1]):
                h = graph.touch[k]
                if held[h] == 0:
                    values += 1.0
                    if graph.maker[h] == v:
                        left += graph.cost[h]
                    else:
                        entered += graph.cost[h]
                held[h] += 1
                if held[h] == graph.member_start[h + 1] - graph.member_start[h]:  # its maker and all who read it
                    values -= 1.0
                    left -= graph.cost[h]
            depth += 1
            end = lattice.next_state[e]
            path[depth], state[depth], at[depth] = v, end, lattice.next_start[end]
            largest[depth] = max(largest[depth - 1], per_layer[v])
            enter[depth], leave[depth], count[depth] = entered, left, values
            if fill:
                ends[pairs], working[pairs], messages[pairs] = end, largest[depth], values
                entering[pairs], leaving[pairs] = entered, left
            pairs += 1
            if pairs > most:
                return pairs, starts
    starts[states] = pairs
    return pairs, starts
