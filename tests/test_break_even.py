"""Where the best plan changes with the bandwidth: against plans whose times are known, and VGG-16's of the PipeDream paper."""

from __future__ import annotations

from math import inf
from pathlib import Path

import numpy
import pytest

from pdcompiler.break_even import BestRange, as_text, break_even, break_even_of_machine, with_bandwidth
from pdcompiler.core.errors import CompileError
from pdcompiler.core.graph_txt import Graph
from pdcompiler.core.machine import Device, Level, Machine
from pdcompiler.core.plan import Evaluation, Plan, PlannedStage, Training
from pdcompiler.core.workload import Value, Workload
from pdcompiler.found import Found
from pdcompiler.passes.partition.evaluate import evaluate

PROFILE = Path(__file__).parents[2] / "shared" / "data" / "pipedream_profiles" / "vgg16.txt"

ONE, THREE_ONE, FOUR = (
    Plan(tuple(PlannedStage((layer,), replicas) for layer, replicas in enumerate(stages))) for stages in ((1,), (3, 1), (4,))
)
TIMES = {ONE: (8.0, 0.0), THREE_ONE: (4.0, 12.0), FOUR: (2.0, 40.0)}
"""Seconds without transfers, and what transfers take at one byte per second: 3-1 is better than one device from 3 bytes per
second on, four replicas are better than 3-1 from 14 on."""


def seconds(chosen: Plan, bandwidth: float) -> float:
    compute, transfers = TIMES[chosen]
    return compute + transfers / bandwidth


def best(bandwidth: float) -> Found:
    chosen = min(TIMES, key=lambda one: seconds(one, bandwidth))
    return Found(chosen, Evaluation(seconds(chosen, bandwidth), (), True), 0.0, "")


def test_ends_of_ranges_are_where_two_plans_take_as_long() -> None:
    ranges = break_even(best, seconds, 1.0, 100.0, close=1e-6)
    assert [own.plan for own in ranges] == [ONE, THREE_ONE, FOUR]
    assert [own.high for own in ranges] == pytest.approx([3.0, 14.0, 100.0], rel=1e-5)
    assert [own.low for own in ranges] == [1.0, ranges[0].high, ranges[1].high]
    assert ranges[1].seconds_at_high == pytest.approx(ranges[2].seconds_at_low, rel=1e-5)


def test_several_plans_between_two_of_the_bandwidths_looked_at() -> None:
    """2.9 to 14.5 is one step of a search that looks at ends alone."""
    ranges = break_even(best, seconds, 2.9, 14.5)
    assert [str(own.plan) for own in ranges] == ["1", "3-1", "4"]


def test_a_plan_is_kept_as_long_as_none_is_faster_by_what_is_worth_it() -> None:
    kept = break_even(best, seconds, 1.0, 100.0, worth=1.0)
    assert [own.plan for own in kept] == [ONE, FOUR]  # from 20 bytes per second on, four take half as long as one
    assert kept[0].high == pytest.approx(20.0, rel=1e-2)


def test_plans_that_tie_or_only_cut_elsewhere_are_one_range() -> None:
    other = Plan(tuple(PlannedStage((layer + 1,), stage.replicas) for layer, stage in enumerate(THREE_ONE.stages)))

    def either(bandwidth: float) -> Found:
        chosen = THREE_ONE if bandwidth < 5 else other
        return Found(chosen, Evaluation(1 / bandwidth, (), True), 0.0, "")

    def taken(chosen: Plan, bandwidth: float) -> float:
        return 1 / bandwidth if (chosen is THREE_ONE) == (bandwidth < 5) else 2 / bandwidth

    (only,) = break_even(either, taken, 1.0, 10.0)
    assert (only.low, only.high, only.seconds_at_low, only.seconds_at_high) == (1.0, 10.0, 1.0, 0.1)


def test_as_text() -> None:
    ranges = (BestRange(ONE, 1.0, 3.0, 8.0, 8.0), BestRange(THREE_ONE, 3.0, 1.25e10, 8.0, 5.25))
    assert as_text(ranges).splitlines() == [
        "from         to           plan                     seconds",
        "1            3            1                        8 to 8",
        "3            1.25e+10     3-1                      8 to 5.25",
    ]


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-1.0, 1.0), (2.0, 1.0), (1.0, 1.0), (float("nan"), 1.0), (1.0, inf)])
def test_bandwidths_that_are_none(low: float, high: float) -> None:
    with pytest.raises(CompileError, match="expected 0 < from < to"):
        break_even(best, seconds, low, high)


def test_the_outermost_levels_bandwidth_is_varied() -> None:
    """Two equal layers on two devices: cut in two, 1 MB each way takes 2 s at 1 MB/s, as long as one layer more."""
    two = numpy.array([[1.0, 1.0]])
    workload = Workload(("a", "b"), two, two, numpy.array([1e12, 1e12]), numpy.zeros(2), numpy.zeros(2), (Value(0, (1,), 1e6),))
    levels = Level("inner", 1, 1e12, 0.0), Level("outer", 2, 5.0, 0.0)
    machine = Machine("m", levels, ((Device("d", 1.0, 1.0, 1e15), None),), overlap=True)
    assert [level.bytes_per_second for level in with_bandwidth(machine, 7.0).levels] == [1e12, 7.0]
    told: list[float] = []
    ranges = break_even_of_machine(workload, machine, Training("pipedream"), 1e4, 1e8, watch=told.append)
    assert [str(own.plan) for own in ranges] == ["1", "1-1"]
    assert ranges[0].high == pytest.approx(0.5e6, rel=0.01) and ranges[1].seconds_at_high == 2.0
    assert told[0] == 1e4 and 1e8 in told


@pytest.mark.skipif(not PROFILE.exists(), reason=f"there is no {PROFILE}")
def test_vgg16_on_16_devices_has_the_papers_plan_at_25_gigabits_per_second() -> None:
    workload, training = Graph.load(PROFILE).to_workload(), Training("pipedream", optimizer_bytes=0.0, reduce_factor=4.0)
    device = Device("V100", 1.0, 1.0, 1e15)
    machine = Machine.flat(16, bytes_per_second=3.125e9, latency_seconds=0.0, device=device, overlap=True)
    ranges = break_even_of_machine(workload, machine, training, 1e9, 1e10, worth=1e-3)
    (own,) = [own for own in ranges if own.low <= 3.125e9 < own.high]
    assert str(own.plan) == "15-1"
    assert own.low == pytest.approx(2.15e9, rel=0.01) and own.high == pytest.approx(9.6e9, rel=0.03)
    seconds = evaluate(own.plan, workload, machine, training).seconds
    assert seconds == pytest.approx(45.525e-3, rel=1e-4)  # what PipeDream's optimizer says of its 15-1
    assert str(ranges[0].plan) == "13-2-1"  # and of 10 Gbit/s
