"""`schedule="auto"`: never slower in the simulator than a named one of a real model's stages; within the memory; exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import pdcompiler
from pdcompiler import CompileError, Machine, Pipeline, Schedule
from pdcompiler.core.machine import Device, Level
from tests.models import ZOO, Example

RANKS = 3
REAL = ("gpt2", "t5", "resnet", "unet", "llama")


def compiled(example: Example, schedule: str, memory_bytes: float = float("inf"), **options: Any) -> Pipeline:
    """On three devices that compute while messages travel."""
    device = Device("device", 1e12, 1e11, memory_bytes, 1e-6)
    machine = Machine("three", (Level("link", RANKS, 1e9, 1e-5),), ((device, RANKS),))
    return pdcompiler.compile(
        example.model, RANKS, schedule=schedule, machine=machine, loss_fn=example.loss_fn, example_args=example.args,
        example_kwargs=example.kwargs, example_target=example.target, **({"microbatches": 4} | options),
    )  # fmt: skip


@pytest.mark.parametrize("name", ["mlp", *(pytest.param(name, marks=pytest.mark.full) for name in REAL)])
def test_it_is_exact_and_no_named_schedule_is_faster_in_the_simulator(name: str) -> None:
    """But for messages that are not a schedule's: the losses', which count where stages take microseconds; over U-Net's skips."""
    example = ZOO[name]()
    found = compiled(example, "auto")
    found.verify(*example.args, target=example.target, **example.kwargs)
    taken = found.simulate().finish
    near = 1.035 if name in ("mlp", "unet") else 1.005
    for schedule in ("gpipe", "1f1b", "zb-h1", "zb-h2"):
        assert taken <= near * compiled(example, schedule, partition=found.partition).simulate().finish


def chain() -> Example:
    """Nine equal layers whose activations are larger than their weights."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(9)]).double()
    rows, target = torch.randn(2, 2048, 16, dtype=torch.float64)
    return Example("chain", model, (rows,), target=target, loss_fn=nn.functional.mse_loss)


def test_the_memory_limits_it() -> None:
    """With nine tenths of what the fastest one holds it is another schedule, which fits; with too little it is refused."""
    example = chain()
    options: dict[str, Any] = {"microbatches": 8, "partition": ["3", "6"]}
    free = compiled(example, "auto", **options).simulate()
    peak = max(memory.peak for memory in free.memory)
    room = 0.9 * peak
    narrow = compiled(example, "auto", memory_bytes=room, **options).simulate()
    assert max(memory.peak for memory in narrow.memory) <= room
    assert narrow.finish > free.finish
    with pytest.raises(CompileError, match=r"one microbatch alone needs [0-9]+ there under any schedule"):
        compiled(example, "auto", memory_bytes=0.8 * peak, **options)


def test_stages_go_round_where_ranks_run_several() -> None:
    example = chain()
    pipe = compiled(example, "auto", stages_per_rank=2)
    assert isinstance(pipe.schedule, Schedule)
    assert pipe.schedule.replicas == {stage: (stage % RANKS,) for stage in range(2 * RANKS)}
    pipe.verify(*example.args, target=example.target, tolerance=1e-9)


def test_replicas_and_the_number_of_microbatches_may_be_chosen_too() -> None:
    example = chain()
    pipe = compiled(example, "auto", partition=["5"], replicas=(2, 1), microbatches="auto")
    assert isinstance(pipe.schedule, Schedule)
    assert pipe.schedule.replicas == {0: (0, 1), 1: (2,)}
    pipe.verify(*example.args, target=example.target, tolerance=1e-9)


def test_without_a_batch_there_are_no_costs() -> None:
    with pytest.raises(CompileError, match='schedule is "auto", but there is no batch whose costs could be known'):
        pdcompiler.compile(chain().model, RANKS, schedule="auto", loss_fn=nn.functional.mse_loss)
