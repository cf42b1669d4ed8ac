"""Give every node of a trace its Cost: floating-point operations and bytes, as expressions in the rows.

    before                       after
    h = mm(x, w)   [rows, 8]     flops 96*rows, read 24*rows + 192, written 32*rows, saved 32*rows (d_w reads h), parameters 192
    v = view(h)                  free: makes no memory; what is read through it is saved by h

- saved: of the memory that an operation fills, what an operation of the backward reads, be it through views. Values of weights
  alone are never saved (`core/values.py`).
- parameters: each counts at the first operation of the forward that reads it, so that a sum over nodes counts it once.
- views and integers are free. An operator that nobody here knows costs its bytes, and a note in its Cost.

Not here: what an operator computes (`core/flops.py`), seconds (a Machine divides by its speeds), measured costs (`profile`).
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import sympy
from torch import fx

from pdcompiler.core.cost import Cost
from pdcompiler.core.flops import bytes_read_by, flops_of, kind_of, nbytes, stored_type, tensors
from pdcompiler.core.ir import Trace, is_backward, type_of
from pdcompiler.core.values import Origins, is_view, readers_of


def annotate_costs(trace: Trace) -> Trace:
    """Write `cost` to every node's metadata."""
    saved, parameters = saved_bytes(trace), parameter_bytes(trace)
    known: dict[Any, Cost] = {}
    for node in trace.graph.nodes:
        key = _key(node)
        if key not in known:
            known[key] = _cost(node)
        cost = known[key]
        if node in saved or node in parameters:
            cost = replace(cost, saved_bytes=saved.get(node, 0), parameter_bytes=parameters.get(node, 0))
        node.meta["cost"] = cost
    return trace


def _cost(node: fx.Node) -> Cost:
    """Of running a node, apart from what else of the trace there is."""
    kind, made = kind_of(node), tensors(type_of(node))
    size = sympy.Add(*(nbytes(t) for t in made))
    if kind == "integer" or not made:
        return Cost()
    if kind == "view":
        return Cost(output_bytes=size)
    notes = (f"{node.target}: not known, priced by its bytes alone",) if kind == "unknown" else ()
    return Cost(flops_of(node), bytes_read_by(node), size, size, operations=1, notes=notes)


def _key(node: fx.Node) -> Any:
    """Nodes with equal keys cost the same: the same operator on values of the same types. Large models repeat themselves."""
    if node.op != "call_function":
        return node.op
    places = {source: k for k, source in enumerate(node.all_input_nodes)}

    def freeze(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return places[value], type_of(value), stored_type(value)
        if isinstance(value, (list, tuple)):
            return tuple(freeze(item) for item in value)
        return value if isinstance(value, (int, float, bool, str, type(None))) else str(value)

    return node.target, freeze(node.args), tuple((name, freeze(node.kwargs[name])) for name in sorted(node.kwargs)), type_of(node)


def saved_bytes(trace: Trace) -> dict[fx.Node, Any]:
    """Of each node of the forward, the bytes of its memory that the backward reads."""
    weights = Origins(trace).weight_values
    saved: dict[fx.Node, dict[int, Any]] = defaultdict(dict)
    for node in trace.graph.nodes:
        if node.op != "call_function" or not is_backward(node):
            continue
        for source in node.all_input_nodes:
            maker, part = _memory(source)
            if maker.op == "call_function" and not is_backward(maker) and maker not in weights:
                type = type_of(maker)
                saved[maker][part] = sum(map(nbytes, tensors(type[part] if isinstance(type, tuple) else type)))
    return {node: sympy.Add(*parts.values()) for node, parts in saved.items()}


def _memory(node: fx.Node) -> tuple[fx.Node, int]:
    """The node that filled the memory of a value, and which of its outputs it is."""
    part = 0
    while is_view(node):
        if node.target is operator.getitem:
            part = node.args[1]  # type: ignore[assignment]
        node = node.all_input_nodes[0]
    return node, part


def parameter_bytes(trace: Trace) -> dict[fx.Node, Any]:
    """Of each node, the bytes of the parameters whose first reader it is; one of the forward, if any is."""
    order = {node: (is_backward(node), place) for place, node in enumerate(trace.graph.nodes)}
    readers: dict[str, list[fx.Node]] = defaultdict(list)
    types: dict[str, Any] = {}
    for node in _placeholders(trace, lambda kind: kind == "parameter"):
        name = trace.canonical[trace.inputs[node.name].name]
        types[name] = type_of(node)
        readers[name] += [reader for reader in readers_of(node) if reader.op == "call_function"]
    found: dict[fx.Node, Any] = defaultdict(int)
    for name, reading in readers.items():
        if reading:
            found[min(reading, key=order.__getitem__)] += nbytes(types[name])
    return found


def _placeholders(trace: Trace, wanted: Callable[[str], bool]) -> Iterable[fx.Node]:
    return [node for node in trace.graph.nodes if node.op == "placeholder" and wanted(trace.inputs[node.name].kind)]
