"""The best plan of a suite's own cost model: bisecting on the time of the slowest stage. Here for the suites whose cost is not
the planner's; its own search does the same (`pdcompiler/search.py`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

CLOSE = 1e-9
"""Two times this near are equal."""
T = TypeVar("T")


def fastest(
    probe: Callable[[float], tuple[float, T] | None], low: float, beat: float = float("inf"), close: float = CLOSE
) -> tuple[tuple[float, T] | None, float]:
    """The best plan of all that take less than `beat`, with its seconds, None where there is none; and a bound of all.
    probe: a plan that takes no longer than so many seconds, with its own; None only where there is none.   low: a bound that is
    known.   close: how near the two must come."""
    best = probe(min(beat * (1 - CLOSE), 1e30))
    if best is None:
        return None, beat
    high = best[0]
    while high > low * (1 + 2 * close):
        middle = min((low * high) ** 0.5, high * (1 - close))
        found = probe(middle)
        if found is None:
            low = middle
        else:
            best, high = found, min(found[0], middle)
    return best, min(low, high)
