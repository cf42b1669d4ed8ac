"""The trace of a plan: of two where they can be joined, with the costs of each number of rows; else symbolic."""

from __future__ import annotations

import os

import numpy
import pytest
import torch
from torch import nn

from pdcompiler import planning_trace as module
from pdcompiler.compiler import trace_model
from pdcompiler.core.batch import read_batch
from pdcompiler.core.cost import CostTable
from pdcompiler.core.ir import Trace, cost_of
from pdcompiler.planning_trace import planning_trace
from tests.levels import request, total
from tests.passes.tracing.test_join_rows import OneMore, Sized

BATCH = read_batch(Sized(), (torch.zeros(8, 12),), {}, None, None)


def traced(model: nn.Module, *rows: int) -> Trace:
    return planning_trace(request(model, loss_fn=total), BATCH, rows)


def costs(trace: Trace) -> CostTable:
    return CostTable([cost_of(node) for node in trace.graph.nodes if node.op != "output"])


def is_symbolic(trace: Trace) -> bool:
    return any(meaning.kind == "rows" for meaning in trace.inputs.values())


@pytest.mark.parametrize("copies", [True, False])
def test_several_numbers_of_rows_are_priced_as_each_by_itself(monkeypatch: pytest.MonkeyPatch, copies: bool) -> None:
    monkeypatch.setattr(module, "_can_copy_itself", lambda: copies)
    trace = traced(Sized(), 1, 2, 4, 8)
    assert not is_symbolic(trace) and [trace.admits(rows) for rows in (1, 2, 4, 8, 9)] == [True] * 4 + [False]
    own = trace_model(request(Sized(), loss_fn=total), BATCH, rows=4, symbolic=False, gradients=True)
    assert numpy.array_equal(costs(trace).at(4), costs(own).at(4))


def test_one_number_of_rows_is_a_trace_for_it() -> None:
    assert traced(Sized(), 4).rows == 4
    assert traced(Sized(), 1).rows == 1


def test_one_row_is_priced_as_the_others_are() -> None:
    """Which is what its own graph costs, but for views."""
    trace = traced(Sized(), 1, 2, 4, 8)
    own = trace_model(request(Sized(), loss_fn=total), BATCH, rows=1, symbolic=False, gradients=True)
    assert costs(trace).at(1).sum() == pytest.approx(costs(own).at(1).sum(), rel=0.05)


def test_what_can_not_be_joined_is_traced_with_symbols() -> None:
    trace = traced(OneMore(), 2, 4, 8)
    assert is_symbolic(trace) and trace.admits(4)


def test_work_that_fails_elsewhere_gives_nothing() -> None:
    assert module._elsewhere(lambda: 1 / 0)() is None  # type: ignore[arg-type,return-value]
    assert module._elsewhere(lambda: os._exit(1))() is None  # type: ignore[arg-type]
