"""Where no plan fits the devices' memory: which stage lacks how much in the plan that needs least, and what would need less.

Not here: the user's own plan (`own_plan.py`), and how plans are found (`planner.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

from pdcompiler.core.errors import CompileError
from pdcompiler.core.explanation import amount
from pdcompiler.core.machine import Machine
from pdcompiler.core.plan import StageCost, Training
from pdcompiler.found import Found

AnyPlan: TypeAlias = Callable[[Machine, Training], Found | None]


def refuse(machine: Machine, training: Training, where: str, any_plan: AnyPlan, *, may_recompute: bool = True) -> Found:
    """Say which stage lacks how much memory in the plan that needs least of it, and what would need less."""
    found = _least_memory(machine, training, any_plan)
    costs = found.evaluation.stages
    worst = max(range(len(costs)), key=lambda index: costs[index].memory)
    ways = []
    if not training.recompute and may_recompute:
        other = _least_memory(machine, replace(training, recompute=True), any_plan)
        ways.append(f"stages that recompute ({amount(_most(other))}B)")
    if training.optimizer_bytes > 0:
        other = _least_memory(machine, replace(training, optimizer_bytes=0.0), any_plan)
        ways.append(f"an optimizer without state ({amount(_most(other))}B)")
    raise CompileError(
        f"stage {worst} of {len(costs)} needs {amount(costs[worst].memory)}B, "
        f"the device has {amount(machine.devices[0][0].memory_bytes)}B\n"
        f"  with {where}, no plan needs less; of it: {memory_parts(costs[worst])}",
        ways_out=(*ways, "fewer rows in a microbatch", "more devices, or some with more memory"),
    )


def _least_memory(machine: Machine, training: Training, any_plan: AnyPlan) -> Found:
    """A plan whose fullest device is as empty as it can be, within a thousandth."""
    low, high, found = 0.0, 1.0, None
    while found is None:
        high *= 4
        found = any_plan(_with_memory(machine, high), training)
    high = min(high, _most(found) / machine.devices[0][0].memory_bytes)
    while high > low * 1.001:
        middle = (low + high) / 2
        other = any_plan(_with_memory(machine, middle), training)
        low, high, found = (middle, high, found) if other is None else (low, middle, other)
    return found


def _with_memory(machine: Machine, factor: float) -> Machine:
    kinds = tuple((replace(device, memory_bytes=device.memory_bytes * factor), count) for device, count in machine.devices)
    return replace(machine, devices=kinds)


def _most(found: Found) -> float:
    return max(cost.memory for cost in found.evaluation.stages)


def memory_parts(cost: StageCost) -> str:
    """A stage's memory by kind, in words."""
    named = {
        "weights": cost.weights, "gradients": cost.gradients, "optimizer": cost.optimizer,
        f"saved values of {cost.in_flight} microbatches in flight": cost.saved, "working memory": cost.working,
    }  # fmt: skip
    return ", ".join(f"{name} {amount(nbytes)}B" for name, nbytes in named.items() if nbytes)
