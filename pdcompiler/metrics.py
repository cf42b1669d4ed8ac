"""What a training loop shows of its steps: how long one took, what went through, who waited, the gradients' norm.

Not here: timelines of a step (`recording.py`), and anything that would slow a step down: nothing is sent until it is asked for.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from pdcompiler.core.batch import Batch
from pdcompiler.core.errors import CompileError
from pdcompiler.runner import Runner


@dataclass(frozen=True)
class Metrics:
    """Of the newest training step, the same on every rank. steps: taken so far.   seconds: of the slowest rank.   rows, tokens:
    per second; a token is an element of the first integer input, None where there is none.   waited: the seconds that each rank
    waited for messages.   gradient_norm: of the newest clipping, None where there was none."""

    steps: int
    seconds: float
    rows: float
    tokens: float | None
    waited: tuple[float, ...]
    gradient_norm: float | None

    def __str__(self) -> str:
        parts = [f"step {self.steps}", f"{self.seconds * 1e3:.1f} ms", f"{self.rows:.0f} rows/s"]
        parts += [] if self.tokens is None else [f"{self.tokens:.0f} tokens/s"]
        parts += [] if self.gradient_norm is None else [f"gradient norm {self.gradient_norm:.3g}"]
        return ", ".join([*parts, "waited " + " ".join(f"{seconds / self.seconds:.0%}" for seconds in self.waited)])


class Meter:
    """Measures this process's steps."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.seconds = self.waited = 0.0
        self.rows, self.tokens = 0, 0
        self.norm: torch.Tensor | None = None

    @contextlib.contextmanager
    def step(self, batch: Batch) -> Iterator[None]:
        """While a training step runs."""
        begin, waited = time.perf_counter(), self._waited()
        yield
        self.seconds, self.waited = time.perf_counter() - begin, self._waited() - waited
        integers = [tensor for tensor in batch.tensors.values() if not (tensor.is_floating_point() or tensor.dtype == torch.bool)]
        self.rows, self.tokens = batch.rows, integers[0].numel() if integers else 0

    def _waited(self) -> float:
        return sum(self.runner.backend.waited.values()) if self.runner.backend is not None else 0.0

    def metrics(self, steps: int) -> Metrics:
        """Of all ranks; every rank calls it."""
        if not self.rows:
            raise CompileError("no training step was taken yet", ways_out=("pipe.step(...) first",))
        own = (self.seconds, self.waited)
        everywhere: list[Any] = [own] if self.runner.backend is None else self.runner.backend.gather(own)
        seconds = max(taken for taken, _ in everywhere)
        norm = None if self.norm is None else float(self.norm)
        tokens = self.tokens / seconds if self.tokens else None
        return Metrics(steps, seconds, self.rows / seconds, tokens, tuple(waited for _, waited in everywhere), norm)
