"""How many bytes a rank's program holds at each of its nodes, without running it.

    node                                             holds           while it runs
    h_0, saved_0 = stage0_forward(weights, x_0)      + h, saved      + what the function needs on its way
    send(h_0, to=1)                                  (h stays until the send is done: so many later sends of the channel)
    gradients_0 = stage0_backward(d_0, saved_0)      + gradients     + what the function needs on its way
    saved_0 = None                                   - saved

Values share memory where they are views; memory is free when nothing holds it: the program drops a value after its last reader,
what a stage function was given is held until it returns, and a message that is sent for as long as the distributed backend keeps
it. Sizes are those of the values themselves; what an operator needs inside, and what an allocator adds, is not counted. Not
here: when anything runs (`simulator.py`).
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from pdcompiler.core import ops
from pdcompiler.core.errors import CompileError
from pdcompiler.core.events import Memory
from pdcompiler.core.function_memory import Given, Needs, Value, needs_of
from pdcompiler.core.ir import RankProgram, ValueType, name_of, type_of

PARTS = {"saved": "saved", "kept": "saved", "gradients": "gradients", "buffers": "buffers"}
"""Of what a stage function gives, by the value's name (`ir.RESERVED`); all else is a value on its way."""
ON_ITS_WAY, MESSAGES, WORKING = "values", "messages", "working memory"


@dataclass(frozen=True)
class Holds:
    """What a program holds before it begins. weights, buffers: of each stage by name, the bytes; a tied weight once.   gradients:
    of each stage, the bytes of each.   inputs: of each input the bytes that this process has.   rows: of each microbatch.
    window: of each channel, how many sends may be open."""

    weights: Mapping[int, Mapping[str, int]]
    buffers: Mapping[int, Mapping[str, int]]
    gradients: Mapping[int, Sequence[int]]
    inputs: Mapping[str, int]
    rows: Sequence[int]
    window: Mapping[str, int]


@dataclass
class Live:
    """memory: at the fullest.   during, after: of each node, what is held at most while it runs, and then."""

    memory: Memory
    during: list[int]
    after: list[int]


def live_bytes(program: RankProgram, holds: Holds) -> Live:
    """Walk one rank's program. Raises CompileError for one that keeps values for later programs (schedules without flushes)."""
    return _Walk(program, holds).run()


@dataclass
class _Heap:
    """Pieces of memory by number. counts: how often each is held."""

    sizes: list[int] = field(default_factory=list)
    parts: list[str] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    total: int = 0
    of_part: Counter[str] = field(default_factory=Counter)

    def take(self, size: int, part: str) -> int:
        """New memory, which counts from when it is first held."""
        self.sizes.append(size)
        self.parts.append(part)
        self.counts.append(0)
        return len(self.sizes) - 1

    def hold(self, value: Value) -> None:
        """Once more."""
        for piece in _pieces(value):
            self.counts[piece] += 1
            if self.counts[piece] == 1:
                self.total += self.sizes[piece]
                self.of_part[self.parts[piece]] += self.sizes[piece]

    def drop(self, value: Value) -> None:
        """Once less."""
        for piece in _pieces(value):
            self.counts[piece] -= 1
            if self.counts[piece] == 0:
                self.total -= self.sizes[piece]
                self.of_part[self.parts[piece]] -= self.sizes[piece]


def _pieces(value: Value) -> list[int]:
    if isinstance(value, int):
        return [value]
    return [piece for item in value for piece in _pieces(item)] if isinstance(value, (tuple, list)) else []


