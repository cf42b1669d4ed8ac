"""A plan as a search finds it: what it takes, and how far it may be from the best. Not here: the searches (`search.py`)."""

from __future__ import annotations

from dataclasses import dataclass

from pdcompiler.core.plan import Evaluation, Plan

CLOSE = 1e-7
"""Two values this near are equal; a plan within it of the bound is the best."""


@dataclass(frozen=True)
class Found:
    """A plan and what it takes. bound: seconds below which there is no plan of the class that was searched.   how: the class,
    and what was not searched, in words.   others: plans nearly as good, best first.   walked: seconds, as `ranking.py` finds
    them.   depths: of an asynchronous plan, which it is walked with."""

    plan: Plan
    evaluation: Evaluation
    bound: float
    how: str
    others: tuple[Found, ...] = ()
    walked: float | None = None
    depths: tuple[int, ...] | None = None

    @property
    def gap(self) -> float:
        """How far the plan may be from the best, relative to the bound."""
        return max(0.0, self.evaluation.seconds / self.bound - 1) if self.bound > 0 else 0.0

    @property
    def proven(self) -> bool:
        """Whether no plan is better."""
        return self.gap <= 2 * CLOSE
