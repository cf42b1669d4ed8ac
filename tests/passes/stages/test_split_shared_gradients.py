"""Each stage that reads a parameter keeps its own part of the gradient: sums over stages are taken apart, through views."""

from typing import Any

import torch
from torch import Tensor, fx, nn

from pdcompiler.core.ir import Output, Trace, ValueType, stage_of
from pdcompiler.core.structure import Structure
from pdcompiler.passes.stages.assign_stages import assign_stages
from pdcompiler.passes.stages.split_shared_gradients import split_shared_gradients
from pdcompiler.testing import assert_shows
from tests.levels import Scale, total, trace_and_partition

aten = torch.ops.aten


class Shared(nn.Module):
    """One weight, read before `b` and behind it."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.shared, self.b = shared, Scale()

    def forward(self, x: Tensor) -> Tensor:
        return self.shared(self.b(self.shared(x)))


def staged(shared: nn.Module, begin: str) -> Trace:
    trace, partition = trace_and_partition(Shared(shared), [begin], torch.zeros(2, 4), loss_fn=total)
    return assign_stages(trace, partition)


def tail(trace: Trace) -> str:
    """The part with gradients of the shared weight."""
    lines = str(trace).splitlines()
    return "\n".join([line for line in lines if line.startswith(("d_shared", "d_add", "return"))])


def test_the_sum_is_taken_apart() -> None:
    before = staged(Scale(), "b")
    assert tail(before).splitlines()[-2:] == [
        "d_add = add(d_shared_view, d_shared_view_1)  # stage 0",
        "return loss, shared_mul_1, d_add, d_b_view",
    ]
    after = split_shared_gradients(before)
    assert tail(after).splitlines()[-1] == "return loss, shared_mul_1, d_shared_view, d_shared_view_1, d_b_view"
    parts = [(output, stage_of(node)) for output, node in after.output_nodes() if output.name == "shared.weight"]
    assert parts == [(Output("gradient", "shared.weight"), 1), (Output("gradient", "shared.weight"), 0)]


def test_on_one_stage_nothing_changes() -> None:
    class Once(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared, self.b = Scale(), Scale()

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.shared(self.shared(x)))

    trace, partition = trace_and_partition(Once(), ["b"], torch.zeros(2, 4), loss_fn=total)
    before = str(assign_stages(trace, partition))
    assert_shows(split_shared_gradients(trace), before)
    assert "d_add = add(d_shared_view, d_shared_view_1)  # stage 0" in before


def test_a_sum_behind_views_and_casts_is_taken_apart() -> None:
    """Written by hand: a weight that is transposed and cast once for all its readers."""
    graph = fx.Graph()
    gradient = graph.placeholder("gradient")

    def call(target: Any, *args: Any, stage: int, name: str, **kwargs: Any) -> fx.Node:
        node = graph.create_node("call_function", target, args, kwargs, name=name)
        node.meta.update(stage=stage, backward=True, type=ValueType((4, 4), torch.float32))
        return node

    parts = [call(aten.neg.default, gradient, stage=stage, name=f"part_{stage}") for stage in (2, 1, 0)]
    first = call(aten.add.Tensor, parts[0], parts[1], stage=1, name="first")
    both = call(aten.add.Tensor, first, parts[2], stage=0, name="both")
    transposed = call(aten.t.default, both, stage=0, name="transposed")
    graph.output((call(aten._to_copy.default, transposed, stage=0, name="cast", dtype=torch.float32),))
    outputs = (Output("gradient", "w"),)
    trace = Trace(graph, nn.Module(), {}, outputs, Structure("tensor", torch.Tensor), (), {"w": "w"}, None, bool)
    assert_shows(split_shared_gradients(trace), """
        gradient = input
        part_2 = neg(gradient)  # stage 2
        part_1 = neg(gradient)  # stage 1
        part_0 = neg(gradient)  # stage 0
        transposed_1 = t(part_2)  # stage 2
        transposed_2 = t(part_1)  # stage 1
        transposed_3 = t(part_0)  # stage 0
        cast_1 = _to_copy(transposed_1, dtype=float32)  # stage 2
        cast_2 = _to_copy(transposed_2, dtype=float32)  # stage 1
        cast_3 = _to_copy(transposed_3, dtype=float32)  # stage 0
        return cast_1, cast_2, cast_3
    """)
    assert trace.outputs == outputs * 3