class _Walk:
    """values: of each node that is still held.   sending: what was sent and may be under way."""

    def __init__(self, program: RankProgram, holds: Holds) -> None:
        self.program, self.holds, self.heap = program, holds, _Heap()
        self.values: dict[fx.Node, Value] = {}
        self.sending: dict[str, deque[Value]] = defaultdict(deque)
        self.weights = self._held(holds.weights, "weights")
        self.buffers = self._held(holds.buffers, "buffers")
        self.needs: dict[tuple[str, int], Needs] = {}
        self.peak, self.at, self.found = -1, "", Counter[str]()
        self.inside: str | None = None
        self.meaning: dict[Any, Callable[[fx.Node, list[Value]], Value]] = {
            operator.getitem: self._item,
            ops.weights: lambda node, _: self._of_stage(self.weights, node),
            ops.buffers: lambda node, _: self._of_stage(self.buffers, node),
            ops.microbatch: self._microbatch,
            ops.send: self._send,
            ops.recv: self._receive,
            ops.start_recv: self._receive,
            ops.pack: lambda node, _: self._new(_nbytes(type_of(node)), MESSAGES),
            ops.unpack: self._unpack,
            ops.accumulate: self._like,
            ops.divide: self._like,
            ops.all_reduce: self._reduce,
            ops.start_all_reduce: self._reduce,
            ops.write_buffers: lambda node, _: None,
            operator.mul: lambda node, values: self._new(self._size(values[0]), ON_ITS_WAY),
        }

    def run(self) -> Live:
        nodes = list(self.program.graph.nodes)
        last = {source: node for node in nodes for source in node.all_input_nodes}
        during, after = list[int](), list[int]()
        for node in nodes:
            value, most = self._value(node)
            self.values[node] = value
            self.heap.hold(value)
            during.append(max(most, self.heap.total))
            self._note(node, during[-1] - self.heap.total if most <= self.heap.total else 0)
            for source in [*node.all_input_nodes, *([] if node.users else [node])]:
                if last.get(source, node) is node:
                    self.heap.drop(self.values.pop(source))
            after.append(self.heap.total)
        parts = {part: size for part, size in self.found.most_common() if size}
        return Live(Memory(self.peak, self.at, self.inside, parts), during, after)

    def _note(self, node: fx.Node, working: int, inside: str | None = None) -> int:
        """Remember the fullest moment; what is held then."""
        total = self.heap.total + working
        if total > self.peak:
            self.peak, self.at, self.inside = total, node.name, inside
            self.found = Counter(self.heap.of_part)
            self.found[WORKING] += working
        return total

    def _value(self, node: fx.Node) -> tuple[Value, int]:
        """What a node gives, and what is held at most meanwhile."""
        if node.op == "placeholder":
            return self._new(self.holds.inputs.get(str(node.target), 0), "batch"), 0
        if node.op == "output":
            return None, 0
        values = [self._given(argument) for argument in node.args]
        if node.op == "call_module":
            return self._call(node, values)
        if node.target in (ops.accumulate_in_place, ops.finish_recv, ops.finish_all_reduce):
            return values[0], 0
        if node.target not in self.meaning:
            raise CompileError(
                f"rank {self.program.rank} keeps values for later programs ({node.name}): its bytes are not counted",
                ways_out=("a schedule that flushes",),
            )
        return self.meaning[node.target](node, values), 0

    def _call(self, node: fx.Node, values: list[Value]) -> tuple[Value, int]:
        rows = self.holds.rows[node.meta["microbatch"]]
        key = (str(node.target), rows)
        if key not in self.needs:
            self.needs[key] = needs_of(self.program.root.get_submodule(key[0]).graph, rows)  # type: ignore[arg-type]
        needs = self.needs[key]
        most = self._note(node, needs.peak, needs.node)
        of_place = {user.args[1]: name_of(user).rpartition("_")[0] for user in node.users if user.target is operator.getitem}
        parts: dict[int, str] = {}
        for place, given in enumerate(needs.gives):
            for piece in _pieces(given):
                parts.setdefault(piece, PARTS.get(of_place.get(place, ""), ON_ITS_WAY))
        new = {piece: self.heap.take(needs.sizes[piece], part) for piece, part in parts.items()}
        return tuple(_named(given, new, values) for given in needs.gives), most

    def _given(self, argument: Any) -> Value:
        if isinstance(argument, fx.Node):
            return self.values[argument]
        return tuple(map(self._given, argument)) if isinstance(argument, (tuple, list)) else None

    def _new(self, size: int, part: str) -> int:
        return self.heap.take(size, part)

    def _size(self, value: Value) -> int:
        return sum(self.heap.sizes[piece] for piece in _pieces(value))

    def _held(self, stages: Mapping[int, Mapping[str, int]], part: str) -> dict[int, tuple[int, ...]]:
        """A piece for each name, held for ever; stages of this rank alone."""
        own = {node.kwargs["stage"] for node in self.program.graph.nodes if node.target in (ops.weights, ops.buffers)}
        pieces: dict[str, int] = {}
        for stage in [stage for stage in stages if stage in own]:
            for name, size in stages[stage].items():
                if name not in pieces:
                    pieces[name] = self._new(size, part)
                    self.heap.hold(pieces[name])
        return {stage: tuple(pieces[name] for name in stages[stage]) for stage in stages if stage in own}

    @staticmethod
    def _of_stage(held: Mapping[int, tuple[int, ...]], node: fx.Node) -> Value:
        return held[int(node.kwargs["stage"])]  # type: ignore[arg-type]

    @staticmethod
    def _item(node: fx.Node, values: list[Value]) -> Value:
        return values[0][node.args[1]] if isinstance(values[0], tuple) else values[0]  # type: ignore[index]

    def _microbatch(self, node: fx.Node, values: list[Value]) -> Value:
        """Rows that lie side by side are not copied."""
        if node.kwargs["dim"] == 0:
            return values[0]
        share = self.holds.rows[node.meta["microbatch"]] / sum(self.holds.rows)
        return self._new(round(self._size(values[0]) * share), "batch")

    def _send(self, node: fx.Node, values: list[Value]) -> Value:
        channel = str(node.kwargs["channel"])
        self.heap.hold(values[0])
        self.sending[channel].append(values[0])
        while len(self.sending[channel]) > self.holds.window.get(channel, 1):
            self.heap.drop(self.sending[channel].popleft())
        return None

    def _receive(self, node: fx.Node, values: list[Value]) -> Value:
        return self._new(int(ValueType(node.kwargs["shape"], node.kwargs["dtype"]).nbytes()), MESSAGES)  # type: ignore[arg-type]

    def _unpack(self, node: fx.Node, values: list[Value]) -> Value:
        types: Any = node.kwargs["types"]
        return tuple(self._new(int(ValueType(tuple(shape), dtype).nbytes()), MESSAGES) for shape, dtype in types)

    def _like(self, node: fx.Node, values: list[Value]) -> Value:
        """New memory of the same sizes, for a tensor or for each of a tuple: a stage's gradients, which may be views, or some."""
        if not isinstance(values[0], tuple):
            return self._new(self._size(values[0]), ON_ITS_WAY)
        sizes = self.holds.gradients.get(node.meta["stage"], ())
        if len(sizes) != len(values[0]):
            sizes = [self._size(value) for value in values[0]]
        return tuple(self._new(size, "gradients") for size in sizes)

    def _reduce(self, node: fx.Node, values: list[Value]) -> Value:
        """All in one piece of memory of its own; what is given may be views of larger pieces."""
        piece = self._new(sum(_nbytes(type_of(value)) for value in node.all_input_nodes), "gradients")
        return tuple(piece for _ in values[0])


def _nbytes(type: Any) -> int:
    return int(type.nbytes()) if isinstance(type, ValueType) else 0


def _named(given: Value, new: Mapping[int, int], values: Sequence[Value]) -> Value:
    """What a function gives, in the program's pieces."""
    if isinstance(given, Given):
        value: Value = values[given.argument]
        return value if given.item is None else value[given.item]
    if isinstance(given, int):
        return new[given]
    return tuple(_named(item, new, values) for item in given) if isinstance(given, tuple) else None
