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


def compiled(example: Example, schedule: str, memory_bytes: float = float("inf"), **options: Any) -> Pipeline:
    """On three devices that compute while messages travel."""
    device = Device("device", 1e12, 1e11, memory_bytes, 1e-6)
    machine = Machine("three", (Level("link", RANKS, 1e9, 1e-5),), ((device, RANKS),))
    return pdcompiler.compile(
        example.model, RANKS, schedule=schedule, machine=machine, loss_fn=example.loss_fn, example_args=example.args,
        example_kwargs=example.kwargs, example_target=example.target, **({"microbatches": 4} | options),
    )  # fmt: skip


@pytest.mark.parametrize("name", ["gpt2", *(pytest.param(n, marks=pytest.mark.full) for n in ("t5", "resnet", "unet", "llama"))])
def test_it_is_exact_and_no_named_schedule_is_faster_in_the_simulator(name: str) -> None:
    """Within half a percent: what adds up losses and copies messages is not a schedule's."""
    example = ZOO[name]()
    found = compiled(example, "auto")
    found.verify(*example.args, target=example.target, **example.kwargs)
    taken = found.simulate().finish
    for schedule in ("gpipe", "1f1b", "zb-h1", "zb-h2"):
        assert taken <= 1.005 * compiled(example, schedule, partition=found.partition).simulate().finish


def chain() -> Example:
    """Nine equal layers whose activations are larger than their weights."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(9)]).double()
    rows, target = torch.randn(2, 2048, 16, dtype=torch.float64)
    return Example("chain", model, (rows,), target=target, loss_fn=nn.functional.mse_loss)


def test_the_memory_limits_it_and_it_holds_what_was_said() -> None:
    """With half of what the fastest one holds it is another schedule, which does fit; with less than any needs it is refused."""
    example = chain()
    options: dict[str, Any] = {"microbatches": 8, "partition": ["3", "6"]}
    free = compiled(example, "auto", **options)
    peaks = [memory.peak for memory in free.simulate().memory]
    narrow = compiled(example, "auto", memory_bytes=0.75 * max(peaks), **options)
    held = [memory.peak for memory in narrow.simulate().memory]
    assert max(held) <= 0.75 * max(peaks) * 1.1, "the room is an estimate: which functions and messages meet is not known yet"
    assert narrow.simulate().finish >= free.simulate().finish
    with pytest.raises(CompileError, match=r"under any schedule|needs .*B, the device has"):
        compiled(example, "auto", memory_bytes=0.1 * max(peaks), **options)


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
