"""Which parameters and module calls are a stage: the one decision that every trace of a model shares.

Training, evaluation, one row, autocast and other shapes are different graphs, and parameters never move between them. So a
Partition speaks of parameters and module calls, by name, not of nodes. It is JSON that a user may read, edit and pass back.
Not here: how a partition is found (`passes/partition/`), nor how a trace is staged by it (`assign_stages`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy
import numpy.typing
from torch import fx

from pdcompiler.core.errors import CompileError
from pdcompiler.core.ir import ModuleCall
from pdcompiler.core.machine import Machine

Floats: TypeAlias = numpy.typing.NDArray[numpy.float64]
Flags: TypeAlias = numpy.typing.NDArray[numpy.bool_]


@dataclass
class Problem:
    """A trace as a row of forward operations with costs. nodes: in the order the model runs them.   seconds[i]: of node i
    with the backward that it causes.   sent[i], messages[i]: bytes and values that cross a cut before node i, one way.
    legal[i]: whether a cut may stand before node i.   anchored[i]: whether the stage that would begin there can be told by
    its first operation, which reads a parameter or begins a module call."""

    nodes: list[fx.Node]
    seconds: Floats
    sent: Floats
    messages: Floats
    legal: Flags
    anchored: Flags
    machine: Machine


@dataclass(frozen=True)
class StagePlan:
    """One stage. parameters: canonical names (a tied one may stand in several stages).   calls: the module calls that lie
    wholly on it, in order.   parameter_bytes, seconds (forward and backward of one microbatch, estimated), sent_bytes (to
    the next stage per microbatch)."""

    parameters: tuple[str, ...]
    calls: tuple[ModuleCall, ...]
    parameter_bytes: int = 0
    seconds: float = 0.0
    sent_bytes: int = 0


@dataclass(frozen=True)
class Partition:
    """The stages of a model, in order. model: a fingerprint of the parameters' names and shapes that it is for."""

    stages: tuple[StagePlan, ...]
    model: str = ""

    def owners(self) -> dict[str, tuple[int, ...]]:
        """The stages that own each parameter."""
        owners: dict[str, list[int]] = {}
        for index, stage in enumerate(self.stages):
            for name in stage.parameters:
                owners.setdefault(name, []).append(index)
        return {name: tuple(stages) for name, stages in owners.items()}

    def stage_of_call(self) -> dict[ModuleCall, int]:
        """The stage of each module call that lies wholly on one."""
        return {call: index for index, stage in enumerate(self.stages) for call in stage.calls}

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
                "parameters": list(s.parameters), "calls": [str(c) for c in s.calls], "parameter_bytes": s.parameter_bytes,
                "seconds": s.seconds, "sent_bytes": s.sent_bytes,
            }
            for s in self.stages
        ]
        return json.dumps({"model": self.model, "stages": stages}, indent=1)

    @staticmethod
    def from_json(text: str) -> Partition:
        """Raises CompileError where the text is no partition."""
        try:
            data: Any = json.loads(text)
            stages = tuple(
                StagePlan(
                    tuple(s["parameters"]), tuple(map(parse_call, s["calls"])), int(s.get("parameter_bytes", 0)),
                    float(s.get("seconds", 0.0)), int(s.get("sent_bytes", 0)),
                )
                for s in data["stages"]
            )
            return Partition(stages, str(data.get("model", "")))
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
        whole = sum(stage.seconds for stage in self.stages) or 1.0
        header = ("stage", "modules", "parameters", "share", "sends")
        rows = [
            (str(i), self.modules(i), f"{_amount(s.parameter_bytes)}B", f"{s.seconds / whole:.0%}", f"{_amount(s.sent_bytes)}B")
            for i, s in enumerate(self.stages)
        ]
        widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
        lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (header, *rows))
        return "\n".join(line.rstrip() for line in lines)


def parse_call(text: str) -> ModuleCall:
    """The inverse of `str(ModuleCall)`: "layers.3" or "layers.3#1" (its second call)."""
    path, _, number = text.partition("#")
    return ModuleCall(path, int(number or 0))


def _amount(count: float) -> str:
    for unit in ("", "Ki", "Mi", "Gi"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} Ti"
