"""Record a rank's program while it runs: when each of its nodes began and ended, and what memory is held.

    module = generate(program, recorder.timed(meaning))       the words read the clock before and after
    with recorder.recording(module): module(...)              so do the stage functions
    recorder.events()                                         one for each, in the words of `core/events.py`

A program is a straight line, so the k-th thing that is timed is its k-th node of that sort. On CUDA each is waited for, which
makes a step slower. Memory is counted in sizes of storages, as tensors are made and let go of. Not here: who else runs what
(`pdcompiler/recording.py`). This is the one file that touches torch's private dispatch mode.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pdcompiler.core import ops
from pdcompiler.core.events import Event, Kind, Memory
from pdcompiler.core.ir import RankProgram, ValueType


@dataclass(frozen=True)
class Part:
    """What an event has to do with a message or a sum. meeting: the channel, or the ranks, and the number there; None: nothing.
    gives: it sends, or gives its part.   waits: it waits for it.   nbytes: of a message that it takes."""

    meeting: tuple[Any, int] | None = None
    gives: bool = False
    waits: bool = False
    nbytes: int = 0


NOTHING = Part()
GIVES = (ops.send, ops.all_reduce, ops.start_all_reduce)
WAITS = (ops.recv, ops.finish_recv, ops.all_reduce, ops.finish_all_reduce)


class Recorder:
    """Of one run of one rank's program."""

    def __init__(self, program: RankProgram, device: torch.device, memory: bool) -> None:
        words = ops.VOCABULARY.values()
        self.nodes: list[fx.Node] = [n for n in program.graph.nodes if n.op == "call_module" or n.target in words]
        self.rank, self.is_cuda = program.rank, device.type == "cuda"
        self.times: list[tuple[float, float]] = []
        self.counter = StorageCounter(self._now_at) if memory else None
        self.began = 0.0

    def clock(self) -> float:
        """Seconds; on CUDA when all that was asked for is done."""
        if self.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def timed(self, meaning: Mapping[Any, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
        """The words, with the clock read before and after."""
        return {word: self._timed(does) for word, does in meaning.items()}

    def _timed(self, does: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            begin = self.clock()
            result = does(*args, **kwargs)
            self.times.append((begin, self.clock()))
            if self.counter is not None:
                self.counter.see(tree_leaves(result))
            return result

        return run

    @contextlib.contextmanager
    def recording(self, module: fx.GraphModule, inputs: Iterable[Any]) -> Iterator[None]:
        """Time the stage functions, and count memory, while the program runs."""
        functions = [function for _, function in module.named_children()]
        hooks = [function.register_forward_pre_hook(self._enter) for function in functions]
        hooks += [function.register_forward_hook(self._leave) for function in functions]
        try:
            with self.counter or contextlib.nullcontext():
                if self.counter is not None:
                    self.counter.see(inputs)
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def _enter(self, *_: Any) -> None:
        self.began = self.clock()

    def _leave(self, *_: Any) -> None:
        self.times.append((self.began, self.clock()))

    def _now_at(self) -> fx.Node:
        return self.nodes[min(len(self.times), len(self.nodes) - 1)]

    def events(self, begin: float) -> tuple[Event, ...]:
        """What was timed. begin: the clock's time that counts as 0."""
        pairs = zip(self.nodes, self.times, strict=True)
        return tuple(_event(node, start - begin, end - begin) for node, (start, end) in pairs)

    def parts(self) -> list[Part]:
        """Of each event, its part in a message or a sum."""
        numbers: dict[Any, int] = defaultdict(int)
        found: dict[fx.Node, Part] = {}
        for node in self.nodes:
            started = node.all_input_nodes[0] if node.target in (ops.finish_recv, ops.finish_all_reduce) else node
            if started is not node:
                found[node] = replace(found[started], waits=True, gives=False)
            elif where := node.kwargs.get("channel") or node.kwargs.get("ranks"):
                key = (where, node.target is ops.send)
                found[node] = Part((where, numbers[key]), node.target in GIVES, node.target in WAITS, _nbytes(node))
                numbers[key] += 1
        return [found.get(node, NOTHING) for node in self.nodes]

    def memory(self) -> Memory | None:
        """The fullest moment, where memory was counted."""
        if self.counter is None:
            return None
        return Memory(self.counter.peak, self.counter.at, None, {})


def _event(node: fx.Node, start: float, end: float) -> Event:
    stage, microbatch = node.meta["stage"], node.meta["microbatch"]
    if node.op == "call_module":
        kind: Kind = {"F": "F", "B": "B", "W": "W"}[node.meta["phase"]]  # type: ignore[assignment]
        return Event(kind, f"{node.target}_{microbatch}", start, end, stage, microbatch)
    kind = "wait" if node.target in WAITS else "message" if node.target is ops.send else "other"
    return Event(kind, node.name, start, end, stage, microbatch)


def _nbytes(node: fx.Node) -> int:
    if "shape" not in node.kwargs:
        return 0
    return int(ValueType(node.kwargs["shape"], node.kwargs["dtype"]).nbytes())  # type: ignore[arg-type]


class StorageCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """How many bytes the storages have that were made, or seen, and are still held. at: the name of the node with the most."""

    def __init__(self, now_at: Callable[[], fx.Node]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now_at = now_at
        self.held: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self.total = self.peak = 0
        self.at = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.see(tree_leaves(result))
        return result

    def see(self, values: Iterable[Any]) -> None:
        """Count what was not yet."""
        for value in values:
            if isinstance(value, Tensor):
                storage = value.untyped_storage()
                key = id(storage)
                if key not in self.held:
                    self.held[key] = storage.nbytes(), weakref.ref(storage, lambda _, key=key: self._forget(key))  # type: ignore[misc]
                    self.total += self.held[key][0]
        if self.total > self.peak:
            self.peak, self.at = self.total, self.now_at().name

    def _forget(self, key: int) -> None:
        size, _ = self.held.pop(key)
        self.total -= size
