"""A plan at the depths that its ticks will really have: weight versions, saved values, seconds of a minibatch.

The planner counts PipeDream's depths, or those that it found; `compile` runs those that the user asked for, perhaps with vertical
sync, which keeps more versions.
"""

from __future__ import annotations

from dataclasses import replace

from pdcompiler.core.machine import Machine
from pdcompiler.core.period import period
from pdcompiler.core.plan import Evaluation, StageCost
from pdcompiler.core.ticks import Ticks
from pdcompiler.found import Found
from pdcompiler.ranking import seconds_of


def at_depths(found: Found, ticks: Ticks, machine: Machine) -> Found:
    """The same plan, as it will run."""
    walked = period(ticks, seconds_of(found.evaluation, machine))
    return replace(found, evaluation=evaluation_at(found.evaluation, ticks), walked=walked, depths=ticks.depths)


def evaluation_at(evaluation: Evaluation, ticks: Ticks) -> Evaluation:
    """What its stages hold then."""
    return replace(evaluation, stages=tuple(_cost(cost, ticks, stage) for stage, cost in enumerate(evaluation.stages)))


def _cost(cost: StageCost, ticks: Ticks, stage: int) -> StageCost:
    flights, versions = ticks.in_flight(stage), ticks.versions(stage)
    saved, weights = cost.saved / cost.in_flight * flights, cost.weights / cost.versions * versions
    return replace(cost, saved=saved, weights=weights, in_flight=flights, versions=versions)
