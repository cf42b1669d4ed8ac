"""One trace to price for many numbers of rows, of two that are for one number each: symbols would take three times as long.

    for 2 rows     for 512 rows     joined
    [2, 64]        [512, 64]        [rows, 64]        a size grows as the rows do,
    [128, 32]      [32768, 32]      [64*rows, 32]
    [7, 64]        [7, 64]          [7, 64]           or is constant;
    [3, 64]        [513, 64]        none: there is no joined trace

Both must be the same graph, node by node, and the costs that follow from the joined sizes must be those that each has by itself.
So a size has one number to choose and two to agree with; what holds at both ends is taken to hold between them. Not here: a
trace that could run, for the integers among its arguments stay those of one number of rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy
from torch import fx

from pdcompiler.core.cost import CostTable, Floats
from pdcompiler.core.ir import ROWS, Trace, ValueType, cost_of, is_backward


@dataclass(frozen=True)
class Outline:
    """What is compared of a trace for one number of rows; it can be sent to another process. nodes: types and arguments.   costs:
    numbers, as in a CostTable."""

    rows: int
    nodes: tuple[Any, ...]
    costs: Floats


class _Unlike(Exception):
    """Two traces differ in more than sizes that grow as the rows do."""


def outline(trace: Trace) -> Outline:
    """Of a trace with costs."""
    assert trace.rows is not None
    place = {node: k for k, node in enumerate(_nodes(trace))}
    frozen = [(*_identity(node), _frozen(node.meta.get("type"), place), _frozen(node.args, place), _frozen(node.kwargs, place))
              for node in place]  # fmt: skip
    costs = CostTable([cost_of(node) for node in place]).at(trace.rows)
    return Outline(trace.rows, (*frozen, _frozen(trace.graph.output_node().args, place)), costs)


def join_rows(trace: Trace, own: Outline, other: Outline) -> Trace | None:
    """The trace, whose outline is `own`, with sizes for all numbers of rows between its own and the other's; None where they
    can't be joined. Its costs are not yet those of its sizes."""
    try:
        joined = [_joined(a, b, own.rows, other.rows) for a, b in zip(own.nodes, other.nodes, strict=True)]
    except (_Unlike, ValueError):
        return None
    for node, (*_, type, _, _) in zip(_nodes(trace), joined, strict=False):
        node.meta["type"] = type
    low, high = sorted((own.rows, other.rows))
    return replace(trace, rows=None, admits=lambda rows: low <= rows <= high)


def costs_agree(joined: Trace, *outlines: Outline) -> bool:
    """Whether the costs of a joined trace are, at the rows of each outline, its."""
    table = CostTable([cost_of(node) for node in _nodes(joined)])
    return all(numpy.array_equal(table.at(each.rows), each.costs) for each in outlines)


def _nodes(trace: Trace) -> list[fx.Node]:
    return [node for node in trace.graph.nodes if node.op != "output"]


def _identity(node: fx.Node) -> tuple[Any, ...]:
    return node.op, str(node.target), is_backward(node), str(node.meta.get("module"))


def _frozen(value: Any, place: Mapping[fx.Node, int]) -> Any:
    """Arguments and types, with names for nodes and for what has no sizes."""
    if isinstance(value, fx.Node):
        return f"node {place[value]}"
    if isinstance(value, (list, tuple)):
        return tuple([_frozen(item, place) for item in value])
    if isinstance(value, dict):
        return tuple([(name, _frozen(item, place)) for name, item in value.items()])
    return value if isinstance(value, (int, float, ValueType)) else str(value)


def _joined(a: Any, b: Any, rows: int, others: int) -> Any:
    if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
        return tuple([_joined(x, y, rows, others) for x, y in zip(a, b, strict=True)])
    if isinstance(a, ValueType) and isinstance(b, ValueType) and (a.dtype, a.device) == (b.dtype, b.device):
        return replace(a, shape=_joined(a.shape, b.shape, rows, others))
    if a == b or (isinstance(a, float) and isinstance(b, float)):  # no cost depends on floating-point arguments
        return a
    if type(a) is int and type(b) is int and a % rows == 0 and a * others == b * rows:
        return a // rows * ROWS
    raise _Unlike
