"""What a stream refuses before a minibatch goes in: then everything that was stepped stays as it is.

Not here: arguments of `compile` (`given_schedule.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from pdcompiler.core.errors import CompileError
from pdcompiler.core.ir import Microbatch, Staged
from pdcompiler.core.partition import Partition
from pdcompiler.stream_memory import StreamMemory


@dataclass(frozen=True)
class Fed:
    """A minibatch that came in. weight: of its loss in its batch.   seed: of what it draws.   index: of its batch.   versions: of
    its tensors, to see if the user changes one in place while it is needed."""

    plan: Microbatch
    tensors: dict[str, Tensor]
    weight: float
    seed: int
    index: int
    is_last: bool
    versions: tuple[int, ...]


def check_ties(partition: Partition) -> None:
    """A tied weight would have versions of its own on each of its stages."""
    for name, stages in partition.owners().items():
        if len(stages) > 1:
            raise CompileError(
                f"parameter {name} is tied over stages {', '.join(map(str, stages))}, which update at different times",
                ways_out=("hold both uses on one stage: partition=", "a schedule that flushes: 1f1b"),
            )


def check_same(staged: Staged, memory: StreamMemory) -> None:
    """A round's gradients are of one set of parameters, that of the optimizers; buffers that forwards write are known."""
    for stage in staged.stages:
        known = memory.gradient_names[stage.index]
        if more := set(stage.written) - set(memory.changing[stage.index]):
            names = ", ".join(sorted(more))
            raise CompileError(
                f"the buffers {names} of stage {stage.index} are written now, and were not when the stream began",
                ways_out=("pipe.train() before the first step",),
            )  # fmt: skip
        if differing := set(known) ^ set(stage.gradients):
            names = ", ".join(sorted(differing))
            raise CompileError(
                f"what is trained has changed since the optimizers were made: {names} on stage {stage.index}",
                ways_out=("requires_grad as it was", "a new pipeline, after a drain"),
            )  # fmt: skip


def check_weights(weights: Sequence[float], schedule: str) -> None:
    """Of the losses of a batch's microbatches."""
    if not all(weights):
        raise CompileError(
            f"loss_weight gave {weights}: a microbatch that counts nothing still takes its turn with {schedule}, and "
            "its gradient, perhaps not a number, would be multiplied by 0", ways_out=("batches without such microbatches",),
        )  # fmt: skip


def check_unchanged(minibatches: Iterable[Fed]) -> None:
    """Of minibatches whose backward is still to come, no tensor may have been changed in place."""
    for fed in minibatches:
        for (name, tensor), version in zip(fed.tensors.items(), fed.versions, strict=True):
            if tensor._version != version:
                raise CompileError(
                    f"{name} of batch {fed.index} was changed in place while its backward is still to come",
                    ways_out=("give each step new tensors", "a copy: tensor.clone()"),
                )
