"""Every operation gets its stage by the partition's words, and no edge runs against the pipeline."""

import pytest
import torch
from torch import Tensor, nn

from pdcompiler.core.errors import CompileError
from pdcompiler.core.ir import ModuleCall
from pdcompiler.core.partition import Partition, StagePlan
from pdcompiler.passes.stages.assign_stages import assign_stages
from pdcompiler.testing import assert_shows
from tests.levels import Scale, total, trace_and_partition, trace_of

X = torch.zeros(2, 4)


class Rules(nn.Module):
    """Operations of modules, and of the model's own forward: with a weight, without, and on integers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.own = nn.Parameter(torch.ones(4))
        self.tanh = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.a(x))
        x = self.tanh(torch.neg(x) * self.own)
        return self.b(x).view(x.shape[0], 2, 2) * 2


def test_the_four_rules() -> None:
    """1: t and view follow what they read; 2: mm and own's mul; 3: tanh; 4: relu, neg and the last mul."""
    trace, partition = trace_and_partition(Rules(), ["tanh"], X, gradients=False)
    assert_shows(assign_stages(trace, partition), """
        own = input
        a_weight = input
        b_weight = input
        x = input
        rows = input
        a_t = t(a_weight)  # stage 0
        a_mm = mm(x, a_t)  # stage 0
        relu = relu(a_mm)  # stage 0
        neg = neg(relu)  # stage 0
        mul = mul(neg, own)  # stage 0
        tanh_tanh = tanh(mul)  # stage 1
        b_t = t(b_weight)  # stage 1
        b_mm = mm(tanh_tanh, b_t)  # stage 1
        view = reshape(b_mm, [rows, 2, 2])  # stage 1
        mul_1 = mul(view, 2)  # stage 1
        return mul_1
    """)


class Skip(nn.Module):
    """a's value is read by b and again behind it: autograd adds the two gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = Scale(), Scale(), Scale()

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        return self.c(self.b(x)) + x


def test_a_sum_of_gradients_stands_on_the_last_stage_whose_gradient_enters_it() -> None:
    trace, partition = trace_and_partition(Skip(), ["b", "c"], X, loss_fn=total)
    assert_shows(assign_stages(trace, partition), """
        a_weight = input
        b_weight = input
        c_weight = input
        x = input
        loss_weight = input
        rows = input
        a_mul = mul(x, a_weight)  # stage 0
        b_mul = mul(a_mul, b_weight)  # stage 1
        c_mul = mul(b_mul, c_weight)  # stage 2
        add = add(c_mul, a_mul)  # stage 2
        loss = sum(add)  # stage 2
        d_expand = expand(loss_weight, [rows, 4])  # stage 2
        d_c_mul = mul(d_expand, b_mul)  # stage 2
        d_c_mul_1 = mul(d_expand, c_weight)  # stage 2
        d_c_sum = sum(d_c_mul, [0], True)  # stage 2
        d_c_view = reshape(d_c_sum, [4])  # stage 2
        d_b_mul = mul(d_c_mul_1, a_mul)  # stage 1
        d_b_mul_1 = mul(d_c_mul_1, b_weight)  # stage 1
        d_b_sum = sum(d_b_mul, [0], True)  # stage 1
        d_b_view = reshape(d_b_sum, [4])  # stage 1
        d_add = add(d_expand, d_b_mul_1)  # stage 1
        d_a_mul = mul(d_add, x)  # stage 0
        d_a_sum = sum(d_a_mul, [0], True)  # stage 0
        d_a_view = reshape(d_a_sum, [4])  # stage 0
        return loss, add, d_a_view, d_b_view, d_c_view
    """)


class Shared(nn.Module):
    """One weight, read on both stages."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.b = Scale(), Scale()

    def forward(self, x: Tensor) -> Tensor:
        return self.shared(self.b(self.shared(x)))


def test_a_shared_weight_is_read_where_its_module_call_stands() -> None:
    trace, partition = trace_and_partition(Shared(), ["b"], X, gradients=False)
    assert_shows(assign_stages(trace, partition), """
        shared_weight = input
        b_weight = input
        x = input
        rows = input
        shared_mul = mul(x, shared_weight)  # stage 0
        b_mul = mul(shared_mul, b_weight)  # stage 1
        shared_mul_1 = mul(b_mul, shared_weight)  # stage 1
        return shared_mul_1
    """)


def assigned(*stages: tuple[tuple[str, ...], tuple[str, ...]]) -> None:
    """Skip's trace, staged by (parameters, module calls) of each stage."""
    plans = [StagePlan(parameters, tuple(map(ModuleCall, calls))) for parameters, calls in stages]
    assign_stages(trace_of(Skip(), X, gradients=False), Partition(tuple(plans)))


def test_a_partition_that_lacks_a_parameter_is_refused() -> None:
    with pytest.raises(CompileError, match=r"^the partition has no stage for parameter c\.weight: it is for another model$"):
        assigned((("a.weight",), ("a",)), (("b.weight",), ("b",)))


def test_a_parameter_on_an_earlier_stage_than_what_it_is_read_with_is_refused() -> None:
    with pytest.raises(CompileError) as refused:
        assigned((("a.weight", "c.weight"), ("a", "c")), (("b.weight",), ("b",)))
    what, where, *ways_out = str(refused.value).splitlines()
    assert what == "the partition puts a parameter on stage 0, but it is read with a value of stage 1"
    assert where.startswith("  at: c (") and "levels.py:" in where
    assert ways_out == ["  try: begin the stages elsewhere", "  try: let pdcompiler choose the partition"]


def test_a_module_call_without_weights_may_stand_later_than_said() -> None:
    """A call on a stage before its inputs is no fault: it takes the lowest legal stage."""
    model = nn.Sequential(Scale(), Scale(), nn.Tanh())
    plans = (StagePlan(("0.weight",), (ModuleCall("0"), ModuleCall("2"))), StagePlan(("1.weight",), (ModuleCall("1"),)))
    trace = assign_stages(trace_of(model, X, gradients=False), Partition(plans))
    assert {node.name: node.meta["stage"] for node in trace.graph.nodes if "stage" in node.meta} == {
        "_0_mul": 0, "_1_mul": 1, "_2_tanh": 1,
    }  # fmt: skip
