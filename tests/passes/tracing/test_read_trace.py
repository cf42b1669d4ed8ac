"""A captured joint graph becomes a Trace in our own words: integers are arithmetic on `rows`, detach is gone, names speak."""

import operator
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from pdcompiler.core.ir import Input, ModuleCall, Output, Trace, is_backward, module_of, source_of, type_of
from pdcompiler.testing import assert_shows
from tests.levels import trace_of


class Pairs(nn.Module):
    """One layer, called twice, on the rows cut into pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2, bias=False)
        self.unread = nn.Linear(2, 2)

    def forward(self, weights: Tensor) -> Tensor:
        pairs = weights.view(weights.shape[0] * 2, 2)
        self.unread(pairs)
        hidden = self.layer(pairs).detach() + self.layer(pairs)
        return hidden.sum()


@pytest.fixture(scope="module")
def pairs() -> Trace:
    return trace_of(Pairs(), torch.zeros(3, 4))


def test_the_trace_reads_like_this(pairs: Trace) -> None:
    assert_shows(pairs, """
        layer_weight = input
        unread_weight = input
        unread_bias = input
        weights_ = input
        loss_weight = input
        rows = input
        mul = mul(2, rows)
        view = reshape(weights_, [mul, 2])
        layer_t = t(layer_weight)
        layer_mm = mm(view, layer_t)
        layer_t_1 = t(layer_weight)
        layer_mm_1 = mm(view, layer_t_1)
        add = add(layer_mm, layer_mm_1)
        loss = sum(add)
        d_expand = expand(loss_weight, [mul, 2])
        d_layer_t = t(d_expand)
        d_layer_mm = mm(d_layer_t, view)
        return loss, loss, d_layer_mm
    """)


def test_inputs_and_outputs_say_what_they_are(pairs: Trace) -> None:
    assert pairs.inputs["layer_weight"] == Input("parameter", "layer.weight")
    assert pairs.inputs["weights_"] == Input("batch", "weights")
    assert pairs.inputs["rows"] == Input("rows", "rows")
    assert pairs.outputs == (Output("loss", "loss"), Output("output", "0"), Output("gradient", "layer.weight"))


def test_nodes_know_their_module_call_and_source_line(pairs: Trace) -> None:
    nodes = {node.name: node for node in pairs.graph.nodes}
    assert module_of(nodes["layer_mm"]) == ModuleCall("layer", 0)
    assert module_of(nodes["layer_mm_1"]) == module_of(nodes["d_layer_mm"]) == ModuleCall("layer", 1)
    assert module_of(nodes["add"]) == ModuleCall("")
    line = Path(__file__).read_text().splitlines().index("        hidden = self.layer(pairs).detach() + self.layer(pairs)") + 1
    assert source_of(nodes["add"]) == source_of(nodes["d_layer_mm"]) == f"{__file__}:{line}"
    assert is_backward(nodes["d_expand"]) and not is_backward(nodes["loss"])
    assert str(type_of(nodes["view"])) == "float32[2*rows, 2]"


def test_a_trace_for_one_number_of_rows_has_plain_integers() -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3, 4))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.scale).view(-1).sum()

    trace = trace_of(Fixed(), torch.zeros(3, 4), rows=3, symbolic=False)
    assert trace.rows == 3 and trace.admits(3) and not trace.admits(4)
    assert_shows(trace, """
        scale = input
        x = input
        loss_weight = input
        mul = mul(x, scale)
        view = reshape(mul, [-1])
        loss = sum(view)
        d_expand = expand(loss_weight, [12])
        d_view = reshape(d_expand, [3, 4])
        d_mul = mul(d_view, x)
        return loss, loss, d_mul
    """)


class Arithmetic(nn.Module):
    """Integers of every kind that shapes make, and fractions."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        sizes = (rows * rows, rows // 2, rows % 3 + 1, 3 * rows - 1)
        numbers = torch.cat([x.new_full((size,), place) for place, size in enumerate(sizes)])
        return numbers * (1 / rows) + rows**0.5


def test_integers_are_arithmetic_on_the_rows() -> None:
    trace = trace_of(Arithmetic(), torch.zeros(4, 2), rows=7, gradients=False)
    used = {node.target for node in trace.graph.nodes if getattr(node.target, "__module__", "") == "_operator"}
    assert used == {operator.pow, operator.floordiv, operator.mod, operator.add, operator.mul, operator.truediv}
    run = fx.GraphModule({}, trace.graph)
    for rows in (2, 5, 8):
        assert torch.equal(run(torch.zeros(rows, 2), rows)[0], Arithmetic()(torch.zeros(rows, 2)))


def test_outputs_know_the_dimension_of_the_rows() -> None:
    class Outputs(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"plain": x * 2, "transposed": x.t() + 1, "square": x @ x.t(), "none": x.sum()}

    trace = trace_of(Outputs(), torch.zeros(3, 4), gradients=False)
    assert trace.output_dims == (0, 1, -1, None)
    assert trace.result.keys == ("plain", "transposed", "square", "none")


class Injects(torch.autograd.Function):
    """A gradient of its own, whatever the loss."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient + torch.linspace(0, 1, 2)


def test_an_injected_gradient_is_told() -> None:
    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return Injects.apply(self.gate(x)).sum()  # type: ignore[no-untyped-call]

    [warning] = trace_of(Router(), torch.zeros(3, 2)).warnings
    assert warning.startswith("a gradient that does not depend on the loss enters the backward at ")
    assert "test_read_trace.py:" in warning


def test_a_checkpoint_is_told() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.layer, x, use_reentrant=False).sum()

    [warning] = trace_of(Checkpointed(), torch.zeros(3, 2)).warnings
    assert warning.startswith("torch.utils.checkpoint inside the model: values are right, but its activations are kept")
