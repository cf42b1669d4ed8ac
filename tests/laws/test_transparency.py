"""Random models, cut and scheduled at random, train as the plain loop says: loss, outputs, gradients, buffers, state dict.

A sample runs with every test run; 300 cases (at random under `--hypothesis-profile=full`) run in `make test-all`. How often
each feature was drawn stands in docs/properties.md. Whether the comparison can fail is test_planted_faults.py's business.
"""

from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, event, given, settings

from pdcompiler.testing import Case, assert_transparent, cases, features

COMMON = ("skip", "tied weight", "mutated buffer", "unused parameter", "uneven rows")
# One list for all examples of a test is what `seen` is for.
SHARED = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@pytest.fixture
def seen() -> Iterator[list[frozenset[str]]]:
    """The features of each case that a test drew; afterwards, none of the common ones may be rare."""
    drawn: list[frozenset[str]] = []
    yield drawn
    counts = Counter(name for case in drawn for name in case)
    assert drawn and all(counts[name] >= 0.3 * len(drawn) for name in COMMON), (len(drawn), counts)


def check(case: Case, seen: list[frozenset[str]]) -> None:
    """One case against the plain loop."""
    found = features(case)
    seen.append(found)
    for name in sorted(found):
        event(name)
    batch = case.batch()
    assert_transparent(
        case.model(), *batch.args, target=batch.target, loss_fn=batch.loss_fn, world_size=case.world_size,
        schedule=case.schedule, microbatches=case.microbatches, partition=case.partition, tolerance=1e-12, **batch.kwargs,
    )


@settings(max_examples=6, suppress_health_check=SHARED)
@given(case=cases())
def test_a_sample_of_random_cases_equals_the_plain_loop(seen: list[frozenset[str]], case: Case) -> None:
    check(case, seen)


@pytest.mark.full
@settings(max_examples=300, suppress_health_check=SHARED)
@given(case=cases())
def test_300_random_cases_equal_the_plain_loop(seen: list[frozenset[str]], case: Case) -> None:
    check(case, seen)
