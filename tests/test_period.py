"""The period of the emitted programs at unit costs is that of ASYNCHRONOUS.md's table: where depths suffice, nobody waits."""

from __future__ import annotations

import pytest
import torch

import pdcompiler
from pdcompiler.core.asynchronous import Asynchronous
from tests.closed_forms import half_squared, linear, sgd
from tests.program_period import period_of

TABLE = [
    ((1, 1, 1), None, 3.0),
    ((1, 1, 1, 1), None, 3.0),
    ((2, 1), None, 3.0),
    ((3, 1), None, 3.0),
    ((2, 2, 2), None, 3.0),
    ((1, 2), None, 3.75),
    ((1, 2), (3, 0), 3.0),
    ((1, 3), None, 4.0),
    ((1, 3), (5, 0), 3.0),
    ((2, 3), None, 4.0),
    ((2, 3), (6, 0), 3.0),
    ((2, 3, 1), None, 7.5),
    ((2, 3, 1), (10, 3, 0), 3.0),
    ((3, 2, 1), None, 6.0),
    ((3, 2, 1), (9, 2, 0), 3.0),
    ((1, 2, 3), None, 4.5),
    ((1, 2, 3), (9, 6, 0), 3.0),
    ((15, 1), None, 3.0),
]
QUICK = ((1, 1, 1, 1), (2, 1), (1, 2), (2, 3, 1))


@pytest.mark.parametrize(
    ("replicas", "depths", "expected"),
    [row if row[0] in QUICK else pytest.param(*row, marks=pytest.mark.full) for row in TABLE],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else str(value),
)  # fmt: skip
def test_programs_take_the_tables_period(replicas: tuple[int, ...], depths: tuple[int, ...] | None, expected: float) -> None:
    """Each stage F = 1, B = 2 for each of its replicas, so that 3.0 is ideal."""
    pipe = pdcompiler.compile(
        linear(len(replicas)), sum(replicas), partition=[str(stage) for stage in range(1, len(replicas))], replicas=replicas,
        schedule=Asynchronous(depths=depths), optimizer=sgd, loss_fn=half_squared,
    )  # fmt: skip
    x = torch.randn(2, 4, dtype=torch.float64)
    ticks, programs = pipe.request.ticks, []
    assert ticks is not None and pipe.stream is not None
    first = ticks.depths[0] + 4 * ticks.repeat
    for _ in range(first + 4 * ticks.repeat * (2 if len(replicas) > 2 else 1) + 1):
        pipe.step(x, target=x)
        assert pipe.stream.latest is not None
        programs.append(pipe.stream.latest.ranks)
    found = period_of(programs, lambda stage, phase: replicas[stage] * (1.0 if phase == "F" else 2.0), first)
    assert found == pytest.approx(expected, abs=0.05 if expected > 3 else 1e-9)
