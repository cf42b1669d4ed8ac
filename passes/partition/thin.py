"""Fewer places where a stage may begin, for models so large that not every one can be searched: the narrowest cuts stay.

    cut before     a       b       c       d             most = 3
    crosses        64 MB   192 MB  64 MB   256 MB   ->   parts [..a) [a..c) [c..)

Among equally narrow ones those go first that leave the smallest part. A heuristic: a plan found so has a gap, where the whole
has a proof. Not here: what is exact (`fold.py`).
"""

from __future__ import annotations

import heapq
from itertools import pairwise

import numpy

from pdcompiler.core.workload import Floats, Workload


def narrow_parts(workload: Workload, most: int) -> tuple[tuple[int, ...], ...]:
    """The layers of each of at most `most` parts, in the workload's own order."""
    crossing, work = _crossing(workload), numpy.concatenate([[0.0], numpy.cumsum(workload.seconds[0])])
    kept = set(range(workload.layers + 1))
    before = {k: k - 1 for k in range(1, workload.layers + 1)}
    after = {k: k + 1 for k in range(workload.layers)}

    def rank(cut: int) -> tuple[float, float, int]:
        return -float(crossing[cut]), float(work[after[cut]] - work[before[cut]]), cut

    waiting = [rank(cut) for cut in range(1, workload.layers)]
    heapq.heapify(waiting)
    while len(kept) > most + 1 and waiting:
        found = heapq.heappop(waiting)
        cut = found[-1]
        if rank(cut) != found:  # a neighbour went meanwhile
            heapq.heappush(waiting, rank(cut))
            continue
        kept.remove(cut)
        after[before[cut]], before[after[cut]] = after[cut], before[cut]
    cuts = sorted(kept)
    return tuple(tuple(range(first, last)) for first, last in pairwise(cuts))


def _crossing(workload: Workload) -> Floats:
    """Bytes of the values that cross the cut before each layer."""
    change = numpy.zeros(workload.layers + 1)
    for value in workload.values:
        change[value.producer + 1] += value.bytes
        change[max(value.consumers) + 1] -= value.bytes
    return numpy.asarray(numpy.cumsum(change))
