"""Which traces a model needs: one for each signature, symbolic in the rows where the model allows it.

    training, 4 x 64 tokens     one graph for 2, 3, 4, ... rows
    training, one row           a graph of its own: sizes of 1 broadcast
    evaluation, 4 x 32 tokens   another

Signature: shapes apart from the rows, dtypes, plain values, each module's mode, trainable parameters, autocast, default dtype.
The first trace fixes the partition; every trace is staged by it, so parameters never move. Not here: programs.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from pdcompiler.compiler import Request, choose_partition, stage_trace, trace_model
from pdcompiler.core.batch import Batch
from pdcompiler.core.errors import CompileError
from pdcompiler.core.ir import Staged, Trace
from pdcompiler.core.partition import Partition


class Traces:
    """All traces of one model, made on demand, with the one partition that they share."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.partition: Partition | None = None
        self.made: dict[Any, list[tuple[Trace, Staged]]] = {}
        self.told: set[str] = set()

    def staged(self, batch: Batch, rows: int, gradients: bool) -> Staged:
        """The stages' functions for microbatches of `rows` rows."""
        key = (batch.signature(), gradients, _state(self.request.model, gradients))
        known = self.made.setdefault(key, [])
        for trace, staged in known:
            if trace.admits(rows):
                return staged
        with contextlib.nullcontext() if gradients else evaluation(self.request.model):
            self._trace(known, batch, rows, gradients)
        return next(staged for trace, staged in known if trace.admits(rows))

    def _trace(self, known: list[tuple[Trace, Staged]], batch: Batch, rows: int, gradients: bool) -> None:
        """A symbolic trace at a number of rows that no other dimension has; where it does not admit `rows`, one for these."""
        model = self.request.model
        hint = unused_size(model, batch, max(rows, 2))
        try:
            general = trace_model(self.request, batch, rows=hint, symbolic=True, gradients=gradients)
        except CompileError as error:
            general = self._fixed(batch, rows, gradients, error)
        if not any(trace.admits(hint) for trace, _ in known) or general.admits(rows):
            self._add(known, general, rows)
        if not general.admits(rows):
            exact = trace_model(self.request, batch, rows=rows, symbolic=False, gradients=gradients)
            exact.output_dims = general.output_dims if general.rows is None else _differing_dims(general, exact)
            self._add(known, exact, rows)

    def _fixed(self, batch: Batch, rows: int, gradients: bool, error: CompileError) -> Trace:
        """A model that only takes one number of rows. Where it does not take this one either, the first error counts."""
        try:
            fixed = trace_model(self.request, batch, rows=rows, symbolic=False, gradients=gradients)
        except CompileError:
            if ambiguous := _ambiguous(batch):
                error.add_note(f"perhaps because of which inputs were split by rows; if so, say batch_dims for {ambiguous}")
            raise error from error.__cause__
        fixed.output_dims = tuple(0 if sizes and sizes[0] == rows else None for sizes in _output_shapes(fixed))
        return fixed

    def _add(self, known: list[tuple[Trace, Staged]], trace: Trace, rows: int) -> None:
        for warning in trace.warnings:
            if warning not in self.told:
                self.told.add(warning)
                warnings.warn(warning, stacklevel=2)
        if self.partition is None:
            self.partition = choose_partition(self.request, trace, rows)
        known.append((trace, stage_trace(self.request, trace, self.partition, rows)))


def unused_size(model: nn.Module, batch: Batch, at_least: int) -> int:
    """The smallest number of rows, from `at_least` on, that no dimension of an input, parameter or buffer has."""
    taken = {size for tensor in (*model.parameters(), *model.buffers()) for size in tensor.shape}
    for name, tensor in batch.tensors.items():
        taken |= {size for dim, size in enumerate(tensor.shape) if dim != batch.dims[name]}
    return next(size for size in range(at_least, at_least + len(taken) + 1) if size not in taken)


@contextlib.contextmanager
def evaluation(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode; each module's own mode comes back afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _state(model: nn.Module, gradients: bool) -> Any:
    modes = tuple(module.training for module in model.modules()) if gradients else ()
    trainable = tuple(p.requires_grad for p in model.parameters()) if gradients else ()
    autocast = tuple((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda"))
    return modes, trainable, autocast, torch.get_default_dtype()


def _output_shapes(trace: Trace) -> list[tuple[Any, ...]]:
    return [node.meta["type"].shape for output, node in trace.output_nodes() if output.kind == "output"]


def _differing_dims(one: Trace, other: Trace) -> tuple[int | None, ...]:
    """The dimension in which outputs of traces for different numbers of rows differ."""
    dims: list[int | None] = []
    for a, b in zip(_output_shapes(one), _output_shapes(other), strict=True):
        found = [i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y]
        dims.append(None if not found else found[0] if len(found) == 1 else -1)
    return tuple(dims)


def _ambiguous(batch: Batch) -> list[str]:
    """Inputs that have the number of rows in another dimension too, or only there."""
    return [
        f"{name} {list(tensor.shape)}" for name, tensor in batch.tensors.items()
        if any(size == batch.rows for dim, size in enumerate(tensor.shape) if dim != batch.dims[name])
    ]
