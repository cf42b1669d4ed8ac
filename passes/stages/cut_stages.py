"""Cut a staged trace into one forward and one backward graph per stage.

    the trace                            stage 0                              stage 1
    h = linear(x, w0)       # 0          forward(weights, x) -> h, saved      forward(weights, h, target) -> loss, saved
    loss = ...(h, w1)       # 1          backward(weights, saved, d_h)        backward(weights, saved, loss_weight)
    d_h, d_w1 = ...         # 1            -> gradients                         -> d_h, gradients
    d_w0 = ...              # 0

A value that another function reads is an output; what a stage's backward reads of its own forward is `saved`, one tuple; what
it reads of an earlier stage's forward passes through the own forward first. Model inputs, weights, buffers and the number of
rows are taken, never saved. Not here: which operation stands where (`assign_stages`), and copies (`localize_cheap_values`).
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from pdcompiler.core.errors import CompileError
from pdcompiler.core.ir import (
    Function,
    Stage,
    Staged,
    Trace,
    ValueType,
    has_data_dependent_shape,
    is_backward,
    stage_of,
    type_of,
    where,
)
from pdcompiler.core.partition import Partition
from pdcompiler.core.rewriting import unpack
from pdcompiler.core.values import is_view


def cut_stages(trace: Trace, partition: Partition) -> Staged:
    """The stages of a trace whose every operation has a stage. Raises CompileError for values that can't cross."""
    cutter = _Cutter(trace, partition)
    stages = tuple(cutter.stage(index) for index in range(len(partition.stages)))
    named = [(output.kind, node.name) for output, node in trace.output_nodes()]
    loss = next((name for kind, name in named if kind == "loss"), None)
    outputs = tuple(name for kind, name in named if kind == "output")
    return Staged(stages, loss, outputs, trace.result)


@dataclass
class _Part:
    """The forward or backward of one stage while it is being collected."""

    body: list[fx.Node] = field(default_factory=list)
    takes: dict[fx.Node, None] = field(default_factory=dict)  # values of other stages, batch, loss_weight, rows, seed
    gives: dict[fx.Node, None] = field(default_factory=dict)  # values for other stages, loss, outputs


