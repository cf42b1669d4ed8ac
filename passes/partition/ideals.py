"""All states of a branching graph: its downsets (ideals), the sets of layers that contain what they need.

        b           {}  {a}  {ab} {ac}  {abc}  {abcd}
    a <   > d       states 0 ... 5; from {a} one may do b or c next
        c

Each is found once: a downset's largest layer can be taken away, so it is reached by adding layers in rising order. The layers
that may be done next are a linked list that each step changes and undoes. Not here: stages (`minimax.py`, `lattice_spans.py`).
"""

from __future__ import annotations

import numpy

from pdcompiler.core.lattice import Graph, Lattice, Words
from pdcompiler.core.native import native
from pdcompiler.core.spans import Integers

MOST_STATES = 200_000
"""Beyond it a search takes too long; `orders.py` is for such graphs."""


def ideals(graph: Graph, most: int = MOST_STATES) -> Lattice | None:
    """All downsets, by their number of layers; None where there are more than `most`."""
    no_words, nothing = numpy.zeros((0, 0), dtype=numpy.uint64), numpy.zeros(0, dtype=numpy.int64)
    keys = numpy.random.default_rng(0).integers(1, 2**63, graph.layers, dtype=numpy.uint64)
    states, entries = _walk(graph, most, False, keys, no_words, keys, nothing, nothing, nothing)
    if states > most:
        return None
    words = numpy.zeros((states, -(-max(graph.layers, 1) // 64)), dtype=numpy.uint64)
    key, size = numpy.zeros(states, dtype=numpy.uint64), numpy.zeros(states, dtype=numpy.int64)
    start, layer = numpy.zeros(states + 1, dtype=numpy.int64), numpy.zeros(entries, dtype=numpy.int64)
    _walk(graph, most, True, keys, words, key, size, start, layer)
    order = numpy.argsort(size, kind="stable")
    state = _next_states(words, keys, key, start, layer, _table_size(states))
    return _renumber(Lattice(words, start, layer, state), order)


def _table_size(states: int) -> int:
    return 1 << (2 * states).bit_length()


def _renumber(lattice: Lattice, order: Integers) -> Lattice:
    place = numpy.empty_like(order)
    place[order] = numpy.arange(len(order))
    lengths = numpy.diff(lattice.next_start)[order]
    start = numpy.concatenate([[0], numpy.cumsum(lengths)]).astype(numpy.int64)
    take = numpy.arange(start[-1]) + numpy.repeat(lattice.next_start[order] - start[:-1], lengths)
    return Lattice(lattice.words[order], start, lattice.next_layer[take], place[lattice.next_state[take]])


@native
def _walk(
    graph: Graph, most: int, fill: bool, keys: Words, words: Words, key: Words, size: Integers, start: Integers, layer: Integers
) -> tuple[int, int]:
    """How many states there are (at most one more than `most`), and how many next layers all have together. fill: write them."""
    layers = len(graph.before_start) - 1
    one = numpy.uint64(1)
    following = numpy.full(layers + 1, layers, dtype=numpy.int64)  # a ring in rising order; `layers` is its head
    preceding = numpy.full(layers + 1, layers, dtype=numpy.int64)
    unmet = numpy.empty(layers, dtype=numpy.int64)
    ready = 0
    for v in range(layers):
        unmet[v] = graph.before_start[v + 1] - graph.before_start[v]
        if unmet[v] == 0:
            last = preceding[layers]
            following[last], preceding[v], following[v], preceding[layers] = v, last, layers, v
            ready += 1
    done = numpy.zeros(words.shape[1], dtype=numpy.uint64)
    path = numpy.zeros(layers + 1, dtype=numpy.int64)
    depth, states, entries, own = 0, 0, 0, numpy.uint64(0)
    v = following[layers]
    arrived = True
    while True:
        if arrived:
            if fill:
                words[states], key[states], size[states], start[states] = done, own, depth, entries
                at, w = entries, following[layers]
                while w != layers:
                    layer[at] = w
                    at, w = at + 1, following[w]
            states, entries, arrived = states + 1, entries + ready, False
            if states > most:
                break
        if v == layers:
            if depth == 0:
                break
            depth -= 1
            v = path[depth]
            for k in range(graph.after_start[v + 1] - 1, graph.after_start[v] - 1, -1):
                w = graph.after[k]
                if unmet[w] == 0:
                    following[preceding[w]], preceding[following[w]] = following[w], preceding[w]
                    ready -= 1
                unmet[w] += 1
            following[preceding[v]], preceding[following[v]] = v, v
            ready += 1
            if fill:
                done[v >> 6] ^= one << numpy.uint64(v & 63)
            own ^= keys[v]
            v = following[v]
            continue
        following[preceding[v]], preceding[following[v]] = following[v], preceding[v]
        ready -= 1
        for k in range(graph.after_start[v], graph.after_start[v + 1]):
            w = graph.after[k]
            unmet[w] -= 1
            if unmet[w] == 0:
                p = preceding[v]
                while following[p] < w:
                    p = following[p]
                following[w], preceding[w] = following[p], p
                preceding[following[w]], following[p] = w, w
                ready += 1
        if fill:
            done[v >> 6] ^= one << numpy.uint64(v & 63)
        own ^= keys[v]
        path[depth] = v
        depth += 1
        arrived = True
        v = following[preceding[v]]
    if fill:
        start[states] = entries
    return states, entries


@native
def _next_states(words: Words, keys: Words, key: Words, start: Integers, layer: Integers, table_size: int) -> Integers:
    """Where each next layer leads: the state whose key is this one's with the layer's added (a key is the xor of its layers')."""
    states = len(words)
    mask = numpy.uint64(table_size - 1)
    table = numpy.full(table_size, -1, dtype=numpy.int64)
    for s in range(states):
        slot = key[s] & mask
        while table[slot] >= 0:
            slot = (slot + numpy.uint64(1)) & mask
        table[slot] = s
    found = numpy.empty(len(layer), dtype=numpy.int64)
    for s in range(states):
        for e in range(start[s], start[s + 1]):
            v = layer[e]
            wanted = key[s] ^ keys[v]
            slot = wanted & mask
            while True:
                t = table[slot]
                if key[t] == wanted:
                    same = True
                    for k in range(words.shape[1]):
                        bit = numpy.uint64(1) << numpy.uint64(v & 63) if k == v >> 6 else numpy.uint64(0)
                        same = same and words[t, k] == words[s, k] | bit
                    if same:
                        break
                slot = (slot + numpy.uint64(1)) & mask
            found[e] = t
    return found
