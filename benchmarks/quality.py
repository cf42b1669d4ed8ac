"""What every suite of `partition_quality.py` yields. Here so that suites and the script can both import it."""

from __future__ import annotations

from dataclasses import dataclass

CLOSE = 1e-9
"""Two times this near are equal; the planner's own searches end earlier."""


@dataclass(frozen=True)
class Row:
    """One workload. ours, reference, bound: in the suite's own unit; the reference is None where theirs found no plan, ours
    where we found none.   proven: whether no plan is better than ours.   seconds: that planning took.   missed: which of the
    suite's bars it misses, in words; empty: none."""

    name: str
    ours: float | None
    reference: float | None
    bound: float | None
    proven: bool
    seconds: float
    missed: str = ""
