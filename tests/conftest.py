"""What every test runs under: one thread, no network, the same random examples each time, GPU tests only on a GPU.

The cases are run for many schedules and numbers of stages. Of each such matrix one seeded variant runs every time; the others are
`full`: they run in `make test-all`.
"""

import os
import zlib
from collections import defaultdict
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when transformers is imported

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings

torch.set_num_threads(1)

# A compile takes seconds, so no example has a deadline. `--hypothesis-profile=full` looks further, and at random.
settings.register_profile("stable", max_examples=50, derandomize=True, deadline=None, database=None)
settings.register_profile("full", max_examples=1000, deadline=None, print_blob=True)
settings.load_profile("stable")


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    on_gpu = [item for item in items if item.get_closest_marker("cuda")]
    if on_gpu and not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="no GPU on this machine"))
    sample_matrices(items)


def sample_matrices(items: list[pytest.Item]) -> None:
    """Mark all but one variant of each parametrized case as full; which one stays depends on the test's name alone."""
    matrices: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if "tests/cases/" in item.path.as_posix() and "[" in item.name:
            matrices[item.nodeid.split("[")[0]].append(item)
    for name, variants in matrices.items():
        quick = [item for item in variants if not item.get_closest_marker("full")] or variants
        stays = quick[zlib.crc32(name.encode()) % len(quick)]
        for item in variants:
            if item is not stays:
                item.add_marker(pytest.mark.full)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """As rank 0 of 2, with no way to make a process group."""

    def forbidden(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a process group is made")

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(dist, "init_process_group", forbidden)
