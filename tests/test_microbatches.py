"""microbatches="auto": as many as the planner's costs say, of an example batch; what has no meaning is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import pdcompiler
from pdcompiler.core.errors import CompileError
from pdcompiler.core.machine import Device, Machine
from pdcompiler.core.schedule import Schedule
from pdcompiler.passes.schedules.named import one_f_one_b


class Squares(nn.Module):
    """Four equal layers; the mean square as the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def machine(*, latency: float) -> Machine:
    device = Device("device", 1e6, 1e12, 1e9)
    return Machine.flat(2, bytes_per_second=1e12, latency_seconds=latency, device=device, overlap=False)


def compiled(machine: Machine, rows: int = 12, **options: object) -> pdcompiler.Pipeline:
    return pdcompiler.compile(
        Squares().double(), 2, example_args=(torch.randn(rows, 16, dtype=torch.float64),), machine=machine,
        microbatches="auto", **options,  # type: ignore[arg-type]
    )  # fmt: skip


def test_where_messages_are_free_the_batch_is_cut_as_finely_as_one_trace_allows() -> None:
    pipe = compiled(machine(latency=0.0))
    assert pipe.schedule.microbatches == 4  # of 3 rows; 8 would give some of one row, whose trace is another
    assert pipe.partition.explanation is not None and pipe.partition.explanation.microbatches == 4
    pipe.verify(torch.randn(12, 16, dtype=torch.float64))


def test_where_messages_are_slow_the_batch_stays_whole() -> None:
    assert compiled(machine(latency=10.0)).schedule.microbatches == 1


def test_the_chosen_number_is_the_best_of_those_that_can_be_asked_for() -> None:
    own = machine(latency=1e-3)
    pipe = compiled(own, rows=32)
    seconds = {}
    for count in (1, 2, 4, 8, 16):
        other = pdcompiler.compile(
            Squares().double(), 2, example_args=(torch.randn(32, 16, dtype=torch.float64),), machine=own, microbatches=count
        )
        assert other.partition.explanation is not None
        seconds[count] = other.partition.explanation.seconds
    assert seconds[pipe.schedule.microbatches] == pytest.approx(min(seconds.values()))
    assert pipe.schedule.microbatches not in (1, 16)  # neither end: there is something to choose


def test_a_partition_brings_its_own_number() -> None:
    planned = compiled(machine(latency=0.0)).partition
    assert compiled(machine(latency=10.0), partition=planned).schedule.microbatches == 4


def test_what_has_no_meaning_is_refused() -> None:
    schedule: Schedule = one_f_one_b(2, 4)
    with pytest.raises(CompileError, match="the schedule has its own number"):
        compiled(machine(latency=0.0), schedule=schedule)
    with pytest.raises(CompileError, match="no batch to plan for"):
        pdcompiler.compile(Squares(), 2, microbatches="auto")
