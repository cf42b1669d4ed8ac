"""Faults planted between two steps of the compiler: each is caught, and the test says by which check.

Without this, the green laws and the 300 equal cases would prove little: they could be blind. The faults stand in faults.py; the
model holds, in three stages, what they hit: a weight and a bias tied over two stages, a skip, buffers, two gradients that are
one tensor, a parameter that nothing reads, and microbatches of 3, 2 and 2 rows.
"""

from __future__ import annotations

import copy
import functools
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pdcompiler import compiler
from pdcompiler.core import ops
from pdcompiler.core.errors import CompileError, VerifyError
from pdcompiler.core.verify import verify_staged
from pdcompiler.core.verify_ranks import verify_ranks
from pdcompiler.testing import Batch
from tests.laws.faults import FAULTS, nodes
from tests.laws.one_step import OneStep
from tests.laws.test_passes import (
    each_value_crosses_once_per_receiver,
    ranks_read_what_they_hold,
    sends_meet_receives,
    stages_share_out_the_parameters,
)

STEPS = (
    "lower_schedule", "insert_reductions", "insert_transfers", "merge_transfers",
    "split_ranks", "reuse_memory", "overlap_transfers",
)


class Entwined(nn.Module):
    """See the module's docstring; the stages begin at `middle` and `last`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.last.weight, self.last.bias = self.first.weight, self.first.bias
        self.shift, self.lift = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.ones(4))
        self.unused = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        early = torch.tanh(self.first(x)) + (self.shift + self.lift)
        late = torch.tanh(self.norm(self.middle(early)))
        result: Tensor = self.last(late) + early
        return result


def entwined() -> OneStep:
    """The step, traced and staged."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, x, target = Entwined().double(), torch.randn(7, 4).double(), torch.randn(7, 4).double()
    batch = Batch((x,), {}, target, lambda outputs, wanted: (outputs - wanted).square().mean())
    return OneStep(model, batch, ["middle", "last"], "1f1b", 3)


@pytest.fixture(scope="module")
def one() -> OneStep:
    return entwined()


def who_catches(one: OneStep, level: str, plant: Callable[[Any], Any]) -> str:
    """The first check that notices what `plant` does to the value at a level: a verify_* function, or a comparison of the global
    program or of the ranks' programs with the plain loop, and what differs."""

    def planted(at: str, step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def run(*args: Any, **options: Any) -> Any:
            value = step(*args, **options)
            if at == level:
                plant(value)
            return value

        return run

    step = copy.deepcopy(one.step)
    place = "program"
    with pytest.MonkeyPatch.context() as patch:
        for name in STEPS:
            patch.setattr(compiler, name, planted(name, getattr(compiler, name)))
        try:
            if level == "cut_stages":
                plant(step.microbatches[0].staged)
            verify_staged(step.microbatches[0].staged)
            program = compiler.compile_program(one.request, step, one.schedule, one.holders())
            one.check_program(program)
            place = "ranks"
            one.check_ranks(program, compiler.compile_ranks(one.request, program))
        except VerifyError as error:
            return next(frame.name for frame in traceback.extract_tb(error.__traceback__) if frame.name.startswith("verify_"))
        except AssertionError as error:
            return f"{place}: {str(error).split()[0].rstrip(':')}"
        except RuntimeError as error:
            return f"{place}: torch, {str(error).splitlines()[0]}"
    return "nobody"


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_caught(one: OneStep, name: str) -> None:
    level, plant, caught_by = FAULTS[name]
    assert who_catches(one, level, plant) == caught_by


def test_without_a_fault_nothing_is_caught(one: OneStep) -> None:
    assert len(FAULTS) >= 10
    for level in {level for level, _, _ in FAULTS.values()}:
        assert who_catches(one, level, lambda value: None) == "nobody"


def test_a_parameter_that_is_read_but_placed_on_no_stage_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plant_into_partition(monkeypatch, "middle.weight")
    with pytest.raises(CompileError, match=r"no stage for parameter middle\.weight"):
        entwined()


def test_a_parameter_that_nothing_reads_and_no_stage_holds_breaks_a_law(monkeypatch: pytest.MonkeyPatch) -> None:
    plant_into_partition(monkeypatch, "unused")
    with pytest.raises(AssertionError):
        stages_share_out_the_parameters(entwined())


def plant_into_partition(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A partition that lost a parameter."""
    make = compiler.make_partition

    def lossy(*args: Any) -> Any:
        whole = make(*args)
        for stage in whole.stages:
            object.__setattr__(stage, "parameters", tuple(each for each in stage.parameters if each != name))
        return whole

    monkeypatch.setattr(compiler, "make_partition", lossy)


def test_a_value_that_is_sent_twice_breaks_a_law(one: OneStep) -> None:
    program = one.program()
    each_value_crosses_once_per_receiver(program)
    transfer = nodes(program.graph, ops.transfer)[0]
    with program.graph.inserting_after(transfer):
        program.graph.node_copy(transfer)
    with pytest.raises(AssertionError):
        each_value_crosses_once_per_receiver(program)


def test_messages_that_no_transfer_asked_for_break_a_law(one: OneStep) -> None:
    program = one.program()
    ranks = compiler.compile_ranks(one.request, program)
    sends_meet_receives(program, ranks)
    sent = nodes(ranks[1].graph, ops.send, phase="B")[0]
    received = nodes(ranks[0].graph, ops.start_recv, phase="B")[0]
    sent.append(ranks[1].graph.node_copy(sent))
    received.append(ranks[0].graph.node_copy(received))
    verify_ranks(ranks)
    with pytest.raises(AssertionError):
        sends_meet_receives(program, ranks)


def test_a_rank_that_reads_the_weights_of_another_breaks_a_law(one: OneStep) -> None:
    ranks = compiler.compile_ranks(one.request, one.program())
    ranks_read_what_they_hold(one, ranks)
    nodes(ranks[1].graph, ops.weights)[0].kwargs = {"stage": 2, "rank": 1}
    with pytest.raises(AssertionError):
        ranks_read_what_they_hold(one, ranks)
