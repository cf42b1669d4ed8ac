"""Quiet, stable text of each level: a short line per node, for people and for golden tests.

    x = input
    x_0 = microbatch(x, start=0, stop=2, dim=0)  # rank 0
    tanh_0, saved_0 = stage0_forward(stage0_weights, x_0)  # rank 0
    tanh_0 = transfer(tanh_0, to=1)  # rank 1
    return {loss: loss, gradients: {0: stage0_gradients}}  # rank 0

Values that are taken out of a call right behind it stand in the call's own line. In a Program a name is that of its rank: two
ranks may have the same value under the same name. Not here: Python that runs (`backends/codegen.py`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx

from pdcompiler.core.ir import Function, Program, RankProgram, Stage, Staged, Trace, name_of, rank_of, stage_of

Names = Mapping[fx.Node, str]
Note = Callable[[fx.Node], str]


def show(level: Trace | Staged | Stage | Program | RankProgram | fx.Graph) -> str:
    """The text of a level."""
    if isinstance(level, Staged):
        return "\n\n".join(map(show, level.stages))
    if isinstance(level, Stage):
        functions = [("forward", level.forward)] + ([("backward", level.backward)] if level.backward else [])
        return "\n\n".join(_function(f"stage {level.index} {phase}", function) for phase, function in functions)
    if isinstance(level, Program):
        return _graph(level.graph, _names_by_rank(level.graph), _where)
    graph = level if isinstance(level, fx.Graph) else level.graph
    return _graph(graph, {node: node.name for node in graph.nodes}, _nothing if isinstance(level, RankProgram) else _where)


def show_node(node: fx.Node) -> str:
    """One node's line, for messages."""
    return "\n".join(_lines(node, {}, {n: n.name for n in (node, *node.all_input_nodes)}))


def _function(title: str, function: Function) -> str:
    nodes = function.module.graph.nodes
    body = _graph(function.module.graph, {node: node.name for node in nodes}, _nothing, inputs=False)
    header = f"{title}: {', '.join(function.takes)} -> {', '.join(function.gives)}"
    return "\n".join([header, *(f"    {line}" for line in body.splitlines())])


def _graph(graph: fx.Graph, names: Names, note: Note, *, inputs: bool = True) -> str:
    lines: list[str] = []
    told: set[fx.Node] = set()
    for node in graph.nodes:
        if node in told or (node.op == "placeholder" and not inputs):
            continue
        items = _items_behind(node)
        told.update(items.values())
        lines += [text + note(node) for text in _lines(node, items, names)]
    return "\n".join(lines)


def _items_behind(node: fx.Node) -> dict[int, fx.Node]:
    """By place, the values taken out of a call, where these stand right behind it and nobody else reads the call."""
    items: dict[int, fx.Node] = {}
    following = node.next
    while following.target is operator.getitem and following.args[0] is node and following.op == "call_function":
        items[following.args[1]] = following  # type: ignore[index]
        following = following.next
    is_call = node.op in ("call_module", "call_function")
    return items if is_call and len(items) == len(node.users) else {}


def _lines(node: fx.Node, items: Mapping[int, fx.Node], names: Names) -> Iterator[str]:
    if node.op == "output":
        results = node.args[0]
        by_rank = isinstance(results, dict) and results and all(isinstance(rank, int) for rank in results)
        given = [(f"  # rank {rank}", part) for rank, part in results.items()] if by_rank else [("", results)]  # type: ignore[union-attr]
        for rank, part in given:
            yield f"return {_results(part, names)}{rank}"
    elif node.op == "placeholder":
        yield f"{names[node]} = input"
    elif node.op == "get_attr":
        yield f"{names[node]} = constant"
    elif len(items) == 1:
        [(place, item)] = items.items()
        yield f"{names[item]} = {_call(node, names)}[{place}]"
    elif items:
        left = [names[items[place]] if place in items else "_" for place in range(max(items) + 1)]
        yield f"{', '.join(left)} = {_call(node, names)}"
    elif not node.users and node.op == "call_function" and node.is_impure():
        yield _call(node, names)
    else:
        yield f"{names[node]} = {_call(node, names)}"


def _call(node: fx.Node, names: Names) -> str:
    if node.target is operator.getitem:
        return f"{_value(node.args[0], names)}[{_value(node.args[1], names)}]"
    given = [_value(argument, names) for argument in node.args]
    given += [f"{name}={_value(argument, names)}" for name, argument in node.kwargs.items()]
    return f"{_operation(node.target)}({', '.join(given)})"


def _operation(target: Any) -> str:
    """The name without namespace and overload."""
    if isinstance(target, str):
        return target
    return str(getattr(target, "_opname", None) or getattr(target, "__name__", target))


def _results(value: Any, names: Names) -> str:
    """A tuple of results stands without its own brackets."""
    return ", ".join(_value(item, names) for item in value) if isinstance(value, tuple) else _value(value, names)


def _value(value: Any, names: Names) -> str:
    """An argument: nodes by name, keys and types without quotes or prefix."""
    if isinstance(value, fx.Node):
        return names[value]
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_value(item, names)}" for key, item in value.items()) + "}"
    if isinstance(value, tuple):
        return "(" + ", ".join(_value(item, names) for item in value) + ("," if len(value) == 1 else "") + ")"
    if isinstance(value, list):
        return "[" + ", ".join(_value(item, names) for item in value) + "]"
    if isinstance(value, torch._ops.OpOverload):
        return _operation(value)
    of_torch = isinstance(value, (torch.dtype, torch.device, torch.layout, torch.memory_format))
    return str(value).removeprefix("torch.") if of_torch else repr(value)


def _names_by_rank(graph: fx.Graph) -> dict[fx.Node, str]:
    """Names that are apart on each rank."""
    names: dict[fx.Node, str] = {}
    taken: set[tuple[int, str]] = set()
    for node in graph.nodes:
        base = f"{node.target}_{node.meta['microbatch']}" if node.op == "call_module" else name_of(node)
        rank = -1 if node.op == "placeholder" else rank_of(node)
        number, name = 0, base
        while (rank, name) in taken or (-1, name) in taken:
            number += 1
            name = f"{base}_{number}"
        taken.add((rank, name))
        names[node] = name
    return names


def _where(node: fx.Node) -> str:
    """The rank of an operation, or else its stage, as a remark."""
    if node.op in ("placeholder", "output", "get_attr"):
        return ""
    if node.meta.get("rank") is not None:
        return f"  # rank {rank_of(node)}"
    return f"  # stage {stage_of(node)}" if node.meta.get("stage") is not None else ""


def _nothing(node: fx.Node) -> str:
    return ""
