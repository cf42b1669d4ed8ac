"""Compile the native loops of planner and schedules once; each worker of the tests would do it for itself.

`make test` runs this first.
"""

import numpy

from pdcompiler.branching import StraightProblem, plan_straight
from pdcompiler.core.machine import Device, Level, Machine
from pdcompiler.core.period import Seconds, drained, period
from pdcompiler.core.plan import SCHEDULE_KINDS, Training
from pdcompiler.core.ticks import Ticks
from pdcompiler.core.workload import Value, Workload
from pdcompiler.passes.schedules.automatic import automatic
from pdcompiler.planner import plan, straight_plan
from pdcompiler.schedule_problem_strategies import random_problem

DEVICE = Device("device", 1.0, 1.0, 1e9)
LEVELS = (Level("inner", 2, 2.0, 0.0), Level("outer", 2, 1.0, 0.0))


def main() -> None:
    """Every search once: chains and branches, each schedule, with a spare device and with sizes."""
    machine = Machine("machine", LEVELS, ((DEVICE, 4),))
    row, zeros = numpy.ones((1, 4)), numpy.zeros(4)
    branches = (Value(0, (1, 2), 1.0), Value(1, (3,), 1.0), Value(2, (3,), 1.0))
    chain = tuple(Value(i, (i + 1,), 1.0) for i in range(3))
    for values in (branches, chain):
        for schedule in SCHEDULE_KINDS:
            plan(Workload(tuple("abcd"), row, row, zeros, zeros, zeros, values), machine, Training(schedule, 2))
    straight_plan(Workload(tuple("abcd"), row, row, zeros, zeros, zeros, chain), machine, Training())
    edges, ones = ((0, 1), (0, 2), (1, 3), (2, 3)), numpy.ones(4)
    for spare, most in ((None, numpy.inf), (ones, 3.0)):
        plan_straight(StraightProblem(edges, (((0, 1, 2), 1.0),), ones, 2, spare, ones, most))
    period(Ticks((1, 1), (1, 0)), Seconds((1.0, 1.0), (2.0, 2.0)))
    automatic(random_problem(0, sizes=(2, 2))[0])
    drained((1, 1), (1, 0), 2, Seconds((1.0, 1.0), (2.0, 2.0)))


if __name__ == "__main__":
    main()
