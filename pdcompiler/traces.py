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
from collections.abc import Iterable, Iterator
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
        parts = [part for part in (request.model, request.loss_fn) if isinstance(part, nn.Module)]
        self.modules = tuple(module for part in parts for module in part.modules())
        self.parameters = tuple(request.model.parameters())
        self.partition: Partition | None = None
        self.made: dict[Any, list[tuple[Trace, Staged]]] = {}
        self.dims: dict[Any, tuple[int | None, ...]] = {}
        self.told: set[str] = set()

    def staged(self, batch: Batch, rows: Iterable[int], gradients: bool) -> dict[int, Staged]:
        """The stages' functions for microbatches of these numbers of rows."""
        known = self.made.setdefault(self.signature(batch, gradients), [])
        return {count: self._staged(known, batch, count, gradients) for count in sorted(set(rows), reverse=True)}

    def _staged(self, known: list[tuple[Trace, Staged]], batch: Batch, rows: int, gradients: bool) -> Staged:
        for trace, staged in known:
            if trace.admits(rows):
                return staged
        return self._add(known, self.trace(batch, rows, gradients), rows)

    def trace(self, batch: Batch, rows: int, gradients: bool) -> Trace:
        """A new trace that serves microbatches of `rows` rows, and where the model allows it those of other numbers too."""
        with self._mode(gradients):
            # For one row a general trace is needed only to see whether the inputs are split right: sizes of 1 broadcast.
            general = self._general(batch, rows, gradients) if rows > 1 or _ambiguous(batch) else None
            if general is None or not general.admits(rows):
                general = trace_model(self.request, batch, rows=rows, symbolic=False, gradients=gradients)
        return general

    def fixed_partition(self) -> Partition:
        """The partition that all traces share; a CompileError where there is no trace yet."""
        if self.partition is None:
            raise CompileError(
                "nothing is compiled yet", ways_out=("give example_args or example_kwargs to compile", "take a step first")
            )
        return self.partition

    def trace_of(self, staged: Staged) -> Trace:
        """The trace that was cut into these stages."""
        return next(trace for known in self.made.values() for trace, other in known if other is staged)

    def output_dims(self, batch: Batch, gradients: bool) -> tuple[int | None, ...]:
        """Per output leaf the dimension that carries the rows: where traces for different numbers of rows differ."""
        key = self.signature(batch, gradients)
        if key not in self.dims:
            traces = [trace for trace, _ in self.made[key]]
            symbolic = next((trace for trace in traces if trace.rows is None), None)
            with self._mode(gradients):
                general = symbolic or self._general(batch, 2, gradients)
            self.dims[key] = general.output_dims if general.rows is None else _differing_dims(general, traces[0])
        return self.dims[key]

    def signature(self, batch: Batch, gradients: bool) -> Any:
        """What a trace is for, but for the rows; see the module's docstring."""
        modes = tuple([module.training for module in self.modules]) if gradients else ()
        trainable = tuple([parameter.requires_grad for parameter in self.parameters]) if gradients else ()
        autocast = tuple((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda"))
        return batch.signature(), gradients, modes, trainable, autocast, torch.get_default_dtype()

    def _mode(self, gradients: bool) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if gradients else evaluation(self.request.model)

    def _general(self, batch: Batch, rows: int, gradients: bool) -> Trace:
        """A trace for any number of rows, recorded at one that no other dimension has; for a model that takes one number of
        rows only, a trace for `rows`."""
        hint = unused_size(self.request.model, batch, max(rows, 2))
        try:
            return trace_model(self.request, batch, rows=hint, symbolic=True, gradients=gradients)
        except CompileError as error:
            ambiguous = _ambiguous(batch)
            if rows > 1 or not ambiguous:
                with contextlib.suppress(CompileError):
                    return trace_model(self.request, batch, rows=rows, symbolic=False, gradients=gradients)
            if ambiguous:
                error.add_note(f"perhaps the inputs are not split as they should be; then say batch_dims for {ambiguous}")
            raise

    def _add(self, known: list[tuple[Trace, Staged]], trace: Trace, rows: int) -> Staged:
        for warning in trace.warnings:
            if warning not in self.told:
                self.told.add(warning)
                warnings.warn(warning, stacklevel=2)
        if self.partition is None:
            self.partition = choose_partition(self.request, trace, rows)
        known.append((trace, stage_trace(self.request, trace, self.partition, rows)))
        return known[-1][1]


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


def _output_shapes(trace: Trace) -> list[tuple[Any, ...]]:
    return [node.meta["type"].shape for output, node in trace.output_nodes() if output.kind == "output"]


def _differing_dims(one: Trace, other: Trace) -> tuple[int | None, ...]:
    """The dimension in which outputs of traces for different numbers of rows differ; dimension 0 where there is only one."""
    if one.rows == other.rows:
        return tuple(0 if shape and shape[0] == one.rows else None for shape in _output_shapes(one))
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
