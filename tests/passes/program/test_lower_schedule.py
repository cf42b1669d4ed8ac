"""One step of all ranks is one program: functions called in the schedule's order, totals in the microbatches' order."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pdcompiler.core.errors import CompileError
from pdcompiler.core.ir import Microbatch, Program, Staged, Step
from pdcompiler.core.schedule import Schedule
from pdcompiler.passes.program.lower_schedule import lower_schedule
from pdcompiler.testing import assert_shows
from tests.levels import Scale, lowered, staged_of, total, two_layers_staged

ONE_F_ONE_B = Schedule.parse("""
    F0 F1 B0 B1
    F0 B0 F1 B1
""")


@pytest.fixture(scope="module")
def staged() -> Staged:
    return two_layers_staged()


def test_a_step_of_two_stages_reads_like_this(staged: Staged) -> None:
    assert_shows(lowered(staged, ONE_F_ONE_B), """
        x = input
        target = input
        loss_weights = input
        stage0_weights = weights(stage=0, rank=0)  # rank 0
        x_0 = microbatch(x, start=0, stop=2, dim=0)  # rank 0
        tanh_0, saved_0 = stage0_forward(stage0_weights, x_0)  # rank 0
        x_1 = microbatch(x, start=2, stop=4, dim=0)  # rank 0
        tanh_1, saved_1 = stage0_forward(stage0_weights, x_1)  # rank 0
        stage1_weights = weights(stage=1, rank=1)  # rank 1
        target_0 = microbatch(target, start=0, stop=2, dim=0)  # rank 1
        loss_0, _, saved_0 = stage1_forward(stage1_weights, tanh_0, target_0)  # rank 1
        loss_weight_0 = loss_weights[0]  # rank 1
        weighted_loss_0 = mul(loss_0, loss_weight_0)  # rank 1
        d_second_mm_0, gradients_0 = stage1_backward(stage1_weights, saved_0, loss_weight_0, target_0)  # rank 1
        gradients_0 = stage0_backward(saved_0, d_second_mm_0, x_0)[0]  # rank 0
        target_1 = microbatch(target, start=2, stop=4, dim=0)  # rank 1
        loss_1, _, saved_1 = stage1_forward(stage1_weights, tanh_1, target_1)  # rank 1
        loss_weight_1 = loss_weights[1]  # rank 1
        weighted_loss_1 = mul(loss_1, loss_weight_1)  # rank 1
        loss = accumulate(weighted_loss_0, weighted_loss_1)  # rank 1
        d_second_mm_1, gradients_1 = stage1_backward(stage1_weights, saved_1, loss_weight_1, target_1)  # rank 1
        stage1_gradients = accumulate(gradients_0, gradients_1)  # rank 1
        gradients_1 = stage0_backward(saved_1, d_second_mm_1, x_1)[0]  # rank 0
        stage0_gradients = accumulate(gradients_0, gradients_1)  # rank 0
        return {loss: loss, gradients: {0: stage0_gradients}}  # rank 0
        return {loss: loss, gradients: {1: stage1_gradients}}  # rank 1
    """)


def test_totals_are_added_in_the_order_of_the_microbatches(staged: Staged) -> None:
    """Whatever the order of the backwards: that of microbatch 1 comes first here, and waits."""
    backwards_first = Schedule.parse("F0 F1 F2 B1 B2 B0\nF0 F1 F2 B1 B2 B0")
    lines = str(lowered(staged, backwards_first)).splitlines()
    assert [line for line in lines if "accumulate(" in line] == [
        "loss = accumulate(weighted_loss_0, weighted_loss_1)  # rank 1",
        "loss_3 = accumulate(loss, weighted_loss_2)  # rank 1",
        "stage1_gradients = accumulate(gradients_0, gradients_1)  # rank 1",
        "stage1_gradients_1 = accumulate(stage1_gradients, gradients_2)  # rank 1",
        "stage0_gradients = accumulate(gradients_0, gradients_1)  # rank 0",
        "stage0_gradients_1 = accumulate(stage0_gradients, gradients_2)  # rank 0",
    ]


def results(program: Program) -> list[str]:
    return [line for line in str(program).splitlines() if line.startswith("return")]


def test_outputs_are_given_where_they_are_asked_for(staged: Staged) -> None:
    given = "outputs: [[second_addmm_0, second_addmm_1]]}"
    assert results(lowered(staged, ONE_F_ONE_B, outputs="last")) == [
        "return {loss: loss, gradients: {0: stage0_gradients}}  # rank 0",
        f"return {{loss: loss, gradients: {{1: stage1_gradients}}, {given}  # rank 1",
    ]
    assert all(given in line for line in results(lowered(staged, ONE_F_ONE_B, outputs="all")))


def test_a_microbatch_that_does_not_count_adds_nothing(staged: Staged) -> None:
    """It runs where its outputs are asked for; without them nothing needs it."""
    schedule = Schedule.parse("F0 F1 B0\nF0 B0 F1")
    assert results(lowered(staged, schedule, skip=[1])) == [
        "return {loss: weighted_loss_0, gradients: {0: gradients_0}}  # rank 0",
        "return {loss: weighted_loss_0, gradients: {1: gradients_0}}  # rank 1",
    ]
    assert "tanh_1" not in str(lowered(staged, schedule, skip=[1]))
    assert "tanh_1 = stage0_forward(stage0_weights, x_1)[0]  # rank 0" in str(lowered(staged, schedule, skip=[1], outputs="all"))


class Counter(nn.Module):
    """Counts its calls."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


def test_buffers_go_from_forward_to_forward_and_are_written_once() -> None:
    staged = staged_of(nn.Sequential(Scale(), Counter(), Scale()), ["1"], torch.zeros(2, 4), loss_fn=total)
    lines = str(lowered(staged, ONE_F_ONE_B)).splitlines()
    assert [line for line in lines if "buffers" in line] == [
        "stage1_buffers = buffers(stage=1, rank=1)  # rank 1",
        "loss_0, _, saved_0, buffers_0 = stage1_forward(stage1_weights, stage1_buffers, _0_mul_0)  # rank 1",
        "loss_1, _, saved_1, buffers_1 = stage1_forward(stage1_weights, buffers_0, _0_mul_1)  # rank 1",
        "write_buffers(buffers_1, stage=1, rank=1)  # rank 1",
    ]
    assert "stage1_backward(stage1_weights, saved_0, loss_weight_0, 2)" in "\n".join(lines)  # 2 rows


def test_microbatches_of_other_gradients_are_refused(staged: Staged) -> None:
    other = staged_of(nn.Sequential(Scale(), Scale()), ["1"], torch.zeros(2, 4), target=torch.zeros(2, 4), loss_fn=F.mse_loss)
    step = Step((Microbatch(0, 2, staged), Microbatch(2, 3, other)), {"x": 0, "target": 0})
    with pytest.raises(CompileError, match=r"^stage 0 has other gradients or buffers for 1 rows than for 2\n"):
        lower_schedule(step, ONE_F_ONE_B)
