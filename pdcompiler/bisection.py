"""The plan with the fastest slowest stage, by bisecting on its time; for any cost model that can say what fits within a time.

Not here: what a plan within a time is (`passes/partition/probe.py`), and other objectives than the slowest stage.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import TypeVar

from pdcompiler.found import CLOSE

UNLIMITED = 1e30
"""Seconds: a time that every stage keeps."""
FIRST = (1.02, 1.1, 1.4, 2.0, 4.0)
"""Times the bound: where some plan is easily found, one not far from it."""
T = TypeVar("T")


def fastest(
    probe: Callable[[float], tuple[float, T] | None], low: float, beat: float = inf, close: float = CLOSE, equal: float = CLOSE
) -> tuple[tuple[float, T] | None, float]:
    """The best plan of all that take less than `beat`, with its seconds, None where there is none; and a bound of all.
    probe: a plan that takes no longer than so many seconds, with its own; None only where there is none.   low: a bound that is
    known.   close: how near the two must come.   equal: two times this near are."""
    best = probe(beat * (1 - equal)) if beat < inf else _first(probe, low)
    if best is None:
        return None, beat
    high = best[0]
    while high > low * (1 + 2 * close):
        middle = min((low * high) ** 0.5, high * (1 - equal)) if low else high / 4
        found = probe(middle)
        if found is None:
            low = middle
        else:
            best, high = found, min(found[0], middle)
    return best, min(low, high)


def _first(probe: Callable[[float], tuple[float, T] | None], low: float) -> tuple[float, T] | None:
    for factor in FIRST if low else ():
        if (found := probe(low * factor)) is not None:
            return found
    return probe(UNLIMITED)
