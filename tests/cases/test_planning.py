"""Cases 35 and 37: what the planner must find. Brute force, errors of machines and measured costs stand beside what they test."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pdcompiler
from pdcompiler import Machine
from pdcompiler.core.machine import Device, Level
from pdcompiler.core.plan import Training
from pdcompiler.core.workload import Value, Workload
from pdcompiler.planner import plan, straight_plan
from tests.cases.against_loop import layers

DEVICE = Device("device", 1.0, 1.0, 1e15)


def chain(times: list[float], parameters: float) -> Workload:
    """Layers in a row, each with so many bytes of parameters; their backward takes twice as long."""
    row, ones = numpy.array([times]), numpy.ones(len(times))
    values = tuple(Value(i, (i + 1,), 1.0) for i in range(len(times) - 1))
    return Workload(tuple(map(str, range(len(times)))), row, 2 * row, parameters * ones, 0 * ones, 0 * ones, values)


@pytest.mark.parametrize("place", range(8))
def test_case_35_a_planted_optimum(place: int) -> None:
    """Seven layers of 1 and one of 5, in two stages: no split has less than the best of all eight."""
    times = [5.0 if k == place else 1.0 for k in range(8)]
    machine = Machine("pair", (Level("link", 2, 1e9, 0.0),), ((DEVICE, 2),))
    found = straight_plan(chain(times, 0.0), machine, Training("1f1b", 8))
    slower = [max(sum(times[:cut]), sum(times[cut:])) for cut in range(1, 8)]
    sizes = [sum(times[layer] for layer in stage.layers) for stage in found.plan.stages]
    assert max(sizes) == min(slower) and len(sizes) == 2


def test_case_35_embedding_and_head_are_counted() -> None:
    """A head as costly as four blocks: its stage has fewer of them."""
    body = [nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(8)]
    model = nn.Sequential(nn.Embedding(4096, 32), *body, nn.Linear(32, 8 * 32))
    ids = torch.randint(4096, (64, 4))
    pipe = pdcompiler.compile(
        model, 2, example_args=(ids,), example_target=torch.randn(64, 4, 256), loss_fn=F.mse_loss, microbatches=4
    )
    blocks = [len([name for name in stage.parameters if name.endswith(".0.weight")]) for stage in pipe.partition.stages]
    assert sum(blocks) == 8 and blocks[0] > blocks[1] > 0


@pytest.mark.parametrize("count", [2, 4])
def test_case_37_where_data_parallelism_is_better_the_plan_is_that(count: int) -> None:
    """Uneven layers with next to no parameters: no cut is even, and all devices can do the same."""
    machine = Machine("flat", (Level("link", count, 1e9, 0.0),), ((DEVICE, count),))
    found = plan(chain([1.0, 7.0, 1.0], 1e-3), machine, Training("1f1b", 2 * count))
    assert str(found.plan) == str(count) and len(found.plan.stages) == 1
    slow = replace(machine, levels=(Level("link", count, 1e-3, 0.0),))  # a reduction takes longer than all else
    assert str(plan(chain([1.0, 1.0, 1.0], 1e3), slow, Training("1f1b", 2 * count)).plan) != str(count)


def test_case_37_the_partition_says_so() -> None:
    """Of a real model: what a user reads of a plan names data parallelism and its time."""
    model: Any = layers(6, 16)
    pipe = pdcompiler.compile(
        model, 2, example_args=(torch.randn(8, 16).double(),), example_target=torch.randn(8, 16).double(), loss_fn=F.mse_loss
    )
    explanation = pipe.partition.explanation
    assert explanation is not None and explanation.data_parallel is not None
    assert "data parallelism" in str(pipe.partition)
