"""What the ranks of this process hold between the ticks of a stream: weights, buffers, and what is put by for later ticks.

The newest weights are the parameters themselves. Before an update that must keep the old values each parameter gets new memory;
the old memory stays with those that put it by. Buffers are never versioned: each replica has its own, until a drain, and the
model has the first one's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from pdcompiler.backends import reference
from pdcompiler.core import ops
from pdcompiler.core.partition import Partition
from pdcompiler.holdings import Holdings
from pdcompiler.optimizers import StageOptimizers

Tensors = tuple[Tensor, ...]
Key = tuple[str, int, int, int]


class StreamMemory(reference.Memory):
    """tick: the number of the tick that runs, from the last drain on.   updates: of each stage, from the beginning on."""

    def __init__(
        self, holdings: Holdings, partition: Partition, optimizers: StageOptimizers, replicas: Mapping[int, tuple[int, ...]],
        buffers: Mapping[int, tuple[str, ...]], changing: Mapping[int, Collection[str]], gradients: Mapping[int, tuple[str, ...]],
        rank: int | None,
    ) -> None:  # fmt: skip
        """changing: of each stage, the buffers that its forwards write."""
        super().__init__(self._weights, self._buffers)
        self.holdings, self.partition, self.optimizers = holdings, partition, optimizers
        self.buffer_names, self.changing, self.gradient_names = buffers, changing, gradients
        self.replicas = replicas
        self.updating = {stage: ranks[0] if rank is None else rank for stage, ranks in replicas.items()}
        self.tick = 0
        self.stashed: dict[Key, Any] = {}
        self.written: dict[tuple[int, int], Tensors] = {}
        self.updates = dict.fromkeys(replicas, 0)
        self.numbers: dict[tuple[int, int], int] = {}

    def words(self) -> dict[Any, Callable[..., Any]]:
        """See reference.Memory."""
        return {**super().words(), ops.stash: self.stash, ops.restore: self.restore, ops.update: self.update}

    def _weights(self, stage: int, rank: int) -> Tensors:
        return self.holdings.tensors(self.partition.stages[stage].parameters)

    def _buffers(self, stage: int, rank: int) -> Tensors:
        if (stage, rank) not in self.written:  # of all replicas at once: the first one's writes go to the model
            names = self.buffer_names[stage]
            held = list(zip(names, self.holdings.tensors(names), strict=True))
            for replica in self.replicas[stage]:
                self.written[stage, replica] = tuple(t.clone() if name in self.changing[stage] else t for name, t in held)
        return self.written[stage, rank]

    def write_buffers(self, values: Tensors, *, stage: int, rank: int) -> None:
        """See ops.write_buffers. What a backward to come reads of the old ones stays as it was."""
        self.written[stage, rank] = tuple(values)
        if rank == self.updating[stage]:
            self._to_model(stage, values, self.changing[stage])

    def _to_model(self, stage: int, values: Tensors, changed: Collection[str]) -> None:
        names = self.buffer_names[stage]
        for name, held, value in zip(names, self.holdings.tensors(names), values, strict=True):
            if name in changed:
                held.copy_(value)

    def stash(self, value: Any, *, kind: str, stage: int, minibatch: int, rank: int) -> None:
        """See ops.stash."""
        key = (kind, stage, self.tick + minibatch, rank)
        assert key not in self.stashed, f"{key} is put by twice"
        self.stashed[key] = value

    def restore(self, *, kind: str, stage: int, minibatch: int, rank: int) -> Any:
        """See ops.restore."""
        return self.stashed.pop((kind, stage, self.tick + minibatch, rank))

    def update(self, weights: Tensors, gradients: Tensors, *, stage: int, rank: int, keep: bool) -> None:
        """See ops.update. In one process the replicas of a stage share its weights: the first one steps."""
        if rank != self.updating[stage]:
            return
        parameters = [self.holdings.parameters[name] for name in self.gradient_names[stage]]
        if keep:
            for parameter in parameters:
                parameter.data = parameter.data.clone()
        with torch.enable_grad():  # through autograd, so that hooks on parameters fire
            torch.autograd.backward(parameters, list(gradients))
        self.optimizers.step_stage(stage)
        for parameter in parameters:
            parameter.grad = None
        self.updates[stage] += 1
        self.numbers |= {(stage, parameter.data_ptr()): self.updates[stage] for parameter in parameters}

    def version(self, stage: int, weights: Tensors) -> int:
        """Of values that `weights` gave at some time: after how many updates these were the newest that this memory has had."""
        return max((self.numbers.get((stage, tensor.data_ptr()), 0) for tensor in weights), default=0)

    def end_stream(self) -> None:
        """After a drain: weights that no forward came for are let go."""
        self.written.clear()
        left = [key for key in self.stashed if key[0] != "kept weights"]
        assert not left, f"put by and never taken back: {left}"
        self.stashed.clear()
        self.tick = 0
