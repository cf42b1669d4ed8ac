"""Training without flushes on gloo: each rank's weights after every update, and the losses, are the oracle's."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pdcompiler.testing import AsynchronousCase
from tests.processes.pool import Group
from tests.streams import assert_equal, case_of, run

pytestmark = pytest.mark.processes


CASES = {
    "1-1": case_of((1, 1), "stash", "adamw", 7),
    "2": case_of((2,), "stash", "momentum", 7),
    "2-1": case_of((2, 1), "stash", "momentum", 9, drains=(5,)),
    "1-2, deeper": case_of((1, 2), "stash", "adamw", 9, depths=(3, 0)),
    "2-1, vertical sync": case_of((2, 1), "vertical-sync", "sgd", 9),
    "1-1-1, 2bw": case_of((1, 1, 1), "2bw", "adamw", 9, batch=3, rows=7, drains=(3,)),
    "1-1-1-1": case_of((1, 1, 1, 1), "stash", "adamw", 12),
    "2-1-1": case_of((2, 1, 1), "stash", "momentum", 11, drains=(6,)),
    "2-2, 2bw": case_of((2, 2), "2bw", "momentum", 12, batch=4, rows=9),
}
EVERY_TIME = ("1-1", "2-1", "1-1-1, 2bw", "2-1-1")


def stream(case: AsynchronousCase) -> tuple[dict[int, int], int]:
    """Checked on each rank; gives how many versions of which stage it saw, and how many losses."""
    seen = run(case)
    assert_equal(case, seen)
    return {stage: len(versions) for stage, versions in seen.weights.items()}, len(seen.losses)


@pytest.mark.parametrize("name", [name if name in EVERY_TIME else pytest.param(name, marks=pytest.mark.full) for name in CASES])
def test_each_rank_has_the_oracles_weights_after_every_update(pool: Callable[[int], Group], name: str) -> None:
    case = CASES[name]
    found = pool(case.world_size).run(stream, case)
    stages = [stage for stage, count in enumerate(case.replicas) for _ in range(count)]
    assert [list(versions) for versions, _ in found] == [[stage] for stage in stages]
    batches = case.count // (case.batch or 1)
    assert [losses for _, losses in found] == [batches] * case.world_size
