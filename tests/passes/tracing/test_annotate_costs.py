"""Costs in rows: products are counted as torch's own FlopCounterMode counts them, forward and backward, for any rows."""

from typing import Any

import pytest
import sympy
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from pdcompiler.core.cost import Cost
from pdcompiler.core.ir import Trace, cost_of, evaluate, is_backward
from pdcompiler.passes.tracing.annotate_costs import FLOPS
from tests.levels import trace_of


class Attention(nn.Module):
    """Two heads; F.scaled_dot_product_attention."""

    def __init__(self) -> None:
        super().__init__()
        self.projections, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.projections(x).chunk(3, -1))
        result: Tensor = self.out(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))
        return result


class Recurrent(nn.Module):
    """An LSTM, its hidden states alone."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 6, batch_first=True, num_layers=2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.lstm(x)[0]
        return result


MODELS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "linear": (nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3, bias=False)), (6,)),
    "linear over a sequence": (nn.Linear(6, 8), (3, 6)),
    "convolution": (nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 6, 3, stride=2, dilation=2)), (2, 9, 9)),
    "transposed convolution": (nn.Sequential(nn.ConvTranspose2d(2, 4, 2, stride=2), nn.Conv2d(4, 3, 1)), (2, 5, 5)),
    "attention": (Attention(), (7, 8)),
    "lstm": (Recurrent(), (3, 4)),
}

aten = torch.ops.aten
ON_CPU = {  # torch's own formulas, which it applies to the CUDA kernels of attention alone
    aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda g, q, k, v, *_, **__: sdpa_backward_flop_count(g, q, k, v),
}


@pytest.mark.parametrize("name", MODELS)
def test_products_are_counted_as_torch_counts_them(name: str) -> None:
    model, shape = MODELS[name]
    model.double()  # in float32 a CPU runs an LSTM as one operation, which torch does not count
    rows = 11
    with FlopCounterMode(display=False, custom_mapping=ON_CPU) as forward:
        loss = model(torch.zeros(rows, *shape, dtype=torch.float64)).square().mean()
    with FlopCounterMode(display=False, custom_mapping=ON_CPU) as backward:
        loss.backward()
    trace = trace_of(model, torch.zeros(2, *shape, dtype=torch.float64), target=None, loss_fn=square_mean, rows=13)
    assert (products(trace, rows, False), products(trace, rows, True)) == (forward.get_total_flops(), backward.get_total_flops())


def square_mean(outputs: Tensor, target: Any) -> Tensor:
    return outputs.square().mean()


def products(trace: Trace, rows: int, backward: bool) -> int:
    counted = [n for n in trace.graph.nodes if getattr(n.target, "_opname", "") in FLOPS and is_backward(n) == backward]
    assert counted
    return evaluate(sympy.Add(*(cost_of(node).flops for node in counted)), rows)


def test_a_grouped_convolution_costs_its_groups_in_each_of_the_three_products() -> None:
    """(torch counts the gradient of the weight as if there were one group.)"""
    trace = trace_of(nn.Conv2d(4, 6, 3, groups=2), torch.zeros(2, 4, 5, 5).requires_grad_(), loss_fn=square_mean, rows=13)
    one = 2 * (6 * 3 * 3) * (2 * 3 * 3)
    assert (products(trace, 1, False), products(trace, 1, True)) == (one, one)  # nothing needs the input's gradient


def test_other_operations_cost_their_elements_and_bytes_and_views_nothing() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return torch.tanh(x + y).flatten(1).transpose(0, 1)

    trace = trace_of(Model(), torch.zeros(3, 4, 5), torch.zeros(3, 4, 5), rows=7, gradients=False)
    costs = {node.name: cost_of(node) for node in trace.graph.nodes if node.op == "call_function"}
    rows = sympy.Symbol("rows", integer=True, positive=True)
    assert costs["add"] == Cost(20 * rows, 3 * 80 * rows)
    assert costs["tanh"] == Cost(20 * rows, 2 * 80 * rows)
    assert all(cost == Cost() for name, cost in costs.items() if name not in ("add", "tanh")) and len(costs) > 2


def test_costs_add() -> None:
    assert Cost(1, 2) + Cost(3, 4) == Cost(4, 6)
