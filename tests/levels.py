"""Short ways to each level, for tests: of small models through the compiler, and of programs written by hand."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from pdcompiler.compiler import Request, choose_partition, stage_trace, trace_model
from pdcompiler.core.batch import read_batch
from pdcompiler.core.ir import Microbatch, Program, Staged, Step, Trace, ValueType, describe
from pdcompiler.core.machine import Machine
from pdcompiler.core.partition import Partition
from pdcompiler.core.schedule import Schedule
from pdcompiler.passes.program.lower_schedule import lower_schedule

FLOATS = ValueType((4,), torch.float32)


class TwoLayers(nn.Module):
    """Two Linears with a tanh between: the smallest model that can be cut in two."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(torch.tanh(self.first(x)))
        return result


class Scale(nn.Module):
    """x * weight: its trace is one line forward, three backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def total(outputs: Tensor, target: Any = None) -> Tensor:
    """The simplest loss."""
    return outputs.sum()


def request(
    model: nn.Module, world_size: int = 2, *, loss_fn: Any = None, partition: Any = None, machine: Machine | None = None
) -> Request:
    """What `compile` would hand to the compiler."""
    return Request(model, world_size, loss_fn, machine or Machine(), partition, True, None, None)


def trace_of(
    model: nn.Module, *args: Any, target: Any = None, loss_fn: Any = None, rows: int = 5, symbolic: bool = True,
    gradients: bool = True, **kwargs: Any,
) -> Trace:  # fmt: skip
    """The model's trace for any number of rows. rows: a number that nothing else in the test has."""
    batch = read_batch(model, args, kwargs, target, None)
    return trace_model(request(model, loss_fn=loss_fn), batch, rows=rows, symbolic=symbolic, gradients=gradients)


def trace_and_partition(
    model: nn.Module, begins: Sequence[str], *args: Any, rows: int = 5, **options: Any
) -> tuple[Trace, Partition]:
    """The model's trace, and the partition whose stages 1, 2, ... begin at the given modules."""
    trace = trace_of(model, *args, rows=rows, **options)
    return trace, choose_partition(request(model, len(begins) + 1, partition=tuple(begins)), trace, rows)


def staged_of(model: nn.Module, begins: Sequence[str], *args: Any, rows: int = 5, **options: Any) -> Staged:
    """The model's stages; stages 1, 2, ... begin at the given modules."""
    trace, partition = trace_and_partition(model, begins, *args, rows=rows, **options)
    return stage_trace(request(model, len(begins) + 1), trace, partition, rows)


def two_layers_staged(loss_fn: Any = F.mse_loss) -> Staged:
    """TwoLayers in two stages."""
    return staged_of(TwoLayers(), ["second"], torch.zeros(2, 4), target=torch.zeros(2, 3), loss_fn=loss_fn)


def lowered(staged: Staged, schedule: Schedule, *, rows: int = 2, outputs: str = "none", skip: Sequence[int] = ()) -> Program:
    """The program of a step in which every microbatch has `rows` rows. skip: microbatches that do not count."""
    plans = [Microbatch(i * rows, (i + 1) * rows, staged, i not in skip) for i in range(schedule.microbatches)]
    dims = {name: 0 for stage in staged.stages for name in stage.batch.values()}
    return lower_schedule(Step(tuple(plans), dims, outputs), schedule)


class Writer:
    """Writes a Program by hand, one node at a time."""

    def __init__(self, ranks: int = 2) -> None:
        self.graph, self.root, self.ranks = fx.Graph(), nn.Module(), ranks

    def input(self, name: str) -> fx.Node:
        """A placeholder."""
        return describe(self.graph.placeholder(name), rank=0)

    def call(
        self, target: Any, *args: Any, rank: int = 0, name: str = "", type: Any = FLOATS, microbatch: int = 0, **kwargs: Any
    ) -> fx.Node:
        """A call of a word of the vocabulary, of torch, or of a stage function (a string)."""
        op = "call_module" if isinstance(target, str) else "call_function"
        node = self.graph.create_node(op, target, args, kwargs, name=name or None)
        node.meta["name"] = name or node.name
        return describe(node, rank=rank, stage=rank, microbatch=microbatch, type=type)

    def program(self, results: Mapping[int, Any], **fields: Any) -> Program:
        """The program that gives these results, by rank."""
        describe(self.graph.output({rank: results.get(rank, {}) for rank in range(self.ranks)}), rank=0)
        known = {"gradient_names": {}, "gradient_types": {}, "buffer_names": {}, **fields}
        return Program(self.graph, self.root, self.ranks, Schedule.parse("F0\n" * self.ranks), **known)
