"""A trace joined of two costs what a trace for any number of rows between them costs; what can't be joined is refused."""

from __future__ import annotations

import numpy
import pytest
import torch
from torch import Tensor, nn

from pdcompiler.core.cost import CostTable
from pdcompiler.core.ir import Trace, cost_of, type_of
from pdcompiler.passes.tracing.annotate_costs import annotate_costs
from pdcompiler.passes.tracing.join_rows import Outline, costs_agree, join_rows, outline
from tests.levels import TwoLayers, total, trace_of


class Sized(nn.Module):
    """Its rows flattened into another dimension, and a constant beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.table = nn.Linear(6, 6), nn.Parameter(torch.ones(7, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.reshape(-1, 6)).mean() + torch.tanh(self.table).sum()


class OneMore(nn.Module):
    """One row more than the batch has: neither constant nor as many times as there are rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(1, 12))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.first, x]).tanh()


class Branches(nn.Module):
    """Another operation from four rows on."""

    def __init__(self, many: object, few: object) -> None:
        super().__init__()
        self.weight, self.many, self.few = nn.Parameter(torch.ones(12)), many, few

    def forward(self, x: Tensor) -> Tensor:
        return (self.many if x.shape[0] >= 4 else self.few)(x * self.weight)  # type: ignore[operator]


def at(model: nn.Module, rows: int) -> Trace:
    return trace_of(model, torch.zeros(8, 12), loss_fn=total, rows=rows, symbolic=False)


def joined(model: nn.Module, low: int, high: int) -> tuple[Trace | None, Outline, Outline]:
    trace, other = at(model, high), outline(at(model, low))
    own = outline(trace)
    return join_rows(trace, own, other), own, other


@pytest.mark.parametrize("model", [TwoLayers(), Sized()], ids=["two layers", "sized"])
def test_a_joined_trace_costs_at_other_rows_what_a_trace_for_them_costs(model: nn.Module) -> None:
    if isinstance(model, TwoLayers):
        model.first = nn.Linear(12, 8)
    trace, own, other = joined(model, 2, 8)
    assert trace is not None and trace.rows is None
    assert [trace.admits(rows) for rows in (1, 2, 5, 8, 9)] == [False, True, True, True, False]
    assert costs_agree(annotate_costs(trace), own, other)
    third = outline(at(model, 5))
    costs = CostTable([cost_of(node) for node in trace.graph.nodes if node.op != "output"])
    assert costs.at(5).sum() > costs.at(2).sum() and numpy.array_equal(costs.at(5), third.costs)


def test_sizes_grow_as_the_rows_do() -> None:
    trace, *_ = joined(Sized(), 2, 8)
    assert trace is not None
    shapes = {str(type_of(node).shape) for node in trace.graph.nodes if node.op == "call_function"}
    assert "(2*rows, 6)" in shapes and "(7, 6)" in shapes


@pytest.mark.parametrize("model", [OneMore(), Branches(torch.tanh, torch.sin), Branches(lambda x: x.tanh().sin(), torch.tanh)])
def test_traces_that_differ_otherwise_are_not_joined(model: nn.Module) -> None:
    assert joined(model, 2, 8)[0] is None


def test_costs_that_do_not_follow_from_the_sizes_are_noticed() -> None:
    trace, own, other = joined(Sized(), 2, 8)
    assert trace is not None and costs_agree(annotate_costs(trace), own, other)
    costs = other.costs.copy()
    costs[-1, 0] += 1
    assert not costs_agree(trace, own, Outline(other.rows, other.nodes, costs))
