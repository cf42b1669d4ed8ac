"""Make again, on each stage that reads it, what is cheaper to make than to send or to save.

    before                                   after
    mask = le(positions, 3)   # stage 0      mask   = le(positions, 3)   # stage 0
    a = where(mask, x, 0)     # stage 0      a = where(mask, x, 0)       # stage 0
    b = where(mask, y, 0)     # stage 1      mask_1 = le(positions, 3)   # stage 1
                                             b = where(mask_1, y, 0)     # stage 1

- Integers, views of weights and of buffers: once for each function (a stage's forward or backward) that reads them, so they
  are never saved and never sent. What else depends on weights alone (casts, a normed weight): once for each function of the
  stage that holds the weight, so a weight in it is always the version at hand.
- What depends on the batch alone (masks, position ids, rotary tables): once for each stage's forward, unless its matrix
  products would take longer than the message.

Afterwards every operation stands in exactly one function, and only activations, gradients and costly values of the batch
cross stages.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from pdcompiler.core.cost import Cost
from pdcompiler.core.ir import Trace, ValueType, cost_of, is_backward, is_integer, stage_of, type_of
from pdcompiler.core.machine import Machine
from pdcompiler.core.value_type import estimate
from pdcompiler.core.values import Origins, is_product

Function = tuple[int, bool]  # (stage, backward)


def localize_cheap_values(trace: Trace, machine: Machine, rows: int) -> Trace:
    """Copy cheap values into the functions that read them; see the module's docstring. Prices are for `rows` rows."""
    localizer = _Localizer(trace, machine, rows)
    for node in list(trace.graph.nodes):
        if node.op == "call_function" and not localizer.is_cheap(node):
            localizer.read_near(node, (stage_of(node), is_backward(node)))
    last = max((stage_of(n) for n in trace.graph.nodes if "stage" in n.meta), default=0)
    localizer.read_near(trace.graph.output_node(), (last, False))
    trace.graph.eliminate_dead_code()
    return trace


class _Localizer:
    """Copies on demand, each once per function."""

    def __init__(self, trace: Trace, machine: Machine, rows: int) -> None:
        self.graph = trace.graph
        origins = Origins(trace)
        self.weights = origins.weight_values
        self.of_parameters = origins.parameter_values
        self.batch = {n for n in origins.batch_values if not is_integer(n) and self._worth(n, origins, machine, rows)}
        self.integers = {n for n in trace.graph.nodes if n.op == "call_function" and is_integer(n)}
        self.copies: dict[tuple[fx.Node, Function], fx.Node] = {}

    @staticmethod
    def _worth(node: fx.Node, origins: Origins, machine: Machine, rows: int) -> bool:
        """Whether the products needed to make a value of the batch take no longer than its message."""
        if not isinstance(type := type_of(node), ValueType):
            return True
        made_of = [n for n in _ancestors(node) if n in origins.batch_values and is_product(n)]
        flops = sum(cost_of(n).flops for n in made_of)
        seconds = machine.compute_seconds(Cost(flops=flops)) - machine.transfer_seconds(type.nbytes())
        return estimate(seconds, rows) <= 0

    def is_cheap(self, node: fx.Node) -> bool:
        return node in self.weights or node in self.batch or node in self.integers

    def read_near(self, reader: fx.Node, function: Function) -> None:
        """Let a node of `function` read the copies there."""
        for source in reader.all_input_nodes:
            if (copy := self.near(source, function)) is not source:
                reader.replace_input_with(source, copy)

    def near(self, node: fx.Node, function: Function) -> fx.Node:
        """`node` itself, or its copy in `function`. A copy stands right before the original, so the order stays right."""
        if not self.is_cheap(node):
            return node
        if node in self.batch:
            function = (function[0], False)
        if node in self.of_parameters and function[0] != stage_of(node):
            function = (stage_of(node), False)
        key = (node, function)
        if key not in self.copies:
            inputs = {i: self.near(i, function) for i in node.all_input_nodes}
            with self.graph.inserting_before(node):
                copy = self.graph.node_copy(node, lambda n: inputs[n])
            copy.meta = dict(node.meta, stage=function[0], backward=function[1])
            self.copies[key] = copy
        return self.copies[key]


def _ancestors(node: fx.Node) -> Iterator[fx.Node]:
    seen, todo = {node}, [node]
    while todo:
        current = todo.pop()
        yield current
        new = [i for i in current.all_input_nodes if i not in seen]
        seen.update(new)
        todo += new

