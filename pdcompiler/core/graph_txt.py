"""PipeDream's profiles, `graph.txt`: read, written, and as a Workload.

    node1 -- Input0 -- forward_compute_time=0.000, backward_compute_time=0.000, activation_size=602112.000, parameter_size=0.000
    node2 -- LSTM(8) -- forward_compute_time=3.190, backward_compute_time=5.348, activation_size=[64.0; 8.0], parameter_size=768.0
    <TAB>node1 -- node2

Times are milliseconds of a minibatch, sizes bytes. A node may end in ` -- stage_id=K`: the optimizer's answer. A file that is
read and written again is the same, byte for byte. Not here: the optimizer's own cost model (`benchmarks/partition_quality.py`).
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import numpy

from pdcompiler.core.errors import CompileError
from pdcompiler.core.workload import Value, Workload

SEPARATOR = " -- "
FORWARD, BACKWARD, ACTIVATION, PARAMETERS = "forward_compute_time", "backward_compute_time", "activation_size", "parameter_size"
TIMES_AND_SIZES = (FORWARD, BACKWARD, ACTIVATION, PARAMETERS)
EXAMPLE = "node1 -- Conv2d(3, 64) -- " + ", ".join(f"{name}=1.000" for name in TIMES_AND_SIZES)
MILLISECOND = 1e-3


@dataclass(frozen=True)
class GraphNode:
    """One layer. activation_bytes: of its outputs.   form: how they are written, "[64.0; 8.0]" as a list, "64.000" fixed, "64.0"
    plain.   line: where it stood."""

    name: str
    description: str
    forward_ms: float
    backward_ms: float
    activation_bytes: tuple[float, ...]
    parameter_bytes: float
    stage: int | None = None
    form: str = "fixed"
    line: int = 0

    @property
    def is_input(self) -> bool:
        """Whether it stands for the data: its time is that of loading it, which no pipeline pays."""
        return self.description.startswith("Input")


@dataclass(frozen=True)
class Graph:
    """Nodes and edges (from, to) in the order of the file."""

    nodes: tuple[GraphNode, ...]
    edges: tuple[tuple[str, str], ...]

    @staticmethod
    def parse(text: str, source: str = "graph.txt") -> Graph:
        """Raises CompileError, with the line, where the text is no profile: a number is missing, an edge's end or a node is
        unknown or there twice, the edges make a cycle."""
        return _Reader(source).read(text)

    @staticmethod
    def load(path: str | Path) -> Graph:
        """Read a file; see `parse`."""
        try:
            text = Path(path).read_text()
        except OSError as error:
            raise CompileError(f"the profile {path} can't be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise CompileError(f"the profile {path} is no text: {error}") from error
        return Graph.parse(text, str(path))

    def save(self, path: str | Path) -> None:
        """Write it."""
        Path(path).write_text(str(self))

    def __str__(self) -> str:
        return "\n".join([*map(_node_line, self.nodes), *(f"\t{before}{SEPARATOR}{after}" for before, after in self.edges)])

    def order(self) -> list[int]:
        """The nodes in a topological order, by number where that leaves a choice: PipeDream numbers them as the model runs."""
        place = {node.name: k for k, node in enumerate(self.nodes)}
        sorter = TopologicalSorter({node.name: () for node in self.nodes})
        for before, after in self.edges:
            sorter.add(after, before)
        sorter.prepare()
        ready: list[tuple[int, int]] = []
        order: list[int] = []
        while sorter.is_active():
            for name in sorter.get_ready():
                heapq.heappush(ready, (_number(name), place[name]))
            k = heapq.heappop(ready)[1]
            order.append(k)
            sorter.done(self.nodes[k].name)
        return order

    def to_workload(self) -> Workload:
        """Its layers, one kind of device, a microbatch being what was profiled. The data's own time is left out. What a layer
        makes is one Value, however many outputs there are, and it waits for the backward."""
        nodes = [self.nodes[k] for k in self.order()]
        place = {node.name: k for k, node in enumerate(nodes)}
        readers: dict[int, set[int]] = defaultdict(set)
        for before, after in self.edges:
            readers[place[before]].add(place[after])
        made = numpy.array([sum(node.activation_bytes) for node in nodes])
        seconds = numpy.array([(0.0, 0.0) if n.is_input else (n.forward_ms, n.backward_ms) for n in nodes]) * MILLISECOND
        values = tuple(Value(k, tuple(sorted(readers[k])), float(made[k])) for k in sorted(readers))
        parameters = numpy.array([node.parameter_bytes for node in nodes])
        names = tuple(f"{node.name} {node.description}" for node in nodes)
        return Workload(names, seconds[None, :, 0], seconds[None, :, 1], parameters, made, numpy.zeros(len(nodes)), values)

    @staticmethod
    def from_workload(workload: Workload, stages: Sequence[int] | None = None, kind: int = 0) -> Graph:
        """The layers on one kind of device. stages: of each layer. A layer's several values become a list; its saved bytes are
        written where it makes none; working bytes and groups have no place in the format."""
        made: dict[int, list[Value]] = defaultdict(list)
        for value in workload.values:
            made[value.producer].append(value)
        nodes = []
        for k, described in enumerate(workload.names):
            name, description = _names(k, described)
            sizes = tuple(value.bytes for value in made[k]) or (float(workload.saved[k]),)
            forward, backward = (float(side[kind, k]) / MILLISECOND for side in (workload.forward, workload.backward))
            stage, form = None if stages is None else stages[k], "list" if len(sizes) > 1 else "fixed"
            nodes.append(GraphNode(name, description, forward, backward, sizes, float(workload.parameters[k]), stage, form))
        edges = sorted({(reader, value.producer) for value in workload.values for reader in value.consumers})
        return Graph(tuple(nodes), tuple((nodes[before].name, nodes[after].name) for after, before in edges))


class _Reader:
    """One text, line by line."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.nodes: dict[str, GraphNode] = {}
        self.edges: dict[tuple[str, str], int] = {}

    def read(self, text: str) -> Graph:
        for number, line in enumerate(text.split("\n"), 1):
            if line.startswith("\t"):
                self.edge(number, line[1:])
            elif line.strip():
                self.node(number, line)
        if not self.nodes:
            raise CompileError(f"{self.source} has no nodes", ways_out=(f"lines such as: {EXAMPLE}",))
        for (before, after), number in self.edges.items():
            for name in (before, after):
                if name not in self.nodes:
                    raise self.error(number, f"the edge from {before} to {after}: there is no node {name}")
        graph = Graph(tuple(self.nodes.values()), tuple(self.edges))
        try:
            graph.order()
        except CycleError as error:
            cycle: list[str] = error.args[1]
            number = self.edges[cycle[0], cycle[1]]
            raise self.error(number, f"the edges make a cycle: {' -> '.join(cycle)}") from None
        return graph

    def node(self, number: int, line: str) -> None:
        parts = line.rstrip("\r").split(SEPARATOR)
        if len(parts) not in (3, 4):
            raise self.error(number, f"{len(parts)} parts between ` -- `, a node has 3, or 4 with its stage", EXAMPLE)
        name, description, metadata = parts[:3]
        if name in self.nodes:
            raise self.error(number, f"{name} stands in line {self.nodes[name].line} already")
        given: Mapping[str, str] = dict(pair.split("=", 1) for pair in metadata.split(", ") if "=" in pair)
        if missing := [field for field in TIMES_AND_SIZES if field not in given]:
            raise self.error(number, f"{name} lacks {', '.join(missing)}", EXAMPLE)
        forward, backward, activation, parameters = (given[field] for field in TIMES_AND_SIZES)
        is_list = activation.startswith("[") and activation.endswith("]")
        texts = [forward, backward, parameters, *(activation[1:-1].split("; ") if is_list else [activation])]
        fields = [FORWARD, BACKWARD, PARAMETERS, *[ACTIVATION] * (len(texts) - 3)]
        amounts = [self.amount(number, f"{name}: {field}", text) for field, text in zip(fields, texts, strict=True)]
        form = "list" if is_list else "fixed" if activation == f"{amounts[3]:.3f}" else "plain"
        stage, sizes = self.stage(number, parts[3:]), tuple(amounts[3:])
        self.nodes[name] = GraphNode(name, description, amounts[0], amounts[1], sizes, amounts[2], stage, form, number)

    def edge(self, number: int, line: str) -> None:
        ends = line.rstrip("\r").split(SEPARATOR)
        if len(ends) != 2:
            raise self.error(number, "an edge is a tab, then a node, ` -- `, and a node that reads it", "\\tnode1 -- node2")
        before, after = ends
        if (before, after) in self.edges:
            raise self.error(number, f"the edge from {before} to {after} stands in line {self.edges[before, after]} already")
        self.edges[before, after] = number

    def amount(self, number: int, what: str, text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise self.error(number, f"{what} is {text!r}, expected a number") from None
        if not (value >= 0 and math.isfinite(value)):
            raise self.error(number, f"{what} is {text}, expected a number of at least 0")
        return value

    def stage(self, number: int, rest: Sequence[str]) -> int | None:
        if not rest:
            return None
        key, _, value = rest[0].partition("=")
        if key != "stage_id" or not value.isdigit():
            raise self.error(number, f"the last part is {rest[0]!r}, expected stage_id= and a whole number")
        return int(value)

    def error(self, number: int, what: str, example: str | None = None) -> CompileError:
        ways_out = () if example is None else (f"a line such as: {example}",)
        return CompileError(what, where=f"{self.source}, line {number}", ways_out=ways_out)


def _node_line(node: GraphNode) -> str:
    total = sum(node.activation_bytes)
    sizes = f"[{'; '.join(map(repr, node.activation_bytes))}]" if node.form == "list" else _number_text(total)
    texts = [_number_text(node.forward_ms), _number_text(node.backward_ms), sizes, _number_text(node.parameter_bytes)]
    if node.form == "plain":
        texts[2] = repr(total)
    metadata = ", ".join(f"{field}={text}" for field, text in zip(TIMES_AND_SIZES, texts, strict=True))
    stage = () if node.stage is None else (f"stage_id={node.stage}",)
    return SEPARATOR.join((node.name, node.description, metadata, *stage))


def _number_text(value: float) -> str:
    """Three digits, as PipeDream writes; all of them where three would lose something."""
    short = f"{value:.3f}"
    return short if float(short) == value else repr(float(value))


def _number(name: str) -> int:
    digits = name.removeprefix("node")
    return int(digits) if digits.isdecimal() else 0


def _names(place: int, described: str) -> tuple[str, str]:
    """A node's name and description from a layer's name: those of a graph that was read, or a new name."""
    name, _, description = described.partition(" ")
    if not (name.startswith("node") and name[4:].isdecimal() and description):
        name, description = f"node{place + 1}", described
    return name, description.replace("\n", " ").replace(SEPARATOR, " - ")
