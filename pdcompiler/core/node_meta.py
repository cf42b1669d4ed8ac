"""What is known of each node of a graph: the one typed door to `node.meta`.

Keys that this project writes, all of them read and written through the functions below:
  "module" (path, call number) of the module call that made the node;   "source" the user's "file:line"
  "backward" whether it belongs to the backward pass;   "seq_nr" torch's number of the forward op that caused it
  "type" ValueType, tuple of them, or a sympy expression for integers;   "cost" Cost;   "order" of dimensions in memory
  "stage", "rank", "microbatch", "phase" in programs.
Not here: the levels whose nodes these are (`ir.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy
from torch import fx

from pdcompiler.core.cost import Cost
from pdcompiler.core.value_type import ValueType


@dataclass(frozen=True)
class ModuleCall:
    """One call of a module's forward: the module's path in the user's model, and which call of it."""

    path: str
    number: int = 0

    def __str__(self) -> str:
        return self.path + (f"#{self.number}" if self.number else "")


def stage_of(node: fx.Node) -> int:
    """The stage a node belongs to."""
    return int(node.meta["stage"])


def rank_of(node: fx.Node) -> int:
    """The rank that runs a node of a program (for an `all_reduce`: the first of its ranks)."""
    return int(node.meta["rank"])


def module_of(node: fx.Node) -> ModuleCall:
    """The module call that made a node."""
    call = node.meta.get("module", ModuleCall(""))
    assert isinstance(call, ModuleCall)
    return call


def source_of(node: fx.Node) -> str | None:
    """The user's source line that made a node, as "file:line", where it is known."""
    return node.meta.get("source")


def where(node: fx.Node) -> str:
    """Module path and source line of a node, for messages."""
    path = str(module_of(node)) or "the model's own forward"
    return f"{path} ({source_of(node)})" if source_of(node) else path


def is_backward(node: fx.Node) -> bool:
    """Whether a node of a trace belongs to the backward pass."""
    return bool(node.meta.get("backward", False))


def type_of(node: fx.Node) -> Any:
    """ValueType of a tensor, a tuple of types of a tuple, a sympy expression of an integer; None where there is none."""
    return node.meta.get("type")


def order_of(node: fx.Node) -> tuple[int, ...] | None:
    """The dimensions of a trace's tensor from the largest stride to the smallest; None where that is their own order."""
    return node.meta.get("order")


def cost_of(node: fx.Node) -> Cost:
    """What running a node costs."""
    cost = node.meta.get("cost", Cost())
    assert isinstance(cost, Cost)
    return cost


def is_integer(node: fx.Node) -> bool:
    """Whether a node's value is an integer (or another scalar) computed from sizes; such values are never saved or sent."""
    return isinstance(type_of(node), (int, float, bool, sympy.Basic))


def describe(node: fx.Node, *, rank: int, stage: int | None = None, microbatch: int | None = None, phase: str = "",
             type: ValueType | None = None) -> fx.Node:
    """Give a program's node its metadata; returns the node."""
    node.meta.update(rank=rank, stage=stage, microbatch=microbatch, phase=phase, type=type)
    return node


def name_of(node: fx.Node) -> str:
    """The name that a program's node was given, without the number that keeps names apart in the global program."""
    return str(node.meta.get("name", node.name))
