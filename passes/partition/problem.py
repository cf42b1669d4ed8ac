"""A trace as a row of forward operations with costs, and the places where it may be cut.

    position      0        1       2         3
    operation     embed    block   block     head     (forward nodes in the order the model runs them)
    seconds       0.1      2.0     2.0       1.0      forward and the backward that it causes
    cut before 2: bytes of the activations that are made before and read after

Values that every rank can make for itself (masks, position ids) and views of weights cross nothing. A cut may not part the
reads of a written buffer from its new value, a value of data-dependent shape from its readers, nor the readers of a parameter
within one module call (the steps of an LSTM): a Partition could not say it. Not here: where to cut.
"""

from __future__ import annotations

from collections import defaultdict

import numpy
import numpy.typing
from torch import fx

from pdcompiler.core.ir import (
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
from pdcompiler.core.partition import Flags, Floats, Problem
from pdcompiler.core.value_type import estimate
from pdcompiler.core.values import Origins, readers_of


def make_problem(trace: Trace, machine: Machine, rows: int) -> Problem:
    """Price the trace for microbatches of `rows` rows."""
    origins = Origins(trace)
    nodes = [n for n in trace.graph.nodes if n.op == "call_function" and not is_backward(n) and not is_integer(n)]
    place = {node: i for i, node in enumerate(nodes)}
    free = (origins.batch_values | origins.weight_values) - origins.parameter_values
    seconds = _seconds(trace, nodes, machine, rows)
    sent, messages, legal = numpy.zeros(len(nodes)), numpy.zeros(len(nodes)), numpy.ones(len(nodes), dtype=bool)
    legal[0] = False
    for node in nodes:
        last = max((place[user] for user in node.users if user in place), default=-1)
        if last <= place[node] or node in free:
            continue
        between = slice(place[node] + 1, last + 1)
        type = type_of(node)
        if not isinstance(type, ValueType) or has_data_dependent_shape(type):
            legal[between] = False
        else:
            sent[between] += evaluate(type.nbytes(), rows)
            messages[between] += 1
    for first, last in (*_written_buffers(trace, place), *_parameters_in_calls(trace, place)):
        legal[first + 1 : last + 1] = False
    return Problem(nodes, seconds, sent, messages, legal, _anchored(trace, place), machine)


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


def _seconds(trace: Trace, nodes: list[fx.Node], machine: Machine, rows: int) -> Floats:
    """Backward operations count for the forward operation with their seq_nr, the first of those that share it: one without
    gradient has the number of the one before."""
    place = {node.meta["seq_nr"]: i for i, node in reversed(list(enumerate(nodes)))}
    seconds = numpy.zeros(len(nodes))
    at = {node: i for i, node in enumerate(nodes)}
    for node in trace.graph.nodes:
        if node.op == "call_function":
            index = at.get(node, place.get(node.meta.get("seq_nr"), len(nodes) - 1))
            seconds[index] += estimate(machine.compute_seconds(cost_of(node)), rows)
    return seconds


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
