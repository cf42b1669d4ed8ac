"""A program while it is written: placeholders, calls of stage functions, what is cut out of the batch.

    x_0 = microbatch(x, start=0, stop=2, dim=0)            # rank 0
    stage0_forward_0 = stage0_forward(weights, x_0)        # rank 0

What every way to lower a schedule needs; not here: in which order anything is called.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import fx, nn

from pdcompiler.core import ops
from pdcompiler.core.ir import (
    RESERVED,
    Function,
    Microbatch,
    Program,
    Stage,
    ValueType,
    describe,
    eliminate_dead_code,
    evaluate,
    type_of,
)
from pdcompiler.core.machine import Machine
from pdcompiler.core.names import identifier
from pdcompiler.core.schedule import Schedule

Note = Mapping[str, Any]
"""Where a node belongs: rank, stage, microbatch and phase, as `ir.describe` takes them."""


def note_of(rank: int, stage: int | None, microbatch: int | None, phase: str) -> dict[str, Any]:
    """Where a node belongs."""
    return {"rank": rank, "stage": stage, "microbatch": microbatch, "phase": phase}


BUCKET = 25 * 2**20
"""Bytes of gradients that fill a bucket, as DistributedDataParallel's."""
LATENCIES = 60
"""That a bucket's bytes take to travel, at least, so that its own latency does not matter."""


def bucket_bytes(machine: Machine) -> float:
    """What fills a bucket: BUCKET; less where that is many latencies, so that the first travels while a backward still runs."""
    return min(LATENCIES * machine.link_latency_seconds * machine.link_bytes_per_second, BUCKET)


def buckets(types: Mapping[str, ValueType], least: float = BUCKET) -> Iterator[list[str]]:
    """Parameters whose gradients are reduced together: of one element type, in the given order; a bucket is full when it has so
    many bytes."""
    alike: dict[Any, list[str]] = defaultdict(list)
    for name, type in types.items():
        alike[type.dtype].append(name)
    for names in alike.values():
        bucket, size = list[str](), 0.0
        for name in names:
            bucket.append(name)
            size += evaluate(types[name].nbytes(), 1)
            if size >= least:
                yield bucket
                bucket, size = [], 0.0
        if bucket:
            yield bucket


def as_they_are_made(stage: Stage) -> dict[str, ValueType]:
    """The types of a stage's gradients, in the order in which its backward makes them."""
    types = zip(stage.gradients, stage.gradient_types, strict=True)
    if stage.backward is None or not stage.gradients:
        return dict(types)
    graph = stage.backward.module.graph
    place = {node: k for k, node in enumerate(graph.nodes)}
    made: Any = graph.output_node().args[0]
    nodes = dict(zip(stage.gradients, made[stage.backward.gives.index("gradients")], strict=True))
    return dict(sorted(types, key=lambda item: place[nodes[item[0]]]))


