"""Gradients that are no operation of the backward, or are made where the parameter is not held."""

from typing import Any

import torch
from torch import Tensor, nn

from pdcompiler.core.ir import Trace, is_backward, stage_of
from pdcompiler.passes.stages.assign_stages import assign_stages
from pdcompiler.passes.stages.place_gradients import place_gradients
from tests.levels import Scale, total, trace_and_partition


class Saved(torch.autograd.Function):
    """Its gradient of `weight`, which forward does not read, is a value that forward saved."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor, saved: Tensor) -> Tensor:
        ctx.save_for_backward(saved)
        return 2 * value

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        return 2 * gradient, ctx.saved_tensors[0], None


class Beside(nn.Module):
    """`a`, then the Function, then `b`."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.a, self.b, self.weight = Scale(), Scale(), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        saved = {"forward": hidden.detach().sum(0), "own": self.weight, "other": self.b.weight}[self.kind]
        return self.b(Saved.apply(self.b(hidden), self.weight, saved))


class Offset(nn.Module):
    """A scalar that is added to the loss: its gradient is the loss's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.offset = Scale(), Scale(), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)).sum() + self.offset


def placed(model: nn.Module, loss_fn: Any = total) -> tuple[Trace, str]:
    """The trace in two stages, and its lines for the gradients that the pass made."""
    trace, partition = trace_and_partition(model, ["b"], torch.zeros(2, 4), loss_fn=loss_fn)
    place_gradients(assign_stages(trace, partition), partition)
    owners = partition.owners()
    for output, node in trace.output_nodes():
        if output.kind == "gradient":
            assert is_backward(node) and stage_of(node) in owners[output.name], output.name
    return trace, "\n".join(line for line in str(trace).splitlines() if "= clone(" in line and "# stage" in line and "d_" in line)


def test_the_weight_of_the_loss() -> None:
    assert placed(Offset(), None)[1] == "d_loss_weight = clone(loss_weight)  # stage 1"


def test_a_value_of_the_forward() -> None:
    assert placed(Beside("forward"))[1] == "d_sum_ = clone(sum_)  # stage 0"


def test_a_weight() -> None:
    """Its own weight is read where it is held; another stage's is read there and travels."""
    assert placed(Beside("own"))[1] == "d_weight = clone(weight)  # stage 0"
    assert placed(Beside("other"))[1] == "d_b_weight = clone(b_weight)  # stage 1\nd_d_b_weight = clone(d_b_weight)  # stage 0"


def test_ordinary_gradients_are_left_alone() -> None:
    before, partition = trace_and_partition(nn.Sequential(Scale(), Scale()), ["1"], torch.zeros(2, 4), loss_fn=total)
    text = str(assign_stages(before, partition))
    assert str(place_gradients(before, partition)) == text
