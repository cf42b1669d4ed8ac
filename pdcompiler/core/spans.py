"""Every stage that a plan may have, as a table: from which layers are done, to which, and what lies between.

    states    0: nothing is done    1, 2, ...    the last: everything        each a downset, in a topological order
    pairs     (state, later state that contains it): one candidate stage, the layers between them

In a chain the states are the prefixes; in a branching graph, its ideals. The searches read this table and nothing else. Not
here: how it is made (`passes/partition/spans.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy
import numpy.typing

from pdcompiler.core.workload import Floats

Integers = numpy.typing.NDArray[numpy.int64]


@dataclass(frozen=True)
class Spans:
    """start: (states + 1), where each state's pairs begin.   end: (pairs), the later state.   forward, backward: seconds, (kinds,
    pairs).   parameters, saved: bytes, sums.   working: bytes, the largest.   entering, leaving: bytes of the values that a stage
    reads of earlier layers, or makes for later ones, each once.   messages: how many these are.   layers: of a pair."""

    states: int
    start: Integers
    end: Integers
    forward: Floats
    backward: Floats
    parameters: Floats
    saved: Floats
    working: Floats
    entering: Floats
    leaving: Floats
    messages: Floats
    layers: Callable[[int], tuple[int, ...]]

    @cached_property
    def before(self) -> Floats:
        """(states): the work of all layers before each state, no more than it is; 0 where it is not known, or differs by kind."""
        both, first = self.forward[0] + self.backward[0], slice(0, int(self.start[1]))
        work = numpy.full(self.states, numpy.inf)
        numpy.minimum.at(work, self.end[first], both[first])  # two states may have several stages between them
        return numpy.where(numpy.isinf(work) | (len(self.forward) > 1), 0.0, work)
