"""The best plan of a flushing step by branch and bound over a cap on the stage that holds it up the longest (PLANNER 4.3).

    step    what the slowest stage holds it up (all its microbatches but one) + the sum of what a microbatch takes on every stage
    cap     on the first; under it the least sum is the recurrence's (`by_devices.py`), and grows as the cap falls

             low                  middle                 high
    caps     |--------------------|----------------------|      a plan held up for longer than low, and for no longer than high,
                                                                takes at least low + the least sum under high

Not here: how the sum under a cap is found (`search.py`).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from pdcompiler.found import CLOSE, Found

MOST_CAPS = 60


@dataclass
class Caps:
    """solve: the least sum under a cap, and a plan that has it; None where none is below a value.   held: how long the slowest
    stage of a plan holds a step up.   spent: whether no more caps should be tried."""

    solve: Callable[[float, float], tuple[float, Found | None]]
    held: Callable[[Found], float]
    spent: Callable[[], bool]
    best: Found | None = None
    value: float = inf

    def run(self, best: Found | None, value: float, least: float, work: float) -> tuple[Found | None, float]:
        """A plan that takes less than `value`, or the best that is known; and a bound of all plans. least: no plan is held up for
        less.   work: no sum is below."""
        self.best, self.value = best, value
        low_sum, _ = self._under(least, 0.0) if least else (inf, least)
        high_sum, high = self._under(self.value - work, least)
        open_ = [(least + high_sum, least, low_sum, high, high_sum)]
        for tried in range(MOST_CAPS):
            if not open_ or open_[0][0] >= self.value * (1 - CLOSE):
                return self.best, self.value
            if tried and self.spent():
                break
            _, low, low_sum, high, high_sum = heapq.heappop(open_)
            if low_sum <= high_sum * (1 + CLOSE) or high <= low * (1 + CLOSE):
                continue  # nothing between is better than the plan at its low end
            middle = (low + high) / 2
            if tried % 2 == 0:  # above it, nothing is better than the best
                middle = max(middle, min(self.value * (1 - CLOSE) - high_sum, high * (1 - CLOSE)))
            middle_sum, held = self._under(middle, low)
            heapq.heappush(open_, (low + middle_sum, low, low_sum, held, middle_sum))
            heapq.heappush(open_, (middle + high_sum, middle, middle_sum, high, high_sum))
        return self.best, min(self.value, open_[0][0] if open_ else self.value)

    def _under(self, cap: float, low: float) -> tuple[float, float]:
        """The least sum under a cap, and how long a plan that has it is held up; a plan held up for longer than `low` that is no
        better than the best counts as none."""
        least_sum, found = self.solve(cap * (1 + 1e-12), self.value * (1 - CLOSE) - low)
        if found is None:
            return inf, cap
        if found.evaluation.seconds < self.value * (1 - CLOSE):
            self.best, self.value = found, found.evaluation.seconds
        return least_sum, self.held(found)
