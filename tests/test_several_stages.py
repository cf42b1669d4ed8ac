"""Schedules of several stages a rank: what `compile` makes of them, shows, and refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pdcompiler
from pdcompiler import CompileError, Schedule
from pdcompiler.passes.schedules.named import interleaved
from pdcompiler.testing import assert_transparent
from tests.cases.against_loop import drawn, seeded

CUTS = ["1", "2", "3"]


def four() -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(3, 3) for _ in range(4)]).double()


def compiled(**options: Any) -> Any:
    options = {"partition": CUTS, "loss_fn": F.mse_loss, "example_args": (drawn(4, 3),), "example_target": drawn(4, 3)} | options
    return pdcompiler.compile(seeded(four), options.pop("world_size", 2), **options)


def test_a_rank_holds_the_parameters_of_all_its_stages() -> None:
    pipe = compiled(schedule="zb-v", microbatches=4)
    assert pipe.schedule.replicas == {0: (0,), 1: (1,), 2: (1,), 3: (0,)}
    calls = [{str(n.target).split("_")[0] for n in rank.graph.nodes if n.op == "call_module"} for rank in pipe.ranks]
    assert calls == [{"stage0", "stage3"}, {"stage1", "stage2"}]
    between = [str(n.kwargs["channel"]) for n in pipe.ranks[1].graph.nodes if "channel" in n.kwargs]
    assert set(between) == {"0->1", "1->0"} and len(between) == 2 * (4 + 4) + 1, "and the loss"


def test_the_table_says_which_rank_runs_a_stage() -> None:
    rows = str(compiled(schedule="interleaved").partition).splitlines()
    assert [row.split()[2] for row in rows[1:5]] == ["0", "1", "0", "1"]
    assert "ranks run several stages; what follows is of a device for each stage" in rows


def test_stages_are_chosen_by_cost_where_none_are_given() -> None:
    pipe = compiled(schedule="interleaved", partition=None, stages_per_rank=2)
    assert len(pipe.partition.stages) == 4
    assert [len(stage.parameters) for stage in pipe.partition.stages] == [2, 2, 2, 2]


def test_three_stages_on_two_ranks() -> None:
    """As the user orders them; the first rank has the first and the last."""
    schedule = Schedule.parse("F0@0 F1@0 F0@2 B0@2 F1@2 B1@2 B0@0 B1@0\nF0@1 F1@1 B0@1 B1@1")
    assert_transparent(
        seeded(four), drawn(5, 3), target=drawn(5, 3, seed=1), loss_fn=F.mse_loss, schedule=schedule, microbatches=2,
        partition=["1", "3"],
    )  # fmt: skip


def test_one_rank_may_run_all_stages() -> None:
    assert_transparent(
        seeded(four), drawn(5, 3), target=drawn(5, 3, seed=1), loss_fn=F.mse_loss, world_size=1, microbatches=3,
        schedule=interleaved(1, 3, 4), partition=CUTS,
    )  # fmt: skip


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a partition of too few stages": (
        {"schedule": "zb-v", "partition": ["2"]}, "the schedule has 4 stages on 2 ranks, the partition has 2 stages",
    ),
    "replicas": (
        {"schedule": "zb-v", "replicas": (2, 1, 1, 1)},
        "the schedule has 4 stages on 2 ranks, the partition has 4 stages on 5 ranks",
    ),
    "stages_per_rank of 1f1b": ({"stages_per_rank": 2}, "stages_per_rank is 2, the schedule '1f1b'"),
    "no stages": ({"schedule": "interleaved", "stages_per_rank": 0}, "stages_per_rank is 0, the schedule 'interleaved'"),
    "too few microbatches": (
        {"schedule": "dualpipe-v", "microbatches": 3},
        "dualpipe-v needs as many microbatches as stages, 4 on 2 ranks; there are 3",
    ),
    "more stages than the model has": (
        {"schedule": "interleaved", "partition": None, "stages_per_rank": 40},
        "80 stages asked for, but the model can be cut in at most",
    ),
    "other numbers than its own": (
        {"schedule": interleaved(2, 4), "microbatches": 3}, "the schedule is for 4 microbatches, microbatches is 3",
    ),
    "another number of ranks": (
        {"schedule": interleaved(2, 4), "world_size": 3}, "the schedule is for 2 ranks and 4 stages, world_size is 3",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_go_together_is_refused(case: str) -> None:
    options, message = REFUSED[case]
    with pytest.raises(CompileError) as caught:
        compiled(**options)
    assert str(caught.value).startswith(message)


def test_a_checkpoint_has_the_models_own_names() -> None:
    pipe = compiled(schedule="zb-v", microbatches=4)
    assert sorted(pipe.state_dict()) == sorted(four().state_dict())
    pipe.load_state_dict(four().state_dict())
    assert torch.is_tensor(pipe.eval_step(drawn(4, 3)).outputs)
