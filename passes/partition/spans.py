"""The table of all candidate stages of a workload (`core/spans.py`).

    chain_spans     stages contiguous in the workload's own order: its prefixes are the states
"""

from __future__ import annotations

from itertools import pairwise

import numpy

from pdcompiler.core.spans import Integers, Spans
from pdcompiler.core.workload import Floats, Value, Workload


def chain_spans(workload: Workload) -> Spans:
    """States are prefixes of the workload's order; those that would part a group that must stand together are left out."""
    cuts = _cuts(workload)
    states = len(cuts)
    begin, end = numpy.triu_indices(states, 1)
    start = numpy.searchsorted(begin, numpy.arange(states + 1)).astype(numpy.int64)
    starts, ends = cuts[begin], cuts[end]

    def between(per_layer: Floats) -> Floats:
        sums = numpy.concatenate([[0.0], numpy.cumsum(per_layer)])
        return numpy.asarray(sums[ends] - sums[starts])

    entering, leaving, messages = _borders(workload, cuts)
    return Spans(
        states, start, end.astype(numpy.int64),
        numpy.array([between(row) for row in workload.forward]), numpy.array([between(row) for row in workload.backward]),
        between(workload.parameters), between(workload.saved), _largest(workload.working, cuts)[begin, end],
        entering[begin, end], leaving[begin, end], messages[begin, end],
        lambda pair: tuple(range(int(starts[pair]), int(ends[pair]))),
    )  # fmt: skip


def _cuts(workload: Workload) -> Integers:
    legal = numpy.ones(workload.layers + 1, dtype=bool)
    for group in workload.together:
        legal[min(group) + 1 : max(group) + 1] = False
    return numpy.flatnonzero(legal).astype(numpy.int64)


def _largest(per_layer: Floats, cuts: Integers) -> Floats:
    """(state, state): the largest of the layers between."""
    table = numpy.zeros((len(cuts), len(cuts)))
    each = numpy.array([per_layer[a:b].max() for a, b in pairwise(cuts)])
    for first in range(len(each)):
        table[first, first + 1 :] = numpy.maximum.accumulate(each[first:])
    return table


def _borders(workload: Workload, cuts: Integers) -> tuple[Floats, Floats, Floats]:
    """(state, state): bytes that enter and that leave the layers between, and how many values these are."""
    size = len(cuts)
    entering, leaving, messages = numpy.zeros((size, size)), numpy.zeros((size, size)), numpy.zeros((size, size))
    for value in _merged(workload, cuts):
        made, readers = value.producer, value.consumers
        before = made
        for reader in readers:  # enters a stage that begins after the last reader before (or the maker) and ends behind this one
            entering[before + 1 : reader + 1, reader + 1 :] += value.bytes
            messages[before + 1 : reader + 1, reader + 1 :] += 1
            before = reader
        leaving[: made + 1, made + 1 : readers[-1] + 1] += value.bytes
        messages[: made + 1, made + 1 : readers[-1] + 1] += 1
    return entering, leaving, messages


def _merged(workload: Workload, cuts: Integers) -> list[Value]:
    """The values between the layers that the cuts leave: makers and readers by the number of their part."""
    part = numpy.searchsorted(cuts, numpy.arange(workload.layers), side="right") - 1
    merged = []
    for value in workload.values:
        made = int(part[value.producer])
        readers = tuple(sorted({int(part[reader]) for reader in value.consumers} - {made}))
        if readers:
            merged.append(Value(made, readers, value.bytes))
    return merged
