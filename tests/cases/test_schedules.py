"""Cases 7, 17 and 28 for every schedule: of one stage a rank on two to four ranks, of two stages a rank on one and two or more.

Case 7 in full is in test_functions.py and its neighbours; case 17 for gpipe and 1f1b, with the messages, in test_values.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pdcompiler import CompileError, traces
from pdcompiler.given_schedule import SEVERAL
from pdcompiler.passes.schedules.named import SCHEDULES
from tests.cases.against_loop import SCHEDULES as LONG_TESTED
from tests.cases.against_loop import AgainstLoop, begins, drawn, layers, seeded
from tests.cases.every_cut import TracedOnce, check_every_cut
from tests.cases.test_functions import Clipped
from tests.cases.test_values import STAGES_OF_FOUR, FanOut
from tests.models import unet

ALL = (*SCHEDULES, *SEVERAL)
NEWER = tuple(name for name in ALL if name not in LONG_TESTED)
each_schedule = pytest.mark.parametrize("schedule", ALL)


def ranks_of(schedule: str, stages: int) -> int:
    return stages // 2 if schedule in SEVERAL else stages


@pytest.fixture
def _traced_once() -> Iterator[None]:
    """Of a test's one model; only its schedules differ."""
    with mock.patch.object(traces, "trace_model", TracedOnce()):
        yield


class Entangled(nn.Module):
    """One Linear twice on one path, the parts of a chunk that meet again, a Function with a backward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.gate, self.twice = nn.Linear(4, 8), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.wide(x).chunk(2, -1)
        hidden = Clipped.apply(self.gate(left)).tanh() * right + left
        result: Tensor = self.twice(torch.tanh(self.twice(hidden))) + right
        return result


@each_schedule
def test_case_7_uses_that_meet_again_and_functions(schedule: str) -> None:
    """A backward in two parts must add up the two gradients of one weight, and keep what a Function's own backward says."""
    stages = (2, 4) if schedule in SEVERAL else (2, 3)
    pipes = check_every_cut(
        seeded(Entangled), drawn(7, 4), drawn(7, 4, seed=1), F.mse_loss, stages, at_most=4, schedules=(schedule,), microbatches=4
    )
    halves = [name for pipe in pipes for rank in pipe.ranks for name, _ in rank.named_children() if name.endswith("_weight")]
    assert bool(halves) == (schedule.startswith("zb") or schedule == "dualpipe-v")


@pytest.mark.parametrize(("schedule", "stages"), [(n, s) for n in NEWER for s in (2, 3, 4) if s != 3 or n not in SEVERAL])
def test_case_17_one_activation_used_by_two_later_stages(schedule: str, stages: int) -> None:
    """Stages that stand on one rank, too: what is made and read there does not travel."""
    checked = AgainstLoop(
        seeded(FanOut), ranks_of(schedule, stages), schedule, loss_fn=F.mse_loss, partition=STAGES_OF_FOUR[stages]
    )
    checked.step(drawn(7, 4), target=drawn(7, 4, seed=1))
    checked.evaluate(drawn(7, 4))


@pytest.mark.parametrize("schedule", NEWER)
@pytest.mark.parametrize("partition", [["bottom"], ["down2", "bottom", "up2"]])
def test_case_17_unet_whose_skips_cross(schedule: str, partition: list[str]) -> None:
    example = unet()
    stages = len(partition) + 1
    checked = AgainstLoop(example.model, ranks_of(schedule, stages), schedule, loss_fn=F.mse_loss, partition=partition)
    checked.step(*example.args, target=example.target)


@each_schedule
@pytest.mark.usefixtures("_traced_once")
def test_case_28_fewer_microbatches_than_ranks(schedule: str) -> None:
    """Exact, or refused before there is a model of it, as dualpipe-v is."""
    model = layers(8)
    for ranks in (2, 3, 4):
        stages = 2 * ranks if schedule in SEVERAL else ranks
        for microbatches in range(1, ranks):
            options: dict[str, Any] = {"loss_fn": F.mse_loss, "partition": begins(8, stages), "microbatches": microbatches}
            if schedule == "dualpipe-v":
                with pytest.raises(CompileError, match=f"^dualpipe-v needs as many microbatches as stages, {stages} on {ranks}"):
                    AgainstLoop(model, ranks, schedule, **options)
                continue
            checked = AgainstLoop(model, ranks, schedule, **options)
            checked.step(drawn(5, 4), target=drawn(5, 4, seed=1))
            checked.evaluate(drawn(5, 4))


@each_schedule
@pytest.mark.usefixtures("_traced_once")
def test_case_28_fewer_rows_than_microbatches_than_ranks(schedule: str) -> None:
    """One and two rows leave microbatches without any: they are left out, on every rank alike."""
    ranks = 4
    stages = 2 * ranks if schedule in SEVERAL else ranks
    checked = AgainstLoop(layers(8), ranks, schedule, microbatches=8, loss_fn=F.mse_loss, partition=begins(8, stages))
    for rows in (1, 2, 9):
        checked.step(drawn(rows, 4), target=drawn(rows, 4, seed=1))
