"""Measuring this computer: figures that can be, and no process left over."""

import math
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcompiler import Machine
from pdcompiler.core.errors import WorkerError
from pdcompiler.core.machine_file import from_toml
from pdcompiler.core.measure import MESSAGE_BYTES, fit_line, measure, memory_of_computer


def children() -> set[str]:
    """The processes that this one has started and not yet buried."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:  # it ended meanwhile
            continue
        if int(fields[1]) == os.getpid():
            found.add(stat.parent.name)
    return found


@pytest.mark.full
@pytest.mark.processes
def test_this_computer() -> None:
    before, said = children(), list[str]()
    machine = Machine.measure(progress=said.append)
    assert children() == before
    assert said == ["matrix products", "memory", "small operations", "messages"]
    device = machine.device_of(0)
    assert 1e8 < device.flops_per_second < 1e16
    assert 1e8 < device.memory_bytes_per_second < 1e14
    assert 2**28 < device.memory_bytes < 2**50
    assert 0 < device.seconds_per_operation < 1e-2
    assert 1e6 < machine.link_bytes_per_second < math.inf
    assert 0 <= machine.link_latency_seconds < 1
    assert from_toml(machine.to_toml()) == machine


@pytest.mark.full
@pytest.mark.processes
def test_a_worker_that_fails_is_named_and_none_is_left() -> None:
    before = children()
    with pytest.raises(WorkerError, match="measuring failed: AttributeError: module 'torch' has no attribute 'float33'"):
        measure(dtype="float33")
    assert children() == before


@pytest.mark.processes
def test_a_measurement_that_takes_too_long_is_ended() -> None:
    before = children()
    with pytest.raises(WorkerError, match=r"measuring took longer than timeout=0\.05 seconds"):
        Machine.measure(timeout=0.05)
    assert children() == before


@given(st.floats(0, 1e-3), st.floats(1e6, 1e12))
def test_a_line_is_found_again(latency: float, bytes_per_second: float) -> None:
    seconds = [latency + size / bytes_per_second for size in MESSAGE_BYTES]
    found, speed = fit_line(MESSAGE_BYTES, seconds)
    for size, wanted in zip(MESSAGE_BYTES, seconds, strict=True):
        assert found + size / speed == pytest.approx(wanted, rel=1e-6)


@given(st.lists(st.floats(1e-6, 1.0), min_size=len(MESSAGE_BYTES), max_size=len(MESSAGE_BYTES)))
def test_a_fit_is_never_negative(seconds: list[float]) -> None:
    latency, bytes_per_second = fit_line(MESSAGE_BYTES, seconds)
    assert latency >= 0 and bytes_per_second > 0
    assert latency > 0 or bytes_per_second < math.inf


def test_the_memory_is_that_of_the_computer() -> None:
    told = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal:"))
    assert 0 < memory_of_computer() <= int(told.split()[1]) * 1024
