"""The pool itself: what ranks give comes back in order; failures and silence are reported rank by rank, and survived."""

import os
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from tests.processes.pool import CaseFailed, Group, Pool

pytestmark = pytest.mark.processes


def add_up(value: float) -> tuple[int, float]:
    total = torch.tensor(value)
    dist.all_reduce(total)
    return dist.get_rank(), total.item()


def misbehave() -> str:
    """Each rank in its own way."""
    if dist.get_rank() == 0:
        time.sleep(600)
    if dist.get_rank() == 1:
        raise ValueError("no more bananas")
    if dist.get_rank() == 2:
        os._exit(3)
    return "fine"


def test_results_come_in_the_order_of_the_ranks(pool: Callable[[int], Group]) -> None:
    assert pool(2).run(add_up, 1.5) == [(0, 3.0), (1, 3.0)]


def test_what_each_rank_said_is_told_and_the_next_case_gets_new_processes() -> None:
    pool = Pool(4)
    try:
        with pytest.raises(CaseFailed) as failure:
            pool.of(4).run(misbehave)
        told = str(failure.value).split("\nrank ")[1:]
        assert told[0].startswith("0 did not answer, and stands at") and "in misbehave" in told[0]
        assert told[1].startswith("1 raised") and "ValueError: no more bananas" in told[1]
        assert told[2] == "2 raised\nthe process ended with code 3"
        assert told[3] == "3 gave 'fine'"
        assert pool.ranks == []
        pool.size = 1
        assert pool.of(1).run(add_up, 2.0) == [(0, 2.0)]
        process = pool.ranks[0].process
    finally:
        pool.close()
    assert process.exitcode == 0
