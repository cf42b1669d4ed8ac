"""Which parameters and module calls are a stage: the one decision that every trace of a model shares.

Training, evaluation, one row, autocast and other shapes are different graphs, and parameters never move between them. So a
Partition speaks of parameters and module calls, by name, not of nodes. It is JSON that a user may read, edit and pass back.
Not here: how a partition is found (`passes/partition/`), nor how a trace is staged by it (`assign_stages`).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import numpy
import numpy.typing
from torch import fx

from pdcompiler.core.errors import CompileError
from pdcompiler.core.explanation import Explanation, amount, seconds
from pdcompiler.core.ir import ModuleCall
from pdcompiler.core.plan import StageCost
from pdcompiler.core.workload import Workload

Flags: TypeAlias = numpy.typing.NDArray[numpy.bool_]


@dataclass(frozen=True)
class Problem:
    """A trace as a row of layers. nodes: its forward operations, in the order the model runs them.   places: the first node of
    each layer: 0, and wherever a stage may begin.   legal: whether a cut may stand before a node.   workload: the layers."""

    nodes: list[fx.Node]
    places: tuple[int, ...]
    legal: Flags
    workload: Workload


@dataclass(frozen=True)
class StagePlan:
    """One stage. parameters: canonical names (a tied one may stand in several stages).   calls: the module calls that lie
    wholly on it, in order.   parameter_bytes, seconds (forward and backward of one microbatch, estimated), sent_bytes (to
    the next stage per microbatch).   replicas: how many ranks hold it.   recompute: whether backward runs the forward again.
    cost: what the planner predicts, in full."""

    parameters: tuple[str, ...]
    calls: tuple[ModuleCall, ...]
    parameter_bytes: int = 0
    seconds: float = 0.0
    sent_bytes: int = 0
    replicas: int = 1
    recompute: bool = False
    cost: StageCost | None = None


@dataclass(frozen=True)
class Partition:
    """The stages of a model, in order. model: a fingerprint of the parameters' names and shapes that it is for.   pipelines:
    how often the whole is replicated.   explanation: why it is so; None where nobody predicted anything.   ranks: of each stage,
    where the schedule has ranks run several (no part of the file: the schedule says it)."""

    stages: tuple[StagePlan, ...]
    model: str = ""
    pipelines: int = 1
    explanation: Explanation | None = None
    ranks: tuple[int, ...] = ()

    @property
    def devices(self) -> int:
        """How many ranks it takes."""
        return self.pipelines * sum(stage.replicas for stage in self.stages)

    def owners(self) -> dict[str, tuple[int, ...]]:
        """The stages that own each parameter."""
        owners: dict[str, list[int]] = {}
        for index, stage in enumerate(self.stages):
            for name in stage.parameters:
                owners.setdefault(name, []).append(index)
        return {name: tuple(stages) for name, stages in owners.items()}

    @cached_property
    def _stages_of(self) -> tuple[dict[ModuleCall, int], dict[str, set[int]]]:
        """The stage of each module call; and of each module that has one, the stages of its calls and of those inside it."""
        calls = {call: index for index, stage in enumerate(self.stages) for call in stage.calls}
        modules: dict[str, set[int]] = {call.path: set() for call in calls}
        for call, index in calls.items():
            for path in (call.path, *_around(call.path)):
                if path in modules:
                    modules[path].add(index)
        return calls, modules

    @cached_property
    def _owners_in(self) -> dict[str, list[tuple[int, ...]]]:
        """Of each module that holds parameters itself, the stages that own each."""
        found: dict[str, list[tuple[int, ...]]] = {}
        for name, owners in self.owners().items():
            found.setdefault(name.rpartition(".")[0], []).append(owners)
        return found

    def stage_of(self, call: ModuleCall) -> int | None:
        """The stage of a module call: its own, or that of the innermost known module around it, where all of that has one. None
        where stages part it, which shows in its parameters: that stage does not own them."""
        calls, modules = self._stages_of
        if call in calls:
            return calls[call]
        around = next((modules[path] for path in _around(call.path) if path in modules), set())
        stage = next(iter(around)) if len(around) == 1 else None
        return stage if all(stage in owners for owners in self._owners_in.get(call.path, ())) else None

    def modules(self, index: int) -> str:
        """The outermost modules of a stage, first to last, for people. (Only a part of one that other stages also run counts.)"""
        others = [call.path for other, stage in enumerate(self.stages) if other != index for call in stage.calls]
        parted = {path[:end] for path in others for end, character in enumerate(path) if character == "."}
        calls = [call for call in self.stages[index].calls if call.path and call.path not in parted]
        outer = [str(call) for call in calls if not any(call.path.startswith(other.path + ".") for other in calls)]
        if not outer:
            return "(operations of the model's own forward)"
        return outer[0] if len(outer) == 1 else f"{outer[0]} ... {outer[-1]}"

    def to_json(self) -> str:
        """The inverse of `from_json`."""
        stages = [
            {
                "parameters": list(s.parameters), "calls": [str(c) for c in s.calls], "replicas": s.replicas,
                "recompute": s.recompute, "parameter_bytes": s.parameter_bytes, "seconds": s.seconds, "sent_bytes": s.sent_bytes,
                "cost": None if s.cost is None else asdict(s.cost),
            }
            for s in self.stages
        ]  # fmt: skip
        why = None if self.explanation is None else self.explanation.to_data()
        return json.dumps({"model": self.model, "pipelines": self.pipelines, "stages": stages, "explanation": why}, indent=1)

    @staticmethod
    def from_json(text: str) -> Partition:
        """Raises CompileError where the text is no partition."""
        try:
            data: Any = json.loads(text)
            why, stages = data.get("explanation"), tuple(map(_stage_plan, data["stages"]))
            return Partition(
                stages, str(data.get("model", "")), _count(data, "pipelines"), None if why is None else Explanation.from_data(why)
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CompileError(
                f"the text is no partition: {type(error).__name__}: {error}",
                ways_out=('{"model": ..., "stages": [{"parameters": [...], "calls": [...]}, ...]}, as Partition.to_json writes',),
            ) from error

    def save(self, path: str | Path) -> None:
        """Write it as JSON."""
        Path(path).write_text(self.to_json())

    @staticmethod
    def load(path: str | Path) -> Partition:
        """Read it from JSON. Raises CompileError where there is no such file, or where it is no partition."""
        try:
            text = Path(path).read_text()
        except OSError as error:
            raise CompileError(
                f"the partition's file {path} can't be read: {error.strerror}",
                ways_out=("module paths at which stages begin are given as a list",),
            ) from error
        return Partition.from_json(text)

    def __str__(self) -> str:
        """A table of the stages, and below it the explanation."""
        rows = [_HEADER, *(self._row(index) for index in range(len(self.stages)))]
        kept = [column for column in range(len(_HEADER)) if any(row[column] for row in rows[1:])]
        widths = [max(len(row[column]) for row in rows) for column in kept]
        lines = ["  ".join(row[c].ljust(width) for c, width in zip(kept, widths, strict=True)).rstrip() for row in rows]
        if self.pipelines > 1:
            lines.append(f"all of it {self.pipelines} times, each over {self.devices // self.pipelines} ranks")
        if self.ranks:
            lines.append("ranks run several stages; what follows is of a device for each stage")
        return "\n".join(lines + ([] if self.explanation is None else self.explanation.lines()))

    def _row(self, index: int) -> tuple[str, ...]:
        stage = self.stages[index]
        whole = sum(other.seconds for other in self.stages) or 1.0
        first = sum(other.replicas for other in self.stages[:index])
        own = self.ranks[index] if self.ranks else first
        ranks = str(own) if stage.replicas == 1 else f"{first} to {first + stage.replicas - 1}"
        row = (str(index), self.modules(index), ranks, f"{amount(stage.parameter_bytes)}B", f"{stage.seconds / whole:.0%}")
        if stage.cost is None:
            return (*row, f"{amount(stage.sent_bytes)}B", *[""] * 6)
        slowest = max(other.cost.seconds for other in self.stages if other.cost is not None)
        cost = stage.cost
        times = (seconds(cost.compute), seconds(cost.entering + cost.leaving), seconds(cost.reduce) if cost.reduce else "")
        busy = f"{cost.seconds / slowest:.0%}" + (" recomputes" if stage.recompute else "")
        versions = f"{cost.versions} x {amount(stage.parameter_bytes)}B" if self._keeps_versions() else ""
        return (*row, f"{amount(stage.sent_bytes)}B", *times, f"{amount(cost.memory)}B", versions, busy)

    def _keeps_versions(self) -> bool:
        return any(stage.cost is not None and stage.cost.versions > 1 for stage in self.stages)


_HEADER = (
    "stage", "modules", "ranks", "parameters", "share", "sends", "compute", "transfers", "all-reduce", "memory",
    "weight versions", "of bottleneck",
)  # fmt: skip


def _stage_plan(data: dict[str, Any]) -> StagePlan:
    cost, replicas = data.get("cost"), _count(data, "replicas")
    return StagePlan(
        tuple(data["parameters"]), tuple(map(parse_call, data["calls"])), int(data.get("parameter_bytes", 0)),
        float(data.get("seconds", 0.0)), int(data.get("sent_bytes", 0)), replicas, bool(data.get("recompute", False)),
        None if cost is None else StageCost(**cost),
    )  # fmt: skip


def _count(data: dict[str, Any], name: str) -> int:
    count = int(data.get(name, 1))
    if count < 1:
        raise ValueError(f"{name} is {count}")
    return count


def _around(path: str) -> list[str]:
    """The paths of the modules around one, innermost first."""
    return [path[:end] for end in range(len(path) - 1, 0, -1) if path[end] == "."]


def parse_call(text: str) -> ModuleCall:
    """The inverse of `str(ModuleCall)`: "layers.3" or "layers.3#1" (its second call)."""
    path, _, number = text.partition("#")
    return ModuleCall(path, int(number or 0))
