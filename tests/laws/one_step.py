"""One training step of a model, taken through the compiler by hand: a test can look at, or break, what lies between two steps.

Any program of it, global or of all ranks, is run by the reference backend on copies of the model's tensors, and compared with
the plain loop. Stricter than a Pipeline in one process: every rank must have the loss, and every holder of a tied weight the
whole gradient, not just its part.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pdcompiler.backends import reference
from pdcompiler.compiler import compile_program
from pdcompiler.core.batch import read_batch
from pdcompiler.core.ir import Microbatch, Program, RankProgram, Step
from pdcompiler.core.partition import Partition
from pdcompiler.core.pass_manager import Watch
from pdcompiler.core.random_ops import microbatch_seeds
from pdcompiler.passes.schedules.named import SCHEDULES
from pdcompiler.runner import Runner, restrict
from pdcompiler.testing import Batch, Case, assert_close_by_tensor, plain_step, split_rows
from pdcompiler.traces import Traces
from tests.levels import request

EXACT = 1e-12


class OneStep:
    """A model, its batch, and how they are run; `step` holds the stages of each microbatch."""

    def __init__(
        self, model: nn.Module, batch: Batch, begins: Sequence[str], schedule: str, microbatches: int, watch: Watch | None = None
    ) -> None:
        self.model, self.watch = model, watch
        self.batch = read_batch(model, batch.args, batch.kwargs, batch.target, None)
        sizes = split_rows(self.batch.rows, microbatches)
        self.weights = [size / self.batch.rows for size in sizes]
        self.seeds = microbatch_seeds(0, 0, len(sizes))
        self.expected = plain_step(
            model, batch.args, batch.kwargs, target=batch.target, loss_fn=batch.loss_fn, rows_of_microbatches=sizes,
            seeds=self.seeds,
        )  # fmt: skip
        self.request = dataclasses.replace(
            request(copy.deepcopy(model), len(begins) + 1, loss_fn=batch.loss_fn, partition=tuple(begins)), watch=self._look
        )
        self.traces = Traces(self.request)
        plans = [
            Microbatch(start, stop, self.traces.staged(self.batch, [stop - start], True)[stop - start])
            for start, stop in self.batch.spans(microbatches)
        ]
        self.step = Step(tuple(plans), self.batch.dims)
        self.schedule = restrict(SCHEDULES[schedule](len(begins) + 1, microbatches), self.step, True)

    @staticmethod
    def of(case: Case, watch: Watch | None = None) -> OneStep:
        """The step of a random case."""
        return OneStep(case.model(), case.batch(), case.partition, case.schedule, case.microbatches, watch)

    def _look(self, name: str, value: Any) -> None:
        if self.watch is not None:
            self.watch(name, value)

    @property
    def partition(self) -> Partition:
        """The stages, shared by all traces."""
        assert self.traces.partition is not None
        return self.traces.partition

    def holders(self) -> dict[str, tuple[int, ...]]:
        """Of each parameter with several stages, its ranks; here rank i runs stage i."""
        return {name: stages for name, stages in self.partition.owners().items() if len(stages) > 1}

    def program(self) -> Program:
        """The program over all ranks, after all passes."""
        return compile_program(self.request, self.step, self.schedule, self.holders())

    def check_program(self, program: Program, *, reduced: bool = True) -> None:
        """A global program gives what the plain loop gives. reduced: whether the parts of tied weights are added already."""
        self._check(program, lambda inputs, memory: reference.run_program(program, inputs, memory), reduced)

    def check_ranks(self, program: Program, ranks: Sequence[RankProgram]) -> None:
        """The ranks' programs together give what the plain loop gives."""
        self._check(program, lambda inputs, memory: dict(enumerate(reference.run_ranks(ranks, inputs, memory))), True)

    def _check(self, program: Program, run: Callable[..., dict[int, Any]], reduced: bool) -> None:
        named = [*self.model.named_parameters(), *self.model.named_buffers()]
        tensors = {name: tensor.detach().clone() for name, tensor in named}
        memory = reference.Memory(
            lambda stage, rank: tuple(tensors[name] for name in self.partition.stages[stage].parameters),
            lambda stage, rank: tuple(tensors[name] for name in program.buffer_names[stage]),
        )
        weights = torch.tensor(self.weights, dtype=torch.float64)
        results = run(Runner.placeholders(program, self.batch.tensors, weights, self.seeds), memory)
        for rank, result in results.items():
            assert_close_by_tensor(result["loss"], self.expected.loss, EXACT, f"loss on rank {rank}")
        self._check_gradients(gradients_of(program, results), reduced)
        for name, buffer in self.expected.buffers.items():
            assert_close_by_tensor(tensors[name], buffer, EXACT, f"buffer {name}")
        for name, parameter in self.model.named_parameters():
            assert torch.equal(tensors[name], parameter), f"weight {name} was changed"

    def _check_gradients(self, found: dict[str, list[Tensor]], reduced: bool) -> None:
        holders = self.holders()
        for name, expected in self.expected.gradients.items():
            if expected is None:
                assert name not in found, f"gradient of {name}: there is none in plain PyTorch"
                continue
            assert name in found, f"gradient of {name}: there is none"
            values = found[name] if reduced else [sum(found[name][1:], found[name][0])]
            count = len(holders.get(name, (0,))) if reduced else 1
            assert len(values) == count, f"gradient of {name}: on {len(values)} ranks, {count} hold it"
            for value in values:
                assert_close_by_tensor(value, expected, EXACT, f"gradient of {name}")


def gradients_of(program: Program, results: dict[int, Any]) -> dict[str, list[Tensor]]:
    """What each rank would add to `.grad`: the reduced gradient where there is one, else its stage's."""
    found: dict[str, list[Tensor]] = defaultdict(list)
    for result in results.values():
        reduced = result.get("reduced", {})
        for name, value in reduced.items():
            found[name].append(value)
        for stage, values in result.get("gradients", {}).items():
            for name, value in zip(program.gradient_names[stage], values, strict=True):
                if name not in reduced:
                    found[name].append(value)
    return found
