"""Outputs of microbatches joined into the outputs of the batch, and the weights of their losses.

Not here: computing them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pdcompiler.core.batch import Batch
from pdcompiler.core.errors import CompileError

LossWeight = str | Callable[[Mapping[str, Tensor]], Any]


@dataclass(frozen=True)
class StepResult:
    """What a step gives. loss: a detached scalar, the same on every rank; None where there is none.   outputs: in the structure
    that the model returns, rows in the batch's order; None where they were not asked for, or not on this rank.   index: without
    flushes, of the batch that has finished, counted from 0."""

    loss: Tensor | None
    outputs: Any = None
    index: int | None = None


def loss_weights(batch: Batch, spans: Sequence[tuple[int, int]], loss_weight: LossWeight) -> list[float]:
    """The weight of each microbatch's loss: rows_i / rows, 1, or the user's own, normalised over the batch."""
    if loss_weight == "sum":
        return [1.0] * len(spans)
    if loss_weight == "rows":
        return [(stop - start) / batch.rows for start, stop in spans]
    if not callable(loss_weight):
        raise CompileError(f"loss_weight is {loss_weight!r}", ways_out=('"rows", "sum", or a function of the microbatch',))
    given = [float(loss_weight(_part(batch, start, stop))) for start, stop in spans]
    total = sum(given)
    if not total > 0 or min(given) < 0:
        raise CompileError(f"loss_weight gave {given}: weights are 0 or more, and not all 0")
    return [weight / total for weight in given]


def _part(batch: Batch, start: int, stop: int) -> dict[str, Tensor]:
    """The tensors of one microbatch, by name."""
    return {
        name: tensor if (dim := batch.dims[name]) is None else tensor.narrow(dim, start, stop - start)
        for name, tensor in batch.tensors.items()
    }


def join_outputs(parts: Sequence[Sequence[Tensor]], dims: Sequence[int | None], weights: Sequence[float]) -> list[Tensor]:
    """Per output leaf: its microbatches joined along the dimension of the rows; floating scalars are weighted means.

    Raises CompileError for what is neither and differs between microbatches.
    """
    return [_join(leaf, place, dim, weights) for place, (leaf, dim) in enumerate(zip(parts, dims, strict=True))]


def _join(leaf: Sequence[Tensor], place: int, dim: int | None, weights: Sequence[float]) -> Tensor:
    if len(leaf) == 1:
        return leaf[0].clone()
    if dim == -1:
        raise CompileError(
            f"output {place} has the rows in more than one dimension: microbatches of it can't be joined",
            ways_out=('outputs="none"', "microbatches=1"),
        )
    if dim is not None:
        return torch.cat(list(leaf), dim)
    if leaf[0].dim() == 0 and leaf[0].is_floating_point():
        counted = [(weight, value) for weight, value in zip(weights, leaf, strict=True) if weight]
        total = sum(weight for weight, _ in counted)
        return sum((value * (weight / total) for weight, value in counted), torch.zeros_like(leaf[0]))
    if not all(torch.equal(value, leaf[0]) for value in leaf[1:]):
        raise CompileError(
            f"output {place} has no rows and differs between microbatches: it can't be joined", ways_out=('outputs="none"',)
        )
    return leaf[0].clone()