class _Cutter:
    """Collects every part once; `stage` then builds the graphs of one stage."""

    def __init__(self, trace: Trace, partition: Partition) -> None:
        self.trace = trace
        self.partition = partition
        self.has_backward = any(o.kind == "gradient" for o in trace.outputs)
        count = len(partition.stages)
        self.forward = [_Part() for _ in range(count)]
        self.backward = [_Part() for _ in range(count)]
        self.saved: list[dict[fx.Node, None]] = [{} for _ in range(count)]
        self.gradients: list[dict[str, list[fx.Node]]] = [{} for _ in range(count)]
        self.written: list[dict[str, fx.Node]] = [{} for _ in range(count)]
        for node in trace.graph.nodes:
            if node.op == "call_function":
                self._part(node).body.append(node)
        for node in trace.graph.nodes:
            if node.op == "call_function":
                for source in node.all_input_nodes:
                    self._edge(source, node)
        for output, node in trace.output_nodes():
            self._output(output.kind, output.name, node)

    def _part(self, node: fx.Node) -> _Part:
        return (self.backward if is_backward(node) else self.forward)[stage_of(node)]

    def _kind(self, node: fx.Node) -> str:
        return self.trace.inputs[node.name].kind if node.op == "placeholder" else node.op

    def _edge(self, source: fx.Node, reader: fx.Node) -> None:
        """Note what crossing this edge asks of the parts."""
        part, kind = self._part(reader), self._kind(source)
        if kind in ("batch", "rows", "loss_weight", "seed"):
            part.takes[source] = None
        if kind != "call_function" or self._part(source) is part:
            return
        if is_backward(source):
            self._cross(source, part)
            return
        if stage_of(source) != stage_of(reader):
            self._cross(source, self.forward[stage_of(reader)])
        if is_backward(reader):
            self.saved[stage_of(reader)][source] = None

    def _cross(self, source: fx.Node, to: _Part) -> None:
        type = type_of(source)
        if not isinstance(type, ValueType) or has_data_dependent_shape(type):
            raise CompileError(
                f"a value whose shape depends on data would cross stages: {type}", where=where(source),
                ways_out=("begin the stages elsewhere, so that it stays within one",),
            )
        if any(addresses := [n for n in _views_of(source) if n.target is torch.ops.aten.as_strided.default]):
            raise CompileError(
                "an operation addresses the memory of a value that would cross stages (as_strided)", where=where(addresses[0]),
                ways_out=("begin the stages elsewhere",),
            )
        self._part(source).gives[source] = None
        to.takes[source] = None

    def _output(self, kind: str, name: str, node: fx.Node) -> None:
        last = len(self.forward) - 1
        if kind in ("loss", "output"):
            part = self._part(node) if node.op == "call_function" else self.forward[last]
            if self._kind(node) == "parameter":
                owners = self.partition.owners()[self.trace.canonical[self.trace.inputs[node.name].name]]
                part = self.forward[owners[0]]
            if self._kind(node) == "batch":
                part.takes[node] = None
            part.gives[node] = None
            return
        canonical = self.trace.canonical[name]
        if kind == "gradient":
            self.gradients[stage_of(node)].setdefault(canonical, []).append(node)
            return
        stage = stage_of(node) if node.op == "call_function" else 0
        self.written[stage][canonical] = node
        readers = {stage_of(u) for p in self._placeholders("buffer", canonical) for u in p.users if u.op == "call_function"}
        if readers - {stage}:
            raise CompileError(
                f"buffer {name} is written on stage {stage} and read on stage {max(readers - {stage})}", where=where(node),
                ways_out=("begin the stages elsewhere, so that one stage does both",),
            )

    def _placeholders(self, kind: str, canonical: str) -> list[fx.Node]:
        return [
            node for node in self.trace.graph.nodes
            if node.op == "placeholder" and (meaning := self.trace.inputs[node.name]).kind == kind
            and self.trace.canonical[meaning.name] == canonical
        ]

    def stage(self, index: int) -> Stage:
        parts = (self.forward[index], self.backward[index])
        bodies = [node for part in parts for node in part.body]
        parameters = self.partition.stages[index].parameters
        given = [*self.written[index].values(), *self.forward[index].gives]
        buffers = tuple(dict.fromkeys((*self._names("buffer", bodies, given), *self.written[index])))
        builder = _Builder(self.trace, parameters, buffers)
        gives: list[tuple[str, Any]] = [(node.name, node) for node in self.forward[index].gives]
        if self.saved[index] and self.has_backward:
            gives.append(("saved", tuple(self.saved[index])))
        if self.written[index]:
            new = self.written[index]
            gives.append(("buffers", tuple(new.get(name) or self._placeholders("buffer", name)[0] for name in buffers)))
        forward = builder.build(f"Stage{index}Forward", self.forward[index], gives)
        backward = self._backward(index, builder) if self.has_backward and self.backward[index].body else None
        taken = dict.fromkeys(node for part in parts for node in part.takes if self._kind(node) == "batch")
        batch = {node.name: self.trace.inputs[node.name].name for node in taken}
        gradient_types = tuple(type_of(nodes[0]) for nodes in self.gradients[index].values())
        types = {node.name: type_of(node) for part in parts for node in (*part.gives, *part.takes)}
        return Stage(
            index, parameters, buffers, forward, backward, tuple(self.gradients[index]), gradient_types,
            tuple(self.written[index]), batch, types,
        )

    def _backward(self, index: int, builder: _Builder) -> Function:
        gives: list[tuple[str, Any]] = [(node.name, node) for node in self.backward[index].gives]
        if self.gradients[index]:
            gives.append(("gradients", tuple(tuple(nodes) for nodes in self.gradients[index].values())))
        return builder.build(f"Stage{index}Backward", self.backward[index], gives, saved=tuple(self.saved[index]))

    def _names(self, kind: str, body: Iterable[fx.Node], given: Iterable[fx.Node]) -> tuple[str, ...]:
        """Canonical names of what a body reads of one kind of placeholder, in the model's order."""
        read = {source for node in body for source in node.all_input_nodes} | set(given)
        return tuple(
            dict.fromkeys(
                self.trace.canonical[self.trace.inputs[n.name].name]
                for n in self.trace.graph.nodes if n in read and self._kind(n) == kind
            )
        )