class ProgramWriter:
    """graph, root: of the program.   inputs: placeholder of each tensor of the batch."""

    def __init__(self, tensors: Iterable[str]) -> None:
        self.graph = fx.Graph()
        self.root = nn.Module()
        self.inputs = {name: self._placeholder(identifier(name, {*RESERVED, *ops.VOCABULARY})) for name in tensors}
        self.loss_weights = self._placeholder("loss_weights")
        self.seeds: fx.Node | None = None
        self._known: dict[tuple[Any, ...], fx.Node] = {}
        self._functions: dict[str, Function] = {}
        for node in self.graph.nodes:
            describe(node, rank=0)

    def _placeholder(self, name: str) -> fx.Node:
        """An input; what fx made of its name to keep names apart is the name of the argument too."""
        node = self.graph.placeholder(name)
        node.target = node.name
        return node

    def call(
        self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str, note: Note, type: ValueType | None = None
    ) -> fx.Node:
        """A word of the vocabulary, or an operator."""
        node = self.graph.create_node("call_function", target, args, kwargs, name=name)
        node.meta["name"] = name
        return describe(node, **note, type=type)

    def once(self, word: Any, name: str, note: Note) -> fx.Node:
        """What a stage holds on a rank at the program's entry: its `weights` or its `buffers`."""
        key = (word, note["stage"], note["rank"])
        if key not in self._known:
            self._known[key] = self.call(word, (), {"stage": note["stage"], "rank": note["rank"]}, name, note)
        return self._known[key]

    def of_batch(self, name: str, part: Stage, plan: Microbatch, dims: Mapping[str, int | None], note: Note) -> Any:
        """What a stage takes of its microbatch: the number of rows, the loss's weight, its seed, a tensor of the batch. None: of
        none of these is this the name."""
        if name == "rows":
            return plan.rows
        if name == "loss_weight":
            return self.loss_weight(note)
        if name == "seed":
            return self.seed(note)
        if name in part.batch:
            return self._rows_of(part.batch[name], plan, dims[part.batch[name]], note)
        return None

    def loss_weight(self, note: Note) -> fx.Node:
        """Of the loss of a microbatch."""
        return self._of_microbatch(self.loss_weights, "loss_weight", note)

    def seed(self, note: Note) -> fx.Node:
        """Of what a microbatch draws."""
        if self.seeds is None:
            with self.graph.inserting_after(self.loss_weights):
                self.seeds = describe(self._placeholder("seeds"), rank=0)
        return self._of_microbatch(self.seeds, "seed", note)

    def _of_microbatch(self, values: fx.Node, name: str, note: Note) -> fx.Node:
        """A microbatch's item of a placeholder, taken once on each rank."""
        m = note["microbatch"]
        key = (note["rank"], name, m)
        if key not in self._known:
            self._known[key] = self.call(operator.getitem, (values, m), {}, f"{name}_{m}", note)
        return self._known[key]

    def _rows_of(self, tensor: str, plan: Microbatch, dim: int | None, note: Note) -> fx.Node:
        """The microbatch's rows of a tensor, cut once on each rank; all of it, where it is not split."""
        if dim is None:
            return self.inputs[tensor]
        key = (note["rank"], tensor, note["microbatch"])
        if key not in self._known:
            where = {"start": plan.start, "stop": plan.stop, "dim": dim}
            name = f"{identifier(tensor)}_{note['microbatch']}"
            self._known[key] = self.call(ops.microbatch, (self.inputs[tensor],), where, name, note)
        return self._known[key]

    def stage_call(self, function: Function, arguments: Sequence[Any], note: Note, part: str = "") -> fx.Node:
        """Call a stage's function; the same function keeps its name, another one of that stage (for other rows) gets a number.
        part: of a backward, "_input" or "_weight"."""
        base = f"stage{note['stage']}_{'forward' if note['phase'] == 'F' else 'backward'}{part}"
        name, number = base, 0
        while self._functions.setdefault(name, function) is not function:
            number += 1
            name = f"{base}_{number}"
        if not hasattr(self.root, name):
            self.root.add_module(name, function.module)
        return describe(self.graph.create_node("call_module", name, tuple(arguments)), **note)

    def result(self, call: fx.Node, place: int, name: str, part: Stage, rows: int, note: Note) -> fx.Node:
        """One of the values that a stage's function gives."""
        type = part.types.get(name)
        given = type.at(rows) if isinstance(type, ValueType) else None
        return self.call(operator.getitem, (call, place), {}, f"{name}_{note['microbatch']}", note, given)

    def copied_buffers(self, stage: Stage, first: int, note: Note, newest: fx.Node | None = None) -> tuple[fx.Node, ...]:
        """For another replica: the first one's of the buffers that forwards write, its own of the rest. newest: what the first
        one's forwards gave, where they are not at the program's entry."""
        types, values = given_types(stage.forward, "buffers"), []
        for place, name in enumerate(stage.buffers):
            where = {**note, "rank": first} if name in stage.written else note
            given = newest if name in stage.written else None
            source = given or self.once(ops.buffers, f"stage{stage.index}_buffers", where)
            values.append(self.call(operator.getitem, (source, place), {}, identifier(name), where, types[place]))
        return tuple(values)

    def program(self, stages: Sequence[Stage], results: dict[int, Any], schedule: Schedule | None) -> Program:
        """What was written, with the results of each rank; what nobody reads is left out."""
        given: Any = results
        describe(self.graph.output(given), rank=0)
        eliminate_dead_code(self.graph)
        return Program(
            self.graph, self.root, len(results), schedule,
            {stage.index: stage.gradients for stage in stages},
            {name: type for stage in stages for name, type in as_they_are_made(stage).items()},
            {stage.index: stage.buffers for stage in stages},
        )


def given_types(function: Function, name: str) -> list[Any]:
    """Of the tensors in a tuple that a function gives: `buffers`, `gradients`."""
    given: Any = function.module.graph.output_node().args[0]
    return [type_of(node) for node in given[function.gives.index(name)]]
