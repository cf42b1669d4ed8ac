"""Devices, nested levels, and parts of a machine."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcompiler import CompileError, Machine
from pdcompiler.core.cost import Cost
from pdcompiler.core.machine import CORE, Device, Level

FAST = Device("fast", 4e12, 4e11, 16e9, 2e-6)
SLOW = Device("slow", 1e12, 1e11, 8e9)
INSIDE, ACROSS = Level("inside", 4, 12e9, 5e-6), Level("across", 3, 1e9, 5e-5)
SERVERS = Machine("servers", (INSIDE, ACROSS), ((FAST, 4), (SLOW, None)), overlap=True)


def test_units_are_joined_by_the_smallest_that_holds_them() -> None:
    assert SERVERS.world_size == 12 and SERVERS.unit_sizes == (4, 12)
    assert [SERVERS.level_of(*pair) for pair in ((0, 0), (0, 3), (4, 7), (3, 4), (0, 11), (8, 10))] == [0, 0, 0, 1, 1, 0]
    three = Machine("three", (INSIDE, replace(ACROSS, count=2), replace(ACROSS, name="hall", count=2)))
    assert [three.level_of(*pair) for pair in ((1, 2), (3, 4), (7, 8), (0, 15))] == [0, 1, 2, 2]


def test_kinds_lie_along_the_leaves() -> None:
    assert SERVERS.devices == ((FAST, 4), (SLOW, 8))
    assert [SERVERS.kind_of(device) for device in (0, 3, 4, 11)] == [0, 0, 1, 1]
    assert SERVERS.device_of(4) is SLOW


def test_costs_become_seconds() -> None:
    assert float(SLOW.compute_seconds(Cost(flops=2e12, bytes_read=1e11, bytes_written=2e11))) == 5.0
    assert float(FAST.compute_seconds(Cost(operations=1), operations=2)) == 6e-6
    assert float(FAST.compute_seconds(Cost(flops=1e12, seconds=0.25))) == 0.25  # measured
    assert float(SERVERS.compute_seconds(Cost(flops=8e12))) == 2.0
    assert float(SERVERS.transfer_seconds(1e9)) == pytest.approx(1.00005)


def test_the_worst_level_that_joins_anything_prices_a_message() -> None:
    assert (SERVERS.link_bytes_per_second, SERVERS.link_latency_seconds) == (1e9, 5e-5)
    alone = Machine("alone", (Level("inside", 1, 1.0, 1.0), ACROSS))
    assert (alone.link_bytes_per_second, alone.link_latency_seconds) == (1e9, 5e-5)


@pytest.mark.parametrize(
    ("world_size", "counts", "kinds", "used"),
    [
        (1, [1], [1], None),
        (3, [3], [3], None),
        (4, [4], [4], None),
        (6, [4, 2], [4, 2], 6),
        (8, [4, 2], [4, 4], None),
        (12, [4, 3], [4, 8], None),
    ],
)
def test_take(world_size: int, counts: list[int], kinds: list[int], used: int | None) -> None:
    part = SERVERS.take(world_size)
    assert [level.count for level in part.levels] == counts
    assert [count for _, count in part.devices] == kinds
    assert part.used == used and part.world_size == world_size


@given(st.integers(1, 12), st.data())
def test_a_part_keeps_places_and_links(world_size: int, data: st.DataObject) -> None:
    part = SERVERS.take(world_size)
    first, last = sorted(data.draw(st.tuples(*[st.integers(0, world_size - 1)] * 2)))
    assert part.levels[part.level_of(first, last)].name == SERVERS.levels[SERVERS.level_of(first, last)].name
    assert part.device_of(last) == SERVERS.device_of(last)
    smaller = data.draw(st.integers(1, world_size))
    assert part.take(smaller) == SERVERS.take(smaller)


def test_the_default_has_any_number_of_devices() -> None:
    assert Machine().is_unlimited and Machine().unit_sizes == (0,)
    assert Machine().take(1000).devices == ((CORE, 1000),)
    assert Machine().level_of(0, 10**6) == 0 and Machine().device_of(10**6) is CORE
    with pytest.raises(CompileError, match="any number of devices"):
        _ = Machine().world_size
    many = Machine("many", (INSIDE, replace(ACROSS, count=None)), ((FAST, 4), (SLOW, None)))
    assert many.take(18).unit_sizes == (4, 20) and many.take(18).devices == ((FAST, 4), (SLOW, 14))
    assert many.take(3).devices == ((FAST, 3),)


def test_case_36_a_machine_has_only_so_many_devices() -> None:
    with pytest.raises(CompileError) as caught:
        SERVERS.take(13)
    assert str(caught.value) == (
        "world_size is 13, machine 'servers' has 12\n  try: world_size=12 or less\n  try: a machine with 13 devices"
    )


def test_flat() -> None:
    machine = Machine.flat(3, bytes_per_second=1e9, latency_seconds=0, device=FAST, overlap=True)
    assert machine.world_size == 3 and machine.devices == ((FAST, 3),) and machine.link_latency_seconds == 0
    assert Machine.flat().is_unlimited and Machine.flat(2).overlap is False


def device(**changes: Any) -> Device:
    return replace(FAST, **changes)


WRONG: dict[str, tuple[Any, str]] = {
    "negative": (lambda: device(flops_per_second=-1), "device 'fast': flops_per_second must be above 0, is -1"),
    "not a number": (lambda: device(memory_bytes=math.nan), "device 'fast': memory_bytes must be above 0, is nan"),
    "text": (lambda: device(memory_bytes="16 GB"), "device 'fast': memory_bytes is '16 GB', expected a number"),
    "a truth": (lambda: device(memory_bytes=True), "device 'fast': memory_bytes is True, expected a number"),
    "negative latency": (
        lambda: replace(INSIDE, latency_seconds=-1e-6),
        "level 'inside': latency_seconds must be at least 0, is -1e-06",
    ),
    "no bandwidth": (lambda: replace(INSIDE, bytes_per_second=0), "level 'inside': bytes_per_second must be above 0, is 0"),
    "level of 0": (lambda: replace(INSIDE, count=0), "level 'inside': count is 0, expected a whole number of at least 1"),
    "half a device": (lambda: replace(INSIDE, count=2.5), "level 'inside': count is 2.5, expected a whole number of at least 1"),
    "no levels": (lambda: Machine("m", ()), "machine 'm' has no levels"),
    "no devices": (lambda: Machine("m", devices=()), "machine 'm' has no devices"),
    "inner level of any number": (
        lambda: Machine("m", (replace(INSIDE, count=None), ACROSS)),
        "machine 'm': level 'inside' needs a count; only the outermost may hold any number",
    ),
    "first kind of any number": (
        lambda: Machine("m", devices=((FAST, None), (FAST, None))),
        "machine 'm': device 'fast' needs a count; only the last kind may be all that are left",
    ),
    "too many": (
        lambda: Machine("m", (INSIDE, ACROSS), ((FAST, 8), (SLOW, 5))),
        "machine 'm' has room for 12 devices (3 x 4), its kinds are 13",
    ),
    "too few": (lambda: Machine("m", (INSIDE,), ((FAST, 3),)), "machine 'm' has room for 4 devices (4), its kinds are 3"),
    "none left": (
        lambda: Machine("m", (INSIDE,), ((FAST, 4), (SLOW, None))),
        "machine 'm' has room for 4 devices (4), its kinds are 4 and more",
    ),
    "counted kinds of any number": (
        lambda: Machine("m", devices=((FAST, 4),)),
        "machine 'm' has any number of devices, its kinds only 4",
    ),
    "more used than there are": (lambda: replace(SERVERS, used=13), "machine 'servers': 13 devices used, but its levels hold 12"),
    "no ranks": (lambda: SERVERS.take(0), "world_size is 0, expected a whole number of at least 1"),
}


@pytest.mark.parametrize("case", WRONG)
def test_case_36_a_machine_that_cannot_be_is_refused(case: str) -> None:
    make, message = WRONG[case]
    with pytest.raises(CompileError) as caught:
        make()
    assert str(caught.value).splitlines()[0] == message
