"""What is no plan for a workload and a machine is refused, with the layers."""

from __future__ import annotations

from dataclasses import replace

import numpy
import pytest

from pdcompiler.core.errors import CompileError
from pdcompiler.core.machine import Device, Level, Machine
from pdcompiler.core.plan import Plan, PlannedStage, Training
from pdcompiler.core.workload import Value, Workload
from pdcompiler.passes.partition.evaluate import evaluate

ONES = numpy.ones(3)
ROW = Workload(
    ("a", "b", "c"), ONES[None], ONES[None], ONES, ONES, ONES, (Value(0, (1,), 4.0), Value(1, (2,), 4.0)), together=((1, 2),)
)
MACHINE = Machine.flat(3, bytes_per_second=4.0, latency_seconds=0.0, device=Device("device", 1.0, 1.0, 100.0), overlap=True)


def plan(*stages: tuple[int, ...], replicas: int = 1) -> Plan:
    return Plan(tuple(PlannedStage(layers, replicas) for layers in stages))


WRONG = {
    "a layer is left out": (plan((0,), (1,)), "the plan leaves out layer 'c' (2 of 3 layers)"),
    "a layer twice": (plan((0, 1), (1, 2)), "the plan holds a layer twice (4 of 3 layers)"),
    "not in order": (plan((1, 2), (0,)), "the plan is not in order: 'b' (stage 0) reads 'a' of the later stage 1"),
    "parted": (plan((0, 1), (2,)), "the plan parts layers that must stand together: ['b', 'c']"),
    "no replicas": (plan((0,), (1, 2), replicas=0), "the plan 0-0 has a stage without replicas"),
    "too many devices": (plan((0,), (1, 2), replicas=2), "the plan 2-2 needs 4 devices, the machine has 3"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_plan(case: str) -> None:
    chosen, message = WRONG[case]
    with pytest.raises(CompileError) as caught:
        evaluate(chosen, ROW, MACHINE, Training())
    assert str(caught.value) == message


def test_a_plan_that_the_memory_does_not_hold_does_not_fit() -> None:
    """Stage 1: weights 2 bytes, gradients 2, optimizer 4, one microbatch's saved 2, working 1 + 4 that enter."""
    chosen, training = plan((0,), (1, 2)), Training("1f1b", 2)
    judged = evaluate(chosen, ROW, MACHINE, training)
    assert judged.fits and [cost.memory for cost in judged.stages] == [1 + 1 + 2 + 2 + 1 + 4, 2 + 2 + 4 + 2 + 1 + 4]
    kinds = tuple((replace(device, memory_bytes=14.9), count) for device, count in MACHINE.devices)
    assert not evaluate(chosen, ROW, replace(MACHINE, devices=kinds), training).fits


def test_pipelines_that_leave_devices_idle_stand_apart() -> None:
    """Two pipelines of one device each, on two servers of two: their gradients cross the servers' link."""
    layer = Workload(("layer",), numpy.zeros((1, 1)), numpy.ones((1, 1)), numpy.ones(1), numpy.zeros(1), numpy.zeros(1), ())
    levels = (Level("inner", 2, 1.0, 0.0), Level("outer", 2, 0.5, 0.0))
    machine = Machine("servers", levels, ((Device("device", 1.0, 1.0, 1e9), 4),), overlap=False)
    training = Training("pipedream-2bw", microbatches=3, optimizer_bytes=0.0)
    assert evaluate(Plan((PlannedStage((0,)),), 2), layer, machine, training).seconds == pytest.approx((1 + 1 / 0.5 / 2) / 2)
    assert evaluate(Plan((PlannedStage((0,), 2),), 1), layer, machine, training).seconds == pytest.approx(2 / 3 + 1 / 3)
