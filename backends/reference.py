"""The meaning of programs: all ranks in this process, one node at a time. Slow and plain on purpose.

`run_program` runs a global Program as ordinary Python: a transfer is the identity, so it must equal the model. `run_ranks`
runs the ranks' programs, each until it has to wait, with messages in queues. Every other backend is compared with this one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from pdcompiler.core import ops
from pdcompiler.core.errors import DeadlockError
from pdcompiler.core.ir import Input, Program, RankProgram, Trace
from pdcompiler.core.printer import show_node

Tensors = tuple[Tensor, ...]
Held = Callable[[int, int], Tensors]
"""(stage, rank) -> the tensors held there, in the stage's order."""


def microbatch(value: Tensor, *, start: int, stop: int, dim: int) -> Tensor:
    """See ops.microbatch."""
    return value.narrow(dim, start, stop - start).contiguous()


def accumulate(total: Any, value: Any) -> Any:
    """See ops.accumulate."""
    if isinstance(total, Tensor):
        return total + value
    return tuple(torch._foreach_add(list(total), list(value))) if total else ()


def accumulate_in_place(total: Any, value: Any) -> Any:
    """See ops.accumulate_in_place."""
    if isinstance(total, Tensor):
        return total.add_(value)
    if total:
        torch._foreach_add_(list(total), list(value))
    return total


def divide(values: Tensors, *, count: int) -> Tensors:
    """See ops.divide."""
    return tuple(torch._foreach_div(list(values), count)) if values else ()


def pack(values: Sequence[Tensor]) -> Tensor:
    """See ops.pack."""
    return torch.cat([value.contiguous().reshape(-1).view(torch.uint8) for value in values])


def unpack(packed: Tensor, *, types: Sequence[tuple[Sequence[int], torch.dtype]]) -> Tensors:
    """See ops.unpack. Each value is memory of its own: a slice of bytes need not be aligned for its type."""
    values, at = [], 0
    for shape, dtype in types:
        value = torch.empty(tuple(shape), dtype=dtype, device=packed.device)
        size = value.numel() * value.element_size()
        value.view(-1).view(torch.uint8).copy_(packed[at : at + size])
        values.append(value)
        at += size
    return tuple(values)


def sum_over_ranks(values: Sequence[Any]) -> Any:
    """The sum of the ranks' values, in the order of the ranks."""
    total = values[0]
    for value in values[1:]:
        total = accumulate(total, value)
    return total


PURE: dict[Any, Callable[..., Any]] = {
    ops.microbatch: microbatch,
    ops.accumulate: accumulate,
    ops.accumulate_in_place: accumulate_in_place,
    ops.divide: divide,
    ops.pack: pack,
    ops.unpack: unpack,
}


WRITES = (ops.write_buffers, ops.update)
"""Words with an effect on what other ranks of this process see: it comes when all are done."""


class Memory:
    """What ranks hold between steps: weights and buffers by (stage, rank)."""

    def __init__(self, weights: Held, buffers: Held) -> None:
        self.weights = weights
        self.buffers = buffers

    def words(self) -> dict[Any, Callable[..., Any]]:
        """What the words that read or write it mean."""
        return {
            ops.weights: lambda *, stage, rank: self.weights(stage, rank),
            ops.buffers: lambda *, stage, rank: self.buffers(stage, rank),
            ops.write_buffers: self.write_buffers,
        }

    def write_buffers(self, values: Tensors, *, stage: int, rank: int) -> None:
        """Copy new values into the buffers; those that a step left alone are the same tensors."""
        pairs = [
            (held, value)
            for held, value in zip(self.buffers(stage, rank), values, strict=True)
            if held.data_ptr() != value.data_ptr()
        ]
        if pairs:
            torch._foreach_copy_([held for held, _ in pairs], [value for _, value in pairs])


def run_trace(trace: Trace, given: Callable[[Input], Any]) -> dict[fx.Node, Any]:
    """Run a Trace for one microbatch; returns the value of every node. given: the value of each placeholder."""
    values: dict[fx.Node, Any] = {}
    with torch.no_grad():
        for node in trace.graph.nodes:
            if node.op == "placeholder":
                values[node] = given(trace.inputs[node.name])
            elif node.op == "get_attr":
                values[node] = getattr(trace.constants, str(node.target))
            elif node.op == "call_function":
                values[node] = _run(node, trace.constants, {}, values, {})
    return values


def run_program(
    program: Program, inputs: Mapping[str, Any], memory: Memory, observe: Callable[[fx.Node, Any], None] | None = None
) -> dict[int, Any]:
    """Run a Program; returns each rank's results (see ir.Program). inputs: by placeholder name.   observe: called with each
    node and its value."""
    meaning: dict[Any, Callable[..., Any]] = {
        **PURE,
        **memory.words(),
        ops.transfer: lambda value, *, to: value,
        ops.all_reduce: lambda values, *, ranks: (sum_over_ranks(values),) * len(ranks),
    }
    values: dict[fx.Node, Any] = {}
    with torch.no_grad():
        for node in program.graph.nodes:
            if node.op == "output":
                return dict(_given(node.args[0], values))
            values[node] = _run(node, program.root, inputs, values, meaning)
            if observe is not None:
                observe(node, values[node])
    raise AssertionError("a program ends with its output")


class Network:
    """Messages between ranks of this process, by channel and number. One that outlives a run has what later programs receive."""

    def __init__(self) -> None:
        self.under_way: dict[tuple[str, int], Tensor] = {}
        self.sent: dict[str, int] = defaultdict(int)
        self.asked: dict[str, int] = defaultdict(int)

    def send(self, value: Tensor, *, to: int, channel: str) -> None:
        """See ops.send."""
        self.under_way[channel, self.sent[channel]] = value.contiguous()
        self.sent[channel] += 1

    def ask(self, channel: str) -> tuple[str, int]:
        """For the next message: what it will be found under."""
        self.asked[channel] += 1
        return channel, self.asked[channel] - 1


