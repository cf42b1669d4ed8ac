"""The ready machines have the figures of their sources."""

import pytest

from pdcompiler import Machine
from pdcompiler.core.machine_file import from_toml
from pdcompiler.core.machines import READY, h100_servers, pipedream_a, pipedream_b, pipedream_c


@pytest.mark.parametrize("name", READY)
def test_each_is_loaded_by_its_own_name_and_written(name: str) -> None:
    machine = Machine.load(name)
    assert machine.name == name and from_toml(machine.to_toml()) == machine
    assert machine.overlap == (name != "laptop")


@pytest.mark.parametrize(
    ("machine", "counts", "bytes_per_second", "memory"),
    [
        (pipedream_a(), [4, 4], [12e9, 1.25e9], 16e9),
        (pipedream_b(), [8, 2], [25e9, 3.125e9], 16e9),
        (pipedream_c(), [4], [5e9], 12e9),
        (h100_servers(2), [8, 2], [450e9, 50e9], 80e9),
        (h100_servers().take(1024), [8, 128], [450e9, 50e9], 80e9),
        (pipedream_a(servers=2), [4, 2], [12e9, 1.25e9], 16e9),
    ],
)
def test_figures(machine: Machine, counts: list[int], bytes_per_second: list[float], memory: float) -> None:
    assert [level.count for level in machine.levels] == counts
    assert [level.bytes_per_second for level in machine.levels] == bytes_per_second
    assert machine.device_of(0).memory_bytes == memory


def test_pipedreams_links_are_those_of_its_bits() -> None:
    assert [8 * make().levels[-1].bytes_per_second for make in (pipedream_a, pipedream_b, pipedream_c)] == [10e9, 25e9, 40e9]
