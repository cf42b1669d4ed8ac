"""The trace that a model is planned with, for all numbers of rows that its microbatches may have.

    one number                a trace for it
    several                   two traces, for the fewest and the most, joined (`passes/tracing/join_rows.py`); one of them is
                              made in a copy of this process meanwhile
    they can't be joined      a symbolic trace, in three times as long

Not here: traces that are compiled (`traces.py`): a joined one can't run.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection

import torch

from pdcompiler.compiler import Request, trace_model
from pdcompiler.core.batch import Batch
from pdcompiler.core.errors import CompileError
from pdcompiler.core.ir import Trace
from pdcompiler.passes.tracing.annotate_costs import annotate_costs
from pdcompiler.passes.tracing.join_rows import Outline, costs_agree, join_rows, outline
from pdcompiler.traces import Traces

PATIENCE = 30.0
"""Seconds that the copy of this process may take longer than twice what the trace here took."""


def planning_trace(request: Request, batch: Batch, rows: Sequence[int]) -> Trace:
    """A trace with costs for these numbers of rows, in ascending order. One row, whose own graph has other views where sizes of 1
    broadcast, is priced as the others are, but from a symbolic trace not at all."""
    several = [count for count in rows if count > 1] or rows
    if len(rows) == 1:
        return trace_model(request, batch, rows=rows[0], symbolic=False, gradients=True)
    joined = _joined(request, batch, several[0], several[-1]) if len(several) > 1 else None
    if joined is None:
        return Traces(request).trace(batch, rows[-1], gradients=True)
    return replace(joined, admits=lambda count: rows[0] <= count <= rows[-1])


def _joined(request: Request, batch: Batch, low: int, high: int) -> Trace | None:
    def outlined() -> Outline:
        return outline(trace_model(request, batch, rows=low, symbolic=False, gradients=True))

    with suppress(CompileError):
        receive = _elsewhere(outlined) if _can_copy_itself() else outlined
        trace = trace_model(request, batch, rows=high, symbolic=False, gradients=True)
        own, other = outline(trace), receive() or outlined()
        if (joined := join_rows(trace, own, other)) is not None:
            return joined if costs_agree(annotate_costs(joined), own, other) else None
    return None


def _can_copy_itself() -> bool:
    """Whether a copy of this process can trace: elsewhere than on Linux, and where a GPU is in use, it may not work."""
    return sys.platform == "linux" and len(os.sched_getaffinity(0)) > 1 and not _uses_gpu()


def _uses_gpu() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _elsewhere(work: Callable[[], Outline]) -> Callable[[], Outline | None]:
    """Begin in a copy of this process; what is returned waits for the result, and is None where there is none."""
    context, began = multiprocessing.get_context("fork"), time.monotonic()
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(sender, work), daemon=True)
    process.start()
    sender.close()

    def receive() -> Outline | None:
        found: Outline | None = None
        with suppress(EOFError):
            found = receiver.recv() if receiver.poll(time.monotonic() - began + PATIENCE) else None
        process.kill()
        process.join()
        return found

    return receive


def _send(sender: Connection, work: Callable[[], Outline]) -> None:
    torch.set_num_threads(1)  # the threads of the original are not in its copy
    with suppress(Exception), open(os.devnull, "w") as nowhere:
        sys.stdout = sys.stderr = nowhere
        sender.send(work())
