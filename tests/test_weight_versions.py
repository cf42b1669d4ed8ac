"""Which weights a minibatch is on: ASYNCHRONOUS.md's tables, and the same versions and legal depths as the order by ticks."""

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdcompiler import CompileError
from pdcompiler import weight_versions as module
from pdcompiler.core import ticks
from pdcompiler.core.ticks import Ticks
from pdcompiler.testing import AsynchronousCase, asynchronous_cases
from pdcompiler.weight_versions import Semantics, WeightVersions, pipedream_depths

TABLES: list[tuple[Semantics, tuple[int, ...], int | None, list[str]]] = [
    ("stash", (1, 1, 1), None, ["0 0 0 1 2 3 4 5 6", "0 0 1 2 3 4 5 6 7", "0 1 2 3 4 5 6 7 8"]),
    ("stash", (2, 1), None, ["0 0 0 0 1 1 2 2 3", "0 1 2 3 4 5 6 7 8"]),
    ("stash", (2, 3, 1), None, ["0 0 0 0 0 0 1 1 2", "0 0 0 0 0 0 1 1 1", "0 1 2 3 4 5 6 7 8"]),
    ("vertical-sync", (1, 1, 1), None, ["0 0 0 1 2 3 4 5 6"] * 3),
    ("vertical-sync", (2, 1), None, ["0 0 0 0 1 1 2 2 3", "0 0 0 0 2 2 4 4 6"]),
    ("vertical-sync", (2, 3, 1), None, ["0 0 0 0 0 0 0 0 0 0 3 3", "0 0 0 0 0 0 0 0 0 0 2 2", "0 0 0 0 0 0 0 0 0 0 6 6"]),
    ("2bw", (1, 1, 1), 3, ["0 0 0 0 0 0 1 1 1"] * 3),
]


def rule_of(semantics: Semantics, replicas: tuple[int, ...], batch: int | None) -> WeightVersions:
    return WeightVersions(semantics, replicas, pipedream_depths(replicas), batch)


@pytest.mark.parametrize(("semantics", "replicas", "batch", "expected"), TABLES)
def test_which_weights(semantics: Semantics, replicas: tuple[int, ...], batch: int | None, expected: list[str]) -> None:
    rule = rule_of(semantics, replicas, batch)
    for stage, row in enumerate(expected):
        assert " ".join(str(rule.of(stage, t)) for t in range(len(row.split()))) == row


def test_the_docstring_shows_two_of_them() -> None:
    shown = re.findall(r"stage \d.*?: +([\d ]*\d)", module.__doc__ or "")
    assert sorted(shown) == sorted(row for _, _, _, rows in TABLES[:2] for row in rows)


def test_a_version_that_no_minibatch_is_on_lives_while_it_is_the_newest() -> None:
    """2-1 with vertical sync: minibatches of stage 1 are on even versions; after update 5 on 2 and 4."""
    assert rule_of("vertical-sync", (2, 1), None).live(1, 5) == 3


@settings(max_examples=100)
@given(asynchronous_cases(), st.integers(0, 50))
def test_the_order_by_ticks_has_the_same_versions(case: AsynchronousCase, t: int) -> None:
    """And no more of them live at once; after a long stream just as many."""
    rule = WeightVersions(case.semantics, case.replicas, case.depths, case.batch)
    order = Ticks(case.replicas, case.depths, case.batch)
    for stage, count in enumerate(case.replicas):
        long = 2 * case.depths[0] + 3 * rule.round(stage)
        if case.semantics == "vertical-sync":
            assert rule.of(stage, t) * count == rule.of(0, t) * case.replicas[0] <= t
            most = 1 - -case.depths[0] // order.repeat + (order.repeat > count)
            assert rule.live(stage, t) <= most
            assert order.repeat > 1 or rule.live(stage, long) == most
        else:
            assert rule.of(stage, t) == order.weights(stage, t)
            assert rule.live(stage, t) <= order.versions(stage) == rule.live(stage, long)


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 6)), min_size=1, max_size=4), st.none() | st.integers(1, 6))
def test_the_order_by_ticks_has_the_same_legal_depths(stages: list[tuple[int, int]], batch: int | None) -> None:
    replicas, depths = zip(*stages, strict=True)
    assert pipedream_depths(replicas) == ticks.pipedream_depths(replicas)

    def legal(make: Any) -> bool:
        try:
            make()
        except CompileError:
            return False
        return True

    ours = legal(lambda: WeightVersions("2bw" if batch else "stash", replicas, depths, batch))
    assert ours == legal(lambda: Ticks(replicas, depths, batch))
