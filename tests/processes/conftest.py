"""One pool of processes for all tests of this folder."""

from collections.abc import Callable, Iterator

import pytest

from tests.processes.pool import Group, Pool

MOST_RANKS = 4


@pytest.fixture(scope="session")
def pool() -> Iterator[Callable[[int], Group]]:
    """pool(n): n ranks. The processes are started when first asked for."""
    processes = Pool(MOST_RANKS)
    yield processes.of
    processes.close()