Observe = Callable[[fx.Node, Sequence[Any]], None]
"""Called with each node of a rank's program, before it runs, and its arguments."""


def run_ranks(
    programs: Sequence[RankProgram], inputs: Mapping[str, Any], memory: Memory, network: Network | None = None,
    observe: Observe | None = None,
) -> list[Any]:  # fmt: skip
    """Run the ranks' programs in turns, each as far as it gets. Raises DeadlockError where none gets further."""
    network, reductions = network or Network(), dict[tuple[Any, int], dict[int, Any]]()
    running = [_Rank(program, inputs, memory, network, reductions, observe) for program in programs]
    with torch.no_grad():
        while not all(rank.done for rank in running):
            moved = [rank.advance() for rank in running]
            if not any(moved):
                raise DeadlockError("\n".join(rank.waits_for() for rank in running if not rank.done))
        for write in [write for rank in running for write in rank.writes]:
            write()
    return [rank.results for rank in running]


class _Rank:
    """One rank's program on its way. A value that has not arrived is looked for again at the next turn."""

    def __init__(
        self, program: RankProgram, inputs: Mapping[str, Any], memory: Memory,
        network: Network, reductions: dict[tuple[Any, int], dict[int, Any]], observe: Observe | None,
    ) -> None:  # fmt: skip
        self.program, self.inputs, self.observe = program, inputs, observe
        self.network, self.reductions = network, reductions
        self.nodes = list(program.graph.nodes)
        self.values: dict[fx.Node, Any] = {}
        self.at = 0
        self.done = False
        self.results: Any = None
        self.writes: list[Callable[[], None]] = []
        """For when all ranks are done: replicas share weights and buffers here, and read them as they were at the entry."""
        self.reduced: dict[Any, int] = defaultdict(int)
        self.meaning = {
            **PURE,
            **memory.words(),
            **{word: self._later(meaning) for word, meaning in memory.words().items() if word in WRITES},
            ops.send: network.send,
            ops.recv: lambda *, channel, **_: network.under_way.pop(network.ask(channel)),
            ops.start_recv: lambda *, channel, **_: network.ask(channel),
            ops.finish_recv: network.under_way.pop,
            ops.all_reduce: lambda value, *, ranks: self._sum(self._give(value, ranks)),
            ops.start_all_reduce: lambda value, *, ranks: self._give(value, ranks),
            ops.finish_all_reduce: self._sum,
        }

    def advance(self) -> bool:
        """Run until the end or until something has not arrived; whether anything ran."""
        start = self.at
        while not self.done and self._ready(node := self.nodes[self.at]):
            if node.op == "output":
                self.results, self.done = _given(node.args[0], self.values), True
                self.values.clear()
                self.meaning.clear()  # its words refer to this rank: the cycle would keep a step's activations
            else:
                if self.observe is not None:
                    self.observe(node, [_given(argument, self.values) for argument in node.args])
                self.values[node] = _run(node, self.program.root, self.inputs, self.values, self.meaning)
            self.at += 1
        return self.at > start

    def _ready(self, node: fx.Node) -> bool:
        if node.target is ops.recv:
            channel = str(node.kwargs["channel"])
            return (channel, self.network.asked[channel]) in self.network.under_way
        if node.target is ops.finish_recv:
            return self.values[node.args[0]] in self.network.under_way  # type: ignore[index]
        if node.target is ops.all_reduce:
            ranks: Any = node.kwargs["ranks"]
            waiting = self.reductions.setdefault((ranks, self.reduced[ranks]), {})
            waiting.setdefault(self.program.rank, _given(node.args[0], self.values))
            return len(waiting) == len(ranks)
        if node.target is ops.finish_all_reduce:
            started: Any = self.values[node.args[0]]  # type: ignore[index]
            return len(self.reductions[started]) == len(started[0])
        return True

    def _later(self, meaning: Callable[..., Any]) -> Callable[..., None]:
        return lambda *values, **where: self.writes.append(partial(meaning, *values, **where))

    def _give(self, value: Any, ranks: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
        """This rank's part of its next reduction over these ranks: which that is."""
        key = ranks, self.reduced[ranks]
        self.reduced[ranks] += 1
        self.reductions.setdefault(key, {})[self.program.rank] = value
        return key

    def _sum(self, key: tuple[tuple[int, ...], int]) -> Any:
        return sum_over_ranks([self.reductions[key][rank] for rank in key[0]])

    def waits_for(self) -> str:
        """For a message: where this rank stands."""
        return f"rank {self.program.rank} waits at {show_node(self.nodes[self.at])}"


def _given(argument: Any, values: Mapping[fx.Node, Any]) -> Any:
    """An argument with the nodes in it replaced by their values (dicts may have integer keys)."""
    if isinstance(argument, fx.Node):
        return values[argument]
    if isinstance(argument, Mapping):
        return {key: _given(item, values) for key, item in argument.items()}
    if isinstance(argument, (list, tuple)):
        return type(argument)(_given(item, values) for item in argument)
    return argument


def _run(
    node: fx.Node, root: torch.nn.Module, inputs: Mapping[str, Any], values: Mapping[fx.Node, Any], meaning: Mapping[Any, Any]
) -> Any:
    if node.op == "placeholder":
        return inputs[str(node.target)]
    args = [_given(argument, values) for argument in node.args]
    kwargs = {name: _given(argument, values) for name, argument in node.kwargs.items()}
    if node.op == "call_module":
        return root.get_submodule(str(node.target))(*args, **kwargs)
    return meaning.get(node.target, node.target)(*args, **kwargs)
