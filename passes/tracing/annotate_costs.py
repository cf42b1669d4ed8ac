"""Give every node of a trace its Cost: floating-point operations and bytes moved, as expressions in the rows.

Matrix products, convolutions and attention are counted by their sizes; every other operation by the elements it makes; views
and integers are free. Not here: seconds (a Machine divides by its speeds) and measured costs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch import fx

from pdcompiler.core.cost import Cost
from pdcompiler.core.ir import Trace, ValueType, type_of
from pdcompiler.core.values import is_view

aten = torch.ops.aten


def annotate_costs(trace: Trace) -> Trace:
    """Write `cost` to every node's metadata."""
    for node in trace.graph.nodes:
        node.meta["cost"] = _cost(node)
    return trace


def _cost(node: fx.Node) -> Cost:
    if node.op != "call_function" or is_view(node) or not _tensors(type_of(node)):
        return Cost()
    made = _tensors(type_of(node))
    read = [t for i in node.all_input_nodes for t in _tensors(type_of(i))]
    moved = sympy.Add(*(t.nbytes() for t in (*made, *read)))
    count = FLOPS.get(getattr(node.target, "_opname", ""), _elementwise)
    return Cost(count(node), moved)


def _tensors(type: Any) -> list[ValueType]:
    if isinstance(type, ValueType):
        return [type]
    return [t for part in type for t in _tensors(part)] if isinstance(type, tuple) else []


def _elementwise(node: fx.Node) -> Any:
    return sympy.Add(*(t.elements() for t in _tensors(type_of(node))))


def _product(node: fx.Node) -> Any:
    """mm, bmm, addmm, baddbmm: 2 m n k; the contracted size is the last of the left factor."""
    left = type_of(node.args[-2])  # type: ignore[arg-type]
    return 2 * type_of(node).elements() * left.shape[-1]


def _convolution(node: fx.Node) -> Any:
    """2 x output elements x weights per output channel."""
    weight, out = type_of(node.args[1]), type_of(node)  # type: ignore[arg-type]
    transposed = node.args[6]
    base = type_of(node.args[0]) if transposed else out  # type: ignore[arg-type]
    return 2 * base.elements() * sympy.Mul(*weight.shape[1:])


def _convolution_backward(node: fx.Node) -> Any:
    """The gradients of input and of weight cost a forward each."""
    weight = type_of(node.args[2])  # type: ignore[arg-type]
    transposed = node.args[7]
    base = type_of(node.args[1] if transposed else node.args[0])  # type: ignore[arg-type]
    wanted = sum(bool(flag) for flag in node.args[-1][:2])  # type: ignore[index, union-attr]
    return 2 * base.elements() * sympy.Mul(*weight.shape[1:]) * wanted


def _attention(node: fx.Node) -> Any:
    """Two products of query and keys: 4 x batch x heads x query x keys x width."""
    query, key = type_of(node.args[0]), type_of(node.args[1])  # type: ignore[arg-type]
    return 4 * query.elements() * key.shape[-2]


def _attention_backward(node: fx.Node) -> Any:
    """Five products where the forward has two."""
    query, key = type_of(node.args[1]), type_of(node.args[2])  # type: ignore[arg-type]
    return 10 * query.elements() * key.shape[-2]


FLOPS: dict[str, Callable[[fx.Node], Any]] = {
    "mm": _product,
    "bmm": _product,
    "addmm": _product,
    "baddbmm": _product,
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention": _attention,
    "_scaled_dot_product_efficient_attention": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "_scaled_dot_product_flash_attention_backward": _attention_backward,
    "_scaled_dot_product_efficient_attention_backward": _attention_backward,
}
