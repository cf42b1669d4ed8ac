"""Values that cross keep their memory layout, by two views; what does not cross, or is row-major, is left alone."""

import torch
from torch import Tensor, nn

from pdcompiler.core.ir import Trace
from pdcompiler.passes.stages.assign_stages import assign_stages
from pdcompiler.passes.stages.keep_layouts import keep_layouts
from tests.levels import Scale, total, trace_and_partition


class Crossing(nn.Module):
    """`a`, a change of layout, `b`."""

    def __init__(self, change: str) -> None:
        super().__init__()
        self.change = change
        self.a, self.b = Scale(), Scale()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        if self.change == "transposed":
            hidden = hidden.t().exp().t()  # exp keeps the layout of what it is given: transposed back, it is row-major
        if self.change == "columns":
            hidden = hidden.t().contiguous().t().exp()
        return self.b(hidden)


def traced(change: str) -> Trace:
    trace, partition = trace_and_partition(Crossing(change), ["b"], torch.zeros(2, 4), loss_fn=total)
    return keep_layouts(assign_stages(trace, partition))


def forward(trace: Trace) -> str:
    lines = [line for line in str(trace).splitlines() if "# stage" in line and not line.startswith("d_")]
    return "\n".join(line for line in lines if "loss" not in line)


def test_a_value_in_columns_crosses_as_rows() -> None:
    assert forward(traced("columns")).splitlines()[-4:] == [
        "exp = exp(t_1)  # stage 0",
        "exp_rows = permute(exp, [1, 0])  # stage 0",
        "exp_layout = permute(exp_rows, [1, 0])  # stage 1",
        "b_mul = mul(exp_layout, b_weight)  # stage 1",
    ]


def test_a_row_major_value_crosses_as_it_is() -> None:
    for change in ("none", "transposed"):
        assert "permute" not in str(traced(change))
