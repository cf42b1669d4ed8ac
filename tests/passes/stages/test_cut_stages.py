"""The trace falls into a forward and a backward for each stage; what crosses is named, what can't cross is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pdcompiler.core.errors import CompileError
from pdcompiler.core.ir import ModuleCall
from pdcompiler.core.partition import Partition, StagePlan
from pdcompiler.passes.stages.assign_stages import assign_stages
from pdcompiler.passes.stages.cut_stages import cut_stages
from pdcompiler.testing import assert_shows
from tests.levels import Scale, staged_of, total, trace_of

X = torch.zeros(2, 4)


class Skip(nn.Module):
    """a's value is read on all three stages."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = Scale(), Scale(), Scale()

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        return self.c(self.b(x)) + x


def test_three_stages_read_like_this() -> None:
    assert_shows(staged_of(Skip(), ["b", "c"], X, loss_fn=total), """
        stage 0 forward: weights, x -> a_mul
            a_weight = weights[0]
            a_mul = mul(x, a_weight)
            return a_mul

        stage 0 backward: d_add, x -> gradients
            d_a_mul = mul(d_add, x)
            d_a_sum = sum(d_a_mul, [0], True)
            d_a_view = reshape(d_a_sum, [4])
            return (d_a_view,)

        stage 1 forward: weights, a_mul -> b_mul, saved
            b_weight = weights[0]
            b_mul = mul(a_mul, b_weight)
            return b_mul, (a_mul,)

        stage 1 backward: weights, saved, d_c_mul_1, d_expand -> d_add, gradients
            b_weight = weights[0]
            a_mul = saved[0]
            d_b_mul = mul(d_c_mul_1, a_mul)
            d_b_mul_1 = mul(d_c_mul_1, b_weight)
            d_b_sum = sum(d_b_mul, [0], True)
            d_b_view = reshape(d_b_sum, [4])
            d_add = add(d_expand, d_b_mul_1)
            return d_add, (d_b_view,)

        stage 2 forward: weights, b_mul, a_mul -> loss, add, saved
            c_weight = weights[0]
            c_mul = mul(b_mul, c_weight)
            add = add(c_mul, a_mul)
            loss = sum(add)
            return loss, add, (b_mul,)

        stage 2 backward: weights, saved, loss_weight, rows -> d_c_mul_1, d_expand, gradients
            c_weight = weights[0]
            b_mul = saved[0]
            d_expand = expand(loss_weight, [rows, 4])
            d_c_mul = mul(d_expand, b_mul)
            d_c_mul_1 = mul(d_expand, c_weight)
            d_c_sum = sum(d_c_mul, [0], True)
            d_c_view = reshape(d_c_sum, [4])
            return d_c_mul_1, d_expand, (d_c_view,)
    """)


class Counter(nn.Module):
    """Counts its calls in a buffer, and reads a constant one."""

    calls: Tensor
    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(4))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.table * self.calls


def test_buffers_are_taken_and_given_and_a_backward_stays_with_its_forward() -> None:
    """(The count has no gradient, so torch gives it the sequence number of the operation before it, on stage 0.)"""
    staged = staged_of(nn.Sequential(Scale(), Counter()), ["1"], X, loss_fn=total)
    assert_shows(staged, """
        stage 0 forward: weights, input_ -> _0_mul
            _0_weight = weights[0]
            _0_mul = mul(input_, _0_weight)
            return _0_mul

        stage 0 backward: d_1_mul_1, input_ -> gradients
            d_0_mul = mul(d_1_mul_1, input_)
            d_0_sum = sum(d_0_mul, [0], True)
            d_0_view = reshape(d_0_sum, [4])
            return (d_0_view,)

        stage 1 forward: buffers, _0_mul -> loss, _1_mul_1, saved, buffers
            _1_table = buffers[0]
            _1_calls = buffers[1]
            _1_add = add(_1_calls, 1)
            _1_mul = mul(_0_mul, _1_table)
            _1_mul_1 = mul(_1_mul, _1_add)
            loss = sum(_1_mul_1)
            return loss, _1_mul_1, (_1_add,), (_1_table, _1_add)

        stage 1 backward: buffers, saved, loss_weight, rows -> d_1_mul_1
            _1_table = buffers[0]
            _1_add = saved[0]
            d_expand = expand(loss_weight, [rows, 4])
            d_1_mul = mul(d_expand, _1_add)
            d_1_mul_1 = mul(d_1_mul, _1_table)
            return d_1_mul_1
    """)
    assert [stage.parameters for stage in staged.stages] == [("0.weight",), ()]
    assert [stage.gradients for stage in staged.stages] == [("0.weight",), ()]
    assert [stage.buffers for stage in staged.stages] == [(), ("1.table", "1.calls")]
    assert [stage.written for stage in staged.stages] == [(), ("1.calls",)]


def test_an_evaluation_has_no_backward_and_saves_nothing() -> None:
    staged = staged_of(Skip(), ["b", "c"], X, gradients=False)
    assert [stage.forward.gives for stage in staged.stages] == [("a_mul",), ("b_mul",), ("add",)]
    assert [stage.backward for stage in staged.stages] == [None] * 3 and staged.loss is None and staged.outputs == ("add",)


class Odd(nn.Module):
    """Something between a and b."""

    def __init__(self, between: Callable[[Tensor, nn.Module], Tensor]) -> None:
        super().__init__()
        self.a, self.b = Scale(), Scale()
        self.register_buffer("calls", torch.zeros(4))
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.between(self.a(x), self)


def refused(between: Callable[[Tensor, Any], Tensor], message: str, **stages: int) -> None:
    """With a on stage 0 and b on stage 1, and the named nodes where they do not belong."""
    plans = [StagePlan((f"{name}.weight",), (ModuleCall(name),)) for name in "ab"]
    partition = Partition(tuple(plans))
    trace = assign_stages(trace_of(Odd(between), X, loss_fn=total), partition)
    nodes = {node.name: node for node in trace.graph.nodes}
    for name, stage in stages.items():
        nodes[name].meta["stage"] = stage
    with pytest.raises(CompileError, match=message) as error:
        cut_stages(trace, partition)
    assert "test_cut_stages.py:" in str(error.value) and "try: begin the stages elsewhere" in str(error.value)


def test_a_buffer_that_is_written_on_one_stage_and_read_on_another_is_refused() -> None:
    def between(hidden: Tensor, model: Any) -> Tensor:
        result: Tensor = model.b(hidden) * (model.calls + 1)
        model.calls += 2
        return result

    refused(between, r"^buffer calls is written on stage 1 and read on stage 0\n", add=0, add_1=1)


def test_a_value_whose_shape_depends_on_data_is_refused() -> None:
    def between(hidden: Tensor, model: Any) -> Tensor:
        result: Tensor = model.b(hidden[hidden.sum(1) > 0])
        return result

    refused(between, r"^a value whose shape depends on data would cross stages: float32\[u\d, 4\]\n", index=0)


def test_a_value_whose_memory_is_addressed_is_refused() -> None:
    def between(hidden: Tensor, model: Any) -> Tensor:
        result: Tensor = model.b(hidden) + hidden.as_strided((4,), (1,))
        return result

    refused(between, r"^an operation addresses the memory of a value that would cross stages \(as_strided\)\n")
