"""The user's own plan against the devices' memory: refused as a planned one is, before anything runs.

Machines whose memory nobody knows (a laptop's cores) hold every plan. Not here: how long it takes (`planner.py`).
"""

from __future__ import annotations

from math import isinf

from pdcompiler.core.errors import CompileError
from pdcompiler.core.explanation import amount
from pdcompiler.core.machine import Machine
from pdcompiler.core.plan import Evaluation, Training
from pdcompiler.core.workload import Workload
from pdcompiler.planner import straight_plan
from pdcompiler.refusal import memory_parts


def knows_memory(machine: Machine) -> bool:
    """Whether any of its devices has a known memory."""
    return not all(isinf(device.memory_bytes) for device, _ in machine.devices)


def check_memory(evaluation: Evaluation, workload: Workload, machine: Machine, training: Training) -> None:
    """Raise CompileError where a stage of an evaluated plan with one rank a stage needs more memory than its device has."""
    costs = evaluation.stages
    lacking = [cost.memory - machine.device_of(index).memory_bytes for index, cost in enumerate(costs)]
    worst = max(range(len(costs)), key=lacking.__getitem__)
    if lacking[worst] <= 0:
        return
    raise CompileError(
        f"stage {worst} of {len(costs)} of the given partition needs {amount(costs[worst].memory)}B, "
        f"the device has {amount(machine.device_of(worst).memory_bytes)}B\n"
        f"  of it: {memory_parts(costs[worst])}",
        ways_out=(*_planned(workload, machine, training), "fewer rows in a microbatch", "more devices, or some with more memory"),
    )


def _planned(workload: Workload, machine: Machine, training: Training) -> tuple[str, ...]:
    """The way out of having the partition planned, where one fits."""
    try:
        found = straight_plan(workload, machine, training)
    except CompileError:
        return ()
    most = max(cost.memory for cost in found.evaluation.stages)
    return (f"let pdcompiler choose the partition (at most {amount(most)}B on a device)",)
