"""A trace as a row of layers with costs: what runs between two neighbouring places where a stage may begin.

    forward nodes   embed   norm  linear gelu linear add   norm linear ...  (in the order the model runs them)
    a stage may     |       |     |           |            |    |           where its first operation names it
    begin
    layers          [embed] [norm][linear gelu][linear add][norm][linear ...

A layer's backward is what its forward operations cause. Values that every rank can make for itself (masks, position ids) and
views of weights cross nothing. A cut may not part the reads of a written buffer from its new value, a value of data-dependent
shape from its readers, nor the readers of a parameter within one module call (the steps of an LSTM): a Partition could not say
it. Not here: where to cut.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from itertools import pairwise

import numpy
import numpy.typing
from torch import fx

from pdcompiler.core.cost import FIELDS, CostTable, compile_expressions
from pdcompiler.core.ir import (
    Integer,
    ModuleCall,
    Trace,
    ValueType,
    cost_of,
    evaluate,
    has_data_dependent_shape,
    is_backward,
    is_integer,
    module_of,
    type_of,
)
from pdcompiler.core.machine import Machine
from pdcompiler.core.partition import Flags, Problem
from pdcompiler.core.values import Origins, readers_of
from pdcompiler.core.workload import Floats, Value, Workload


def make_problem(trace: Trace, machine: Machine, rows: int) -> Problem:
    """Price the trace for microbatches of `rows` rows."""
    return Layers(trace).problem(machine, rows)


class Layers:
    """A trace as layers, whatever the rows. Another number of rows or another machine takes a fraction of the time."""

    def __init__(self, trace: Trace) -> None:
        self.nodes = [n for n in trace.graph.nodes if n.op == "call_function" and not is_backward(n) and not is_integer(n)]
        place = {node: i for i, node in enumerate(self.nodes)}
        origins = Origins(trace)
        free = (origins.batch_values | origins.weight_values) - origins.parameter_values
        crossing = _crossing(place, free)
        self.legal = numpy.ones(len(self.nodes), dtype=bool)
        self.legal[0] = False
        for node, (last, nbytes) in crossing.items():
            if nbytes is None:
                self.legal[place[node] + 1 : last + 1] = False
        for first, last in (*_written_buffers(trace, place), *_parameters_in_calls(trace, place)):
            self.legal[first + 1 : last + 1] = False
        begins = [0, *map(int, numpy.flatnonzero(self.legal & _anchored(trace, place))), len(self.nodes)]
        self.places = _with_work(begins, [free.issuperset(self.nodes[first:last]) for first, last in pairwise(begins)])
        layer = {node: bisect.bisect_right(self.places, i) - 1 for i, node in enumerate(self.nodes)}
        computed = [node for node in trace.graph.nodes if node.op == "call_function"]
        self.at, self.is_back = _layer_of_all(computed, layer, len(self.places)), numpy.array([*map(is_backward, computed)])
        self.costs = CostTable([cost_of(node) for node in computed])
        self.parameters = _parameters(trace, layer, len(self.places))
        self.values, sizes = _values(layer, crossing)
        self.sizes = compile_expressions(sizes)

    def problem(self, machine: Machine, rows: int) -> Problem:
        """Priced for microbatches of `rows` rows."""
        columns = dict(zip(FIELDS, self.costs.at(rows).T, strict=True))
        measured, count = self.costs.seconds_at(rows), len(self.places)
        forward, backward = (numpy.zeros((len(machine.devices), count)) for _ in range(2))
        for kind, (device, _) in enumerate(machine.devices):
            moved = columns["bytes_read"] + columns["bytes_written"]
            modelled = columns["flops"] / device.flops_per_second + moved / device.memory_bytes_per_second
            modelled += columns["operations"] * device.seconds_per_operation
            seconds = numpy.where(numpy.isnan(measured), modelled, measured)
            numpy.add.at(forward[kind], self.at[~self.is_back], seconds[~self.is_back])
            numpy.add.at(backward[kind], self.at[self.is_back], seconds[self.is_back])
        saved, working = numpy.zeros(count), numpy.zeros(count)
        numpy.add.at(saved, self.at, columns["saved_bytes"])
        numpy.maximum.at(working, self.at, columns["output_bytes"])
        values: dict[tuple[int, tuple[int, ...]], float] = defaultdict(float)
        for crosses, nbytes in zip(self.values, self.sizes(rows).tolist(), strict=True):
            values[crosses] += nbytes
        workload = Workload(
            tuple(_name(self.nodes[start]) for start in self.places), forward, backward, self.parameters, saved, working,
            tuple(Value(*crosses, nbytes) for crosses, nbytes in values.items()), rows=rows,
        )  # fmt: skip
        return Problem(self.nodes, self.places, self.legal, workload)


def _with_work(begins: list[int], is_free: list[bool]) -> tuple[int, ...]:
    """Where layers begin, if what only makes free values belongs to the layer that follows."""
    kept = [begin for begin, before_is_free in zip(begins, [False, *is_free], strict=False) if not before_is_free]
    return tuple(kept[:-1] if kept[-1] == begins[-1] else kept)


def _crossing(place: dict[fx.Node, int], free: set[fx.Node]) -> dict[fx.Node, tuple[int, Integer | None]]:
    """Of each value that a cut may part from a reader: the last reader's position, and its bytes, None where it can't cross."""
    crossing: dict[fx.Node, tuple[int, Integer | None]] = {}
    for node in place:
        last = max((place[user] for user in node.users if user in place), default=-1)
        if last > place[node] and node not in free:
            type = type_of(node)
            fixed = isinstance(type, ValueType) and not has_data_dependent_shape(type)
            crossing[node] = (last, type.nbytes() if fixed else None)
    return crossing


def _values(
    layer: dict[fx.Node, int], crossing: dict[fx.Node, tuple[int, Integer | None]]
) -> tuple[list[tuple[int, tuple[int, ...]]], tuple[Integer, ...]]:
    """What crosses between layers: the layers that make it and that read it; and its bytes."""
    found = []
    for node, (_, nbytes) in crossing.items():
        consumers = tuple(sorted({layer[user] for user in node.users if user in layer} - {layer[node]}))
        if consumers and nbytes is not None:
            found.append(((layer[node], consumers), nbytes))
    return [crosses for crosses, _ in found], tuple(nbytes for _, nbytes in found)


def _name(node: fx.Node) -> str:
    return str(module_of(node)) or node.name


def _parameters(trace: Trace, layer: dict[fx.Node, int], layers: int) -> Floats:
    """Bytes of parameters by layer. One that several modules read (a tied head) counts with each: their stages will hold it;
    one that a module reads in several calls counts with the first."""
    nbytes = numpy.zeros(layers)
    for node in trace.graph.nodes:
        if node.op == "placeholder" and trace.inputs[node.name].kind == "parameter":
            first = {module_of(reader).path: layer[reader] for reader in reversed(readers_of(node)) if reader in layer}
            for index in set(first.values()):
                nbytes[index] += evaluate(type_of(node).nbytes(), 1)
    return nbytes


def _layer_of_all(computed: list[fx.Node], layer: dict[fx.Node, int], layers: int) -> numpy.typing.NDArray[numpy.int64]:
    """A backward operation counts for the forward operation with its seq_nr, the first of those that share it: one without
    gradient has the number of the one before."""
    first: dict[int, int] = {}
    for node, index in layer.items():
        first.setdefault(node.meta["seq_nr"], index)
    return numpy.array([layer.get(node, first.get(node.meta.get("seq_nr", -1), layers - 1)) for node in computed])


def _anchored(trace: Trace, place: dict[fx.Node, int]) -> Flags:
    """The readers of a parameter (the views of it that they read stand before them), and the first nodes of module calls."""
    anchored = numpy.zeros(len(place), dtype=bool)
    for node in trace.graph.nodes:
        if node.op == "placeholder" and trace.inputs[node.name].kind == "parameter":
            anchored[[place[reader] for reader in readers_of(node) if reader in place]] = True
    begun: set[ModuleCall] = {ModuleCall("")}
    for node, position in place.items():
        anchored[position] |= module_of(node) not in begun
        begun.add(module_of(node))
    return anchored


def _written_buffers(trace: Trace, place: dict[fx.Node, int]) -> list[tuple[int, int]]:
    """For each buffer that forward writes: the first position that reads it, and the one that makes its new value."""
    readers: dict[str, list[int]] = defaultdict(list)
    for node in trace.graph.nodes:
        meaning = trace.inputs.get(node.name) if node.op == "placeholder" else None
        if meaning is not None and meaning.kind == "buffer":
            readers[trace.canonical[meaning.name]] += [place[user] for user in node.users if user in place]
    spans = []
    for output, node in trace.output_nodes():
        if output.kind == "buffer" and node in place:
            made = place[node]
            spans.append((min([made, *readers[trace.canonical[output.name]]]), made))
    return spans


def _parameters_in_calls(trace: Trace, place: dict[fx.Node, int]) -> list[tuple[int, int]]:
    """For each parameter and module call that reads it more than once: the first and the last position that does."""
    reads: dict[tuple[fx.Node, ModuleCall], list[int]] = defaultdict(list)
    for node in trace.graph.nodes:
        if node.op == "placeholder" and trace.inputs[node.name].kind == "parameter":
            for reader in readers_of(node):
                if reader in place:
                    reads[node, module_of(reader)].append(place[reader])
    return [(min(places), max(places)) for places in reads.values()]
