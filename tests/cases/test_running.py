"""Cases 32 to 34: rows that meet their labels, no parameter lost, models that decide by values."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pdcompiler
from pdcompiler import CompileError
from tests.cases.against_loop import SCHEDULES, AgainstLoop, begins, drawn, layers, seeded

each_schedule = pytest.mark.parametrize("schedule", SCHEDULES)


class Tagged(nn.Module):
    """The last column is the row's own number: it passes through every layer unchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        hidden, tag = x[:, :4], x[:, 4:]
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden)) + 0 * tag
        return torch.cat([hidden, tag], 1)


@each_schedule
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_case_32_labels_and_outputs_of_a_row_meet(schedule: str, world_size: int) -> None:
    """A peer's last stage pairs the outputs of one microbatch with the labels of another. Rows carry their number."""
    tags = torch.arange(7.0, dtype=torch.float64).unsqueeze(1)

    def loss_fn(outputs: Tensor, target: Tensor) -> Tensor:
        mismatch = (outputs[:, 4:] - target[:, 4:]).abs().sum()
        return F.mse_loss(outputs[:, :4], target[:, :4]) + 1e6 * mismatch

    x, y = torch.cat([drawn(7, 4), tags], 1), torch.cat([drawn(7, 4, seed=1), tags], 1)
    partition = [f"layers.{begin}" for begin in begins(4, world_size)]
    checked = AgainstLoop(seeded(Tagged), world_size, schedule, loss_fn=loss_fn, partition=partition)
    result = checked.step(x, target=y)
    assert result.loss is not None and result.loss < 1e3, "a row met the label of another"
    assert torch.equal(result.outputs[:, 4:], tags)
    assert torch.equal(checked.evaluate(x)[:, 4:], tags)
    order = torch.randperm(7, generator=torch.Generator().manual_seed(0))
    assert torch.equal(checked.evaluate(x[order])[:, 4:], tags[order])


@pytest.mark.parametrize("chosen", [True, False])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_case_33_five_layers_on_two_three_and_four_stages(world_size: int, chosen: bool) -> None:
    """A peer rounds 5 layers down and loses one, or gives one to two stages."""
    model = layers(5)
    partition = None if chosen else begins(5, world_size)
    checked = AgainstLoop(model, world_size, loss_fn=F.mse_loss, partition=partition)
    checked.step(drawn(7, 4), target=drawn(7, 4, seed=1))
    held = Counter(name for stage in checked.pipe.stages for name in stage.parameters)
    assert held == Counter(dict(model.named_parameters()).keys())
    planned = [name for stage in checked.pipe.partition.stages for name in stage.parameters]
    assert sorted(planned) == sorted(held)
    assert [name for name, _ in checked.pipe.named_parameters()] == [name for name, _ in model.named_parameters()]


class Decides(nn.Module):
    """Decides by values in one of the ways that users do."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.inner = Inner(how)
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(self.inner(x))
        return result


class Inner(nn.Module):
    """The part that can't be traced, one module down."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "if":
            if x.sum() > 0:  # line of the if
                return x * 2
        elif self.how == "item":
            return x if x.max().item() > 3 else -x  # line of the item
        elif self.how == "range":
            for _ in range(int(x[0, 0])):  # line of the range
                x = x + 1
        elif self.how == "numpy":
            return x * float(x.detach().numpy().max())  # line of the numpy
        return x


class Item(nn.Module):
    """Takes a number out of a tensor and only computes with it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.a(x))
        largest = hidden.max().item()
        result: Tensor = self.c(torch.tanh(self.b(hidden * largest)) * largest) * largest
        return result


@each_schedule
def test_case_34_item_that_only_computes_is_exact(schedule: str) -> None:
    """A peer bakes in the number of the first microbatch. It is a value like others, read here by three stages."""
    checked = AgainstLoop(seeded(Item), 3, schedule, loss_fn=F.mse_loss, partition=["b", "c"])
    checked.step(drawn(7, 4), target=drawn(7, 4, seed=1))
    checked.step(drawn(7, 4, seed=2), target=drawn(7, 4, seed=1))


@pytest.mark.parametrize("how", ["if", "item", "range", "numpy"])
def test_case_34_model_that_decides_by_values(how: str) -> None:
    """Peers show torch's own lines. Here: the user's line, what it did, and two ways out; the model is as before."""
    model: Any = seeded(lambda: Decides(how))
    before = dict(vars(model.inner))
    with pytest.raises(CompileError) as caught:
        pdcompiler.compile(model, 2, loss_fn=F.mse_loss, example_args=(drawn(8, 4),), example_target=drawn(8, 4))
    what, *rest = str(caught.value).splitlines()
    assert what.startswith("the model decides by the values of a tensor, which are not known when it is compiled"), what
    [place] = [line for line in rest if line.startswith("  at: ")]
    assert __file__ in place and f"# line of the {how}" in place, place
    assert len([line for line in rest if line.startswith("  try: ")]) == 2, rest
    assert vars(model.inner) == before
    x = drawn(8, 4)
    assert torch.equal(model(x), model.linear(model.inner(x)))
