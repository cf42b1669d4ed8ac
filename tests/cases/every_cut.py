"""One model cut at every operation where it may be cut, each time compared with the plain loop.

Where a stage begins must not matter, also in the middle of a module. Most of a compile is its trace, so one trace serves all
the partitions of a model.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import numpy
from torch import Tensor, nn

import pdcompiler
from pdcompiler import traces
from pdcompiler.compiler import Request, fingerprint
from pdcompiler.core.batch import Batch
from pdcompiler.core.ir import Trace
from pdcompiler.core.machine import Machine
from pdcompiler.core.partition import Partition
from pdcompiler.given_schedule import SEVERAL
from pdcompiler.passes.partition.make_partition import make_partition
from pdcompiler.passes.partition.problem import make_problem
from pdcompiler.testing import LossFunction
from tests.cases.against_loop import SCHEDULES, AgainstLoop

ROWS = 6
MICROBATCHES = 3


class TracedOnce:
    """Stands for `trace_model`: a copy of the trace of one model that was made before for the same rows."""

    def __init__(self) -> None:
        self.trace_model = traces.trace_model
        self.made: dict[Any, Trace] = {}

    def __call__(self, request: Request, batch: Batch, **options: Any) -> Trace:
        return self.kept(tuple(options.items()), request, batch, **options)

    def kept(self, key: Any, request: Request, batch: Batch, **options: Any) -> Trace:
        """The trace of this key."""
        if key not in self.made:
            self.made[key] = self.trace_model(request, batch, **options)
        return copy.deepcopy(self.made[key])


def check_every_cut(
    model: nn.Module, x: Tensor, target: Tensor, loss_fn: LossFunction, stages: Sequence[int] = (2, 3), at_most: int = 12,
    schedules: Sequence[str] = SCHEDULES, microbatches: int = MICROBATCHES,
) -> list[pdcompiler.Pipeline]:  # fmt: skip
    """Gradients, loss, outputs and buffers equal the loop's for each partition into so many stages (every n-th where there are
    more than `at_most`); the schedules take turns. Gives the pipelines."""
    once = TracedOnce()
    with mock.patch.object(traces, "trace_model", once):
        first = AgainstLoop(model, 1, microbatches=microbatches, loss_fn=loss_fn)
        first.step(x, target=target)
        trace = next(iter(once.made.values()))
        pipes = []
        for count in stages:
            for number, partition in enumerate(_partitions(model, trace, count, at_most)):
                schedule = schedules[number % len(schedules)]
                ranks = count // 2 if schedule in SEVERAL else count
                checked = AgainstLoop(model, ranks, schedule, microbatches=microbatches, loss_fn=loss_fn, partition=partition)
                try:
                    checked.step(x, target=target)
                except Exception as error:
                    error.add_note(f"{schedule}, stages:\n{partition}")
                    raise
                pipes.append(checked.pipe)
    return pipes


def _partitions(model: nn.Module, trace: Trace, stages: int, at_most: int) -> Iterator[Partition]:
    problem = make_problem(trace, Machine().take(2), ROWS)
    cuts = list(itertools.combinations(numpy.flatnonzero(problem.legal).tolist(), stages - 1))
    assert cuts, f"the model can't be cut in {stages}"
    for places in cuts[:: -(-len(cuts) // at_most)]:
        yield make_partition(trace, problem, places, fingerprint(model))


def messages(pipe: pdcompiler.Pipeline, word: Any) -> list[tuple[int, Any]]:
    """The rank and node of each call of a word in the ranks' programs."""
    return [(rank, node) for rank, module in enumerate(pipe.ranks) for node in module.graph.nodes if node.target is word]