def _views_of(node: fx.Node) -> list[fx.Node]:
    """The views, at any remove, of a value."""
    views = [user for user in node.users if is_view(user)]
    return views + [view for direct in views for view in _views_of(direct)]


class _Builder:
    """Builds a stage's functions: placeholders for what is taken, the body, the outputs."""

    def __init__(self, trace: Trace, parameters: tuple[str, ...], buffers: tuple[str, ...]) -> None:
        self.trace = trace
        self.places = {"parameter": parameters, "buffer": buffers}

    def build(
        self, name: str, part: _Part, gives: list[tuple[str, Any]], *, saved: tuple[fx.Node, ...] = ()
    ) -> Function:
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        read = self._read(part, gives)
        takes: list[str] = []
        for kind, whole in (("parameter", "weights"), ("buffer", "buffers")):
            wanted = [node for node in read if self._kind(node) == kind]
            if wanted:
                takes.append(whole)
                unpack(graph, copies, whole, {node: self._place(kind, node) for node in wanted}, backward=False)
        if saved:
            takes.append("saved")
            unpack(graph, copies, "saved", {node: i for i, node in enumerate(saved)}, backward=False)
        for node in part.takes:
            takes.append(node.name)
            copies[node] = graph.placeholder(node.name)
            copies[node].meta = dict(node.meta)
        for node in read:
            if node.op == "get_attr":
                copies[node] = graph.node_copy(node)
        for node in part.body:
            copies[node] = graph.node_copy(node, lambda n: copies[n])
        graph.output(tuple(_result(graph, value, copies) for _, value in gives))
        root = {str(n.target): getattr(self.trace.constants, str(n.target)) for n in graph.nodes if n.op == "get_attr"}
        module = fx.GraphModule(root, _ordered(graph), name)
        return Function(module, tuple(takes), tuple(given for given, _ in gives))

    def _kind(self, node: fx.Node) -> str:
        return self.trace.inputs[node.name].kind if node.op == "placeholder" else node.op

    def _place(self, kind: str, node: fx.Node) -> int:
        return self.places[kind].index(self.trace.canonical[self.trace.inputs[node.name].name])

    def _read(self, part: _Part, gives: list[tuple[str, Any]]) -> list[fx.Node]:
        """Placeholders and constants that the body reads or gives, in the trace's order."""
        read = {source for node in part.body for source in node.all_input_nodes}
        fx.node.map_arg(tuple(value for _, value in gives), read.add)
        return [node for node in self.trace.graph.nodes if node in read and node.op in ("placeholder", "get_attr")]


def _result(graph: fx.Graph, value: Any, copies: dict[fx.Node, fx.Node]) -> Any:
    """An output; several gradients of one tied parameter are added here."""
    if isinstance(value, fx.Node):
        return copies[value]
    parts = []
    for item in value:
        nodes = [copies[n] for n in item] if isinstance(item, tuple) else [copies[item]]
        total = nodes[0]
        for node in nodes[1:]:
            total = graph.call_function(operator.add, (total, node))
            total.meta = dict(node.meta)
        parts.append(total)
    return tuple(parts)


def _ordered(graph: fx.Graph) -> fx.Graph:
    """Placeholders first: unpacking stands between them."""
    first = next(iter(graph.nodes))
    for node in [n for n in graph.nodes if n.op == "placeholder"]:
        if node is not first:
            first.append(node)
            first = node
    return graph
