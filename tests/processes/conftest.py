"""One pool of processes per world size, for all tests of this folder."""

from collections.abc import Callable, Iterator

import pytest

from tests.processes.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Callable[[int], Pool]]:
    """pool(n): the pool with n ranks, started when first asked for."""
    pools: dict[int, Pool] = {}
    yield lambda world_size: pools.setdefault(world_size, Pool(world_size))
    for each in pools.values():
        each.close()
