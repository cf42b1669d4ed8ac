"""Case 5: frozen stages, adapters, stages that hold nothing; what does not train costs no message."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pdcompiler
from pdcompiler.core import ops
from tests.cases.against_loop import SCHEDULES, AgainstLoop, drawn, layers, seeded
from tests.cases.every_cut import messages

each_schedule = pytest.mark.parametrize("schedule", SCHEDULES)
x, target = drawn(6, 4), drawn(6, 4, seed=1)


def upstream(pipe: pdcompiler.Pipeline) -> Counter[tuple[int, int]]:
    """How many messages go from each rank to each earlier one."""
    sends = [(rank, int(node.kwargs["to"])) for rank, node in messages(pipe, ops.send)]
    return Counter((frm, to) for frm, to in sends if to < frm)


@each_schedule
@pytest.mark.parametrize(
    ("frozen", "expected"),
    [
        ([0], {(1, 0): 0, (2, 1): 4, (3, 2): 4}),
        ([1], {(1, 0): 4, (2, 1): 4, (3, 2): 4}),
        ([0, 1], {(1, 0): 0, (2, 1): 0, (3, 2): 4}),
        ([3], {(1, 0): 4, (2, 1): 4, (3, 2): 4}),
        ([0, 1, 2], {}),
    ],
)
def test_case_5_frozen_stages(schedule: str, frozen: list[int], expected: dict[tuple[int, int], int]) -> None:
    """No gradient goes upstream of the first trainable parameter; the loss, which every rank gets, is the one message there."""
    model = layers(4)
    for stage in frozen:
        model[stage].requires_grad_(False)
    checked = AgainstLoop(model, 4, schedule, loss_fn=F.mse_loss, partition=["1", "2", "3"])
    checked.step(drawn(8, 4), target=drawn(8, 4, seed=1))
    checked.pipe.step(drawn(8, 4), target=drawn(8, 4, seed=1))
    found = upstream(checked.pipe)
    found.subtract({(3, rank): 1 for rank in range(3)})
    assert +found == Counter(expected) - Counter()


class Adapted(nn.Module):
    """LoRA: a frozen Linear, and a trainable product of two thin matrices beside it."""

    def __init__(self, adapted: bool) -> None:
        super().__init__()
        self.base = nn.Linear(4, 4).requires_grad_(False)
        self.down, self.up = (nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)) if adapted else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.base(x)
        if self.down is not None and self.up is not None:
            hidden = hidden + self.up(self.down(x))
        return hidden.tanh()


@each_schedule
def test_case_5_only_adapters_train(schedule: str) -> None:
    """Frozen weights stay bit-identical, also under weight decay, and nothing goes upstream of the first adapter."""
    model = seeded(lambda: nn.Sequential(*[Adapted(stage in (1, 2)) for stage in range(4)]))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    checked = AgainstLoop(model, 4, schedule, loss_fn=F.mse_loss, partition=["1", "2", "3"])
    pipe = checked.pipe
    pipe.prepare(x, target=target)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.1, weight_decay=0.1)
    for _ in range(3):
        checked.step(x, target=target)
        optimizer.step()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) != parameter.requires_grad, name
        assert (parameter.grad is None) != parameter.requires_grad, name
    pipe.step(x, target=target)
    assert upstream(pipe) == {(3, 0): 1, (3, 1): 1, (3, 2): 5, (2, 1): 4}


@each_schedule
def test_case_5_a_stage_without_parameters(schedule: str) -> None:
    """Gradients pass through a stage that holds nothing: `pipe.parameters()`, norms and states work."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Softsign(), nn.Linear(4, 4)).double()
    checked = AgainstLoop(model, 3, schedule, loss_fn=F.mse_loss, partition=["1", "3"])
    checked.step(drawn(8, 4), target=drawn(8, 4, seed=1))
    assert [len(stage.parameters) for stage in checked.pipe.partition.stages] == [2, 0, 2]
    checked.evaluate(drawn(5, 4))


@each_schedule
def test_case_5_unfreezing_between_steps(schedule: str) -> None:
    """Which parameters train may change from step to step; the stages do not."""
    model = layers(3)
    model[:2].requires_grad_(False)
    checked = AgainstLoop(model, 3, schedule, loss_fn=F.mse_loss, partition=["1", "2"])
    for number, trainable in enumerate([(), (1,), (0, 1), (0,)]):
        for stage in (0, 1):
            model[stage].requires_grad_(stage in trainable)
        checked.step(drawn(8, 4, seed=number), target=drawn(8, 4, seed=9))
        assert [len(stage.parameters) for stage in checked.pipe.partition.stages] == [2, 2, 2]
