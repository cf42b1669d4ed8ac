"""A compiled step as a Timeline, without running it: what its programs' nodes cost on the machine, walked with a clock.

Costs: a stage's function takes the sum of its operations, by the machine's figures (or the measured seconds that the user gives);
adding up, packing and cutting take the bytes that they move; messages take their latency and their
bytes over the level that joins the two ranks' devices; a sum over ranks moves what a ring does. Not here: the walk itself
(`backends/simulator.py`), the bytes (`backends/live_bytes.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from pdcompiler.backends.live_bytes import Holds, Live, live_bytes
from pdcompiler.backends.simulator import simulate
from pdcompiler.core import ops
from pdcompiler.core.cost import Cost, total_cost
from pdcompiler.core.errors import CompileError
from pdcompiler.core.events import OTHER
from pdcompiler.core.ir import Program, ValueType, cost_of, type_of
from pdcompiler.core.machine import Machine
from pdcompiler.holdings import Holdings
from pdcompiler.runner import Compiled
from pdcompiler.timeline import Timeline

MOVES: dict[Any, int] = {ops.accumulate: 3, ops.accumulate_in_place: 3, ops.divide: 2, ops.pack: 2, ops.unpack: 2}
"""How often each byte of its result is read or written."""
WORDS = frozenset(ops.VOCABULARY.values())


def simulated(compiled: Compiled, machine: Machine, holdings: Holdings, seconds: Mapping[str, float] | None = None) -> Timeline:
    """seconds: of a call of each stage function, by name, and "other", of any other word; of those that are left out, by the
    machine's figures. Raises CompileError for a name that is no stage function."""
    names = {str(node.target) for node in compiled.program.graph.nodes if node.op == "call_module"}
    for name in seconds or ():
        if name not in names and name != OTHER:
            raise CompileError(f"seconds: there is no stage function {name!r}", ways_out=(f"one of {sorted(names)}",))
    rows = [microbatch.rows for microbatch in compiled.step.microbatches]
    walked = simulate(compiled.ranks, Costs(machine, rows, compiled.window, dict(seconds or {}), compiled.program))
    holds = _holds(compiled, holdings, rows)
    lives = [live_bytes(program, holds) for program in compiled.ranks]
    held = tuple(_over_time(*found) for found in zip(lives, walked.starts, walked.ends, strict=True))
    memory = tuple(live.memory for live in lives)
    return Timeline(tuple(map(tuple, walked.events)), tuple(walked.messages), memory, held)


def _holds(compiled: Compiled, holdings: Holdings, rows: Sequence[int]) -> Holds:
    stages = compiled.staged.stages
    size = holdings.sizes()
    return Holds(
        {stage.index: {name: size[name] for name in stage.parameters} for stage in stages},
        {stage.index: {name: size[name] for name in stage.buffers} for stage in stages},
        {stage.index: [size[name] for name in stage.gradients] for stage in stages},
        compiled.inputs, rows, compiled.window,
    )  # fmt: skip


def _over_time(live: Live, starts: Sequence[float], ends: Sequence[float]) -> tuple[tuple[float, int], ...]:
    """What is held from each time on; only where it changes."""
    found: list[tuple[float, int]] = []
    for during, after, start, end in zip(live.during, live.after, starts, ends, strict=True):
        for time, nbytes in ((start, during), (end, after)):
            if not found or found[-1][1] != nbytes:
                found.append((time, nbytes))
    return tuple(found)


@dataclass
class Costs:
    """`simulator.Prices` by a machine's figures. rows: of each microbatch.   functions: seconds of a call, where the user
    says them."""

    machine: Machine
    rows: Sequence[int]
    window: Mapping[str, int]
    functions: dict[str, float]
    program: Program
    known: dict[Any, float] = field(default_factory=dict)

    @property
    def overlap(self) -> bool:
        """See `Machine.overlap`."""
        return self.machine.overlap

    def compute(self, rank: int, node: fx.Node) -> float:
        """See `Prices`. What moves no bytes takes nothing."""
        is_call = node.op == "call_module"
        if not is_call and OTHER in self.functions:
            return self.functions[OTHER] if node.target in WORDS else 0.0
        if not is_call and node.target not in MOVES:
            return 0.0
        of = self.rows[node.meta["microbatch"]] if is_call else self._bytes(node)
        key = (self.machine.kind_of(rank), node.target, of)
        if is_call and node.target in self.functions:
            return self.functions[str(node.target)]
        if key not in self.known:
            cost = self._cost_of_call(str(node.target), of) if is_call else Cost(bytes_read=MOVES[node.target] * of, operations=1)
            self.known[key] = float(self.machine.device_of(rank).compute_seconds(cost))
        return self.known[key]

    def _cost_of_call(self, name: str, rows: int) -> Cost:
        return cost_of_function(self.program.root.get_submodule(name).graph, rows)  # type: ignore[arg-type]

    def _bytes(self, node: fx.Node) -> int:
        """Of what a word gives; the sums of gradients are a tuple of a stage's."""
        if isinstance(type := type_of(node), ValueType):
            return int(type.nbytes())
        if node.target is ops.unpack:
            types: Any = node.kwargs["types"]
            return sum(int(ValueType(tuple(shape), dtype).nbytes()) for shape, dtype in types)
        names = self.program.gradient_names[node.meta["stage"]]
        return sum(int(self.program.gradient_types[name].nbytes()) for name in names)

    def message(self, sender: int, receiver: int, nbytes: int) -> tuple[float, float]:
        """See `Prices`."""
        return message_seconds(self.machine, sender, receiver, nbytes)

    def port(self, sender: int, receiver: int) -> int:
        """See `Prices`."""
        return self.machine.level_of(min(sender, receiver), max(sender, receiver))

    def reduce(self, ranks: Sequence[int], nbytes: int) -> float:
        """See `Prices`."""
        return reduce_seconds(self.machine, ranks, nbytes)


def cost_of_function(graph: fx.Graph, rows: int) -> Cost:
    """Of a call of a stage's function."""
    return total_cost(map(cost_of, graph.nodes)).at(rows)


def message_seconds(machine: Machine, sender: int, receiver: int, nbytes: float) -> tuple[float, float]:
    """Latency, and what its bytes take on the level that joins two ranks."""
    level = machine.levels[machine.level_of(min(sender, receiver), max(sender, receiver))]
    return level.latency_seconds, nbytes / level.bytes_per_second


def reduce_seconds(machine: Machine, ranks: Sequence[int], nbytes: float) -> float:
    """Of a sum over ranks, in a ring: 2 (ranks - 1) steps, each of a rank's share."""
    latency, seconds = message_seconds(machine, min(ranks), max(ranks), nbytes)
    return 2 * (len(ranks) - 1) * (latency + seconds / len(ranks))
