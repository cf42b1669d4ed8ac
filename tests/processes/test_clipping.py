"""Clipping on gloo: every rank has the norm of all, tied and replicated parameters counted once."""

from collections.abc import Callable

import pytest

from tests.processes.pool import Group
from tests.test_clipping import clipped

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(("ranks", "norm_type"), [(2, 2.0), (3, float("inf"))])
def test_on_gloo(pool: Callable[[int], Group], ranks: int, norm_type: float) -> None:
    pool(ranks).run(clipped, ranks, norm_type)
