"""What every rewrite of a graph needs and fx does not do: arguments with any keys, and which nodes are dead.

Not here: what a node means (`ir.py`).
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from torch import fx


def replaced(argument: Any, copies: Mapping[fx.Node, Any]) -> Any:
    """An argument, nested as it may be, with nodes replaced by their copies; dicts may have any keys."""
    if isinstance(argument, fx.Node):
        return copies.get(argument, argument)
    if isinstance(argument, Mapping):
        return {key: replaced(item, copies) for key, item in argument.items()}
    if isinstance(argument, (tuple, list)):
        return type(argument)(replaced(item, copies) for item in argument)
    return argument


def nodes_in(argument: Any) -> list[fx.Node]:
    """The nodes in an argument, nested as it may be."""
    found: list[fx.Node] = []
    fx.node.map_arg(argument, lambda node: found.append(node) or node)  # type: ignore[func-returns-value]
    return found


def unpack(graph: fx.Graph, copies: dict[fx.Node, fx.Node], name: str, places: Mapping[fx.Node, int], backward: bool) -> None:
    """A placeholder for a tuple in a function that is cut out of another graph, and for each node the item that stands for it."""
    whole = graph.placeholder(name)
    whole.meta = {"type": None, "backward": backward}
    for node, place in places.items():
        copies[node] = graph.create_node("call_function", operator.getitem, (whole, place), name=node.name)
        copies[node].meta = dict(node.meta)


def is_taken(node: fx.Node) -> bool:
    """Whether a function does not make a value but takes it: a placeholder, or an item of one."""
    source = node.args[0] if node.target is operator.getitem else node
    return isinstance(source, fx.Node) and source.op == "placeholder"


def eliminate_dead_code(graph: fx.Graph) -> None:
    """Drop what nobody needs from a program. Stage functions are pure; words with an effect stay."""
    graph.eliminate_dead_code(lambda n: n.op in ("placeholder", "output") or (n.op == "call_function" and n.is_impure()))
