"""Pipeline: what `compile` returns. Trains and evaluates; everything that it runs can be looked at first.

Under torchrun it holds and runs this rank's part, with messages; without it, all ranks run in this process through the reference
backend, so the same script runs on a laptop. Not here: how programs are made (`compiler.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pdcompiler.clipping import clip_gradients, share_overflow
from pdcompiler.compiler import Request
from pdcompiler.core.batch import Batch, BatchDims, read_batch
from pdcompiler.core.errors import CompileError, VerifyError
from pdcompiler.core.random_ops import microbatch_seeds
from pdcompiler.core.schedule import Schedule
from pdcompiler.gradients import add_gradients
from pdcompiler.holdings import Holdings, Initialize
from pdcompiler.inspection import Inspectable
from pdcompiler.metrics import Meter, Metrics
from pdcompiler.optimizers import MakeOptimizer, whole_optimizer
from pdcompiler.outputs import LossWeight, StepResult, join_outputs, loss_weights
from pdcompiler.plain import plain_step
from pdcompiler.runner import Compiled, Runner
from pdcompiler.stream import Stream
from pdcompiler.traces import Traces
from pdcompiler.verification import Copies, Report, compare, first_difference, run_copies

TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-1, torch.float16: 1e-1}


@dataclass(frozen=True)
class Options:
    """What of `compile`'s arguments the steps need."""

    schedule: Schedule
    """Without flushes: what is evaluated with."""
    loss_weight: LossWeight
    batch_dims: BatchDims | None
    timeout: float
    init: Initialize | None
    optimizer: MakeOptimizer | None = None
    scale_learning_rate: bool = False
    seed: int = 0


class Pipeline(Inspectable):
    """A model compiled for several ranks; see the module's docstring, and `pdcompiler.compile` for what it promises."""

    def __init__(self, request: Request, options: Options, rank: int | None, traces: Traces) -> None:
        self.request, self.options, self.rank = request, options, rank
        self.holdings = Holdings(request.model, request.loss_fn, request.device, options.init)
        self.runner = Runner(request, options.schedule, options.timeout, rank, self.holdings, traces)
        self.meter = Meter(self.runner)
        self.stream: Stream | None = None
        self.steps = 0
        """Training steps that were taken: what a step draws depends on it."""
        self._optimizer: torch.optim.Optimizer | None = None
        if request.ticks is not None and options.optimizer is not None:
            self.stream = Stream(self.runner, request.ticks, options.optimizer, options.scale_learning_rate)

    # training and evaluation

    def step(
        self, *args: Any, target: Any = None, outputs: str = "none", scaler: Any = None, **kwargs: Any
    ) -> StepResult | None:
        """One training step on a batch: adds to `.grad` of this rank's parameters what plain PyTorch would add.

        The gradient is that of sum_i w_i * loss_i over the microbatches, w_i by `loss_weight`.   outputs: "none", "last" (on
        the ranks of the last stage) or "all".   scaler: a torch.amp.GradScaler, by whose scale the gradients are larger; what
        overflows on one rank is then seen by the scalers of all.   Every rank calls it with the same arguments.

        Without flushes: feeds the batch, which the optimizers' updates will follow, and returns on every rank what has
        finished meanwhile: the loss of an earlier batch and its index, None while the pipeline fills. The batch must stay as
        it is until it has finished.
        """
        batch = self._read(args, kwargs, target)
        if wants := [name for name, tensor in batch.tensors.items() if tensor.requires_grad]:
            raise CompileError(
                f"the inputs {', '.join(wants)} want a gradient, but a step gives gradients to the model's parameters alone",
                ways_out=("make what computes them a part of the model", "detach them"),
            )
        scale = 1.0 if scaler is None else float(scaler.scale(torch.ones((), device=self.runner.device)))
        if self.stream is not None:
            if scaler is not None:
                raise CompileError(
                    f"{self.stream.ticks.name} updates inside of a step, where a GradScaler can't skip an update",
                    ways_out=("bfloat16 needs no scaler", "a schedule that flushes"),
                )
            with self.meter.step(batch):
                fed = self.stream.step(batch, self.options.loss_weight, outputs, self._seeds(self.stream.ticks.batch or 1))
            self.steps += 1
            return fed
        weights = loss_weights(batch, batch.spans(self.options.schedule.microbatches), self.options.loss_weight)
        compiled = self.runner.compile(batch, weights, outputs, gradients=True)
        with self.meter.step(batch):
            results = self.runner.run(compiled, batch, [weight * scale for weight in weights], self._seeds(len(weights)))
        for rank, result in results.items():
            self._add_gradients(rank, compiled, result)
        if scaler is not None and scaler.is_enabled():
            share_overflow(self.runner)
        self.steps += 1
        return self._result(compiled, results, batch, weights, gradients=True, scale=scale)

    def drain(self) -> list[StepResult]:
        """Finish what is in flight, and update with what there is of the last rounds; returns the batches that finished. Every
        rank calls it. With a schedule that flushes there is nothing to finish."""
        return [] if self.stream is None else self.stream.drain()

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Made by `optimizer=` of this rank's parameters; one that does nothing where there are none. Without flushes its
        parameter groups are those of all stages, for learning rate schedulers, and each step of the pipeline steps it."""
        if self.options.optimizer is None:
            raise CompileError("no optimizer was given", ways_out=("compile(..., optimizer=)", "make one of pipe.parameters()"))
        _ = self.partition
        if self.stream is not None and self.stream.optimizer is not None:
            return self.stream.optimizer
        if self._optimizer is None:
            self._optimizer = whole_optimizer(self.options.optimizer, self.parameters())
        return self._optimizer

    def eval_step(self, *args: Any, target: Any = None, outputs: str = "all", **kwargs: Any) -> StepResult:
        """The model in evaluation mode, without gradients, on a batch of any size; the modules' modes stay as they are. Without
        flushes: after a `drain`, as all that reads or writes the weights of all stages."""
        self._check_drained("eval_step")
        batch = self._read(args, kwargs, target)
        weights = loss_weights(batch, batch.spans(self.options.schedule.microbatches), self.options.loss_weight)
        compiled = self.runner.compile(batch, weights, outputs, gradients=False)
        results = self.runner.run(compiled, batch, weights, microbatch_seeds(self.options.seed, "evaluation", len(weights)))
        return self._result(compiled, results, batch, weights, gradients=False)

    def verify(self, *args: Any, target: Any = None, tolerance: float | None = None, **kwargs: Any) -> Report:
        """Run a training step of all ranks in this process, on copies, against plain PyTorch: loss, gradients, buffers.

        tolerance: of max|a - b| / max|b| per tensor; None: 1e-12 in float64, 1e-5 in float32, 1e-1 in 16 bits.   Nothing is
        changed.   Where the model draws, plain PyTorch draws from the same seeds.   Raises VerifyError that names what differs,
        and the first value of the program that does. Without flushes, of the same stages in a step with a flush.
        """
        self._check_drained("verify")
        batch = self._read(args, kwargs, target)
        spans = batch.spans(self.options.schedule.microbatches)
        weights = loss_weights(batch, spans, self.options.loss_weight)
        compiled = self.runner.compile(batch, weights, "none", gradients=True)
        seeds = self._seeds(len(weights))
        inputs = self.runner.inputs(compiled, batch, weights, seeds)
        tensors = {**dict(self.request.model.named_parameters()), **self.holdings.buffers}
        allowed = tolerance or TOLERANCES[inputs["loss_weights"].dtype]
        copies = Copies({name: tensor.detach().clone() for name, tensor in tensors.items()})
        expected = plain_step(
            self.request.model, args, kwargs, target=target, loss_fn=self.request.loss_fn, weights=weights,
            rows_of_microbatches=[stop - start for start, stop in spans], batch_dims=self.options.batch_dims,  # type: ignore[arg-type]
            training=self.request.model.training, seeds=seeds,
        )  # fmt: skip
        loss, gradients = run_copies(compiled.program, compiled.ranks, self.partition, inputs, copies)
        try:
            return compare(loss, gradients, copies, expected, allowed)
        except VerifyError as error:
            again = Copies({name: tensor.detach().clone() for name, tensor in tensors.items()})
            trace = self.runner.traces.trace_of(compiled.staged)
            place = first_difference(compiled.program, trace, self.partition, compiled.step, inputs, again, allowed)
            error.add_note(f"first value that differs: {place or 'none within a stage; the sums over microbatches do'}")
            raise

    def prepare(self, *args: Any, target: Any = None, **kwargs: Any) -> None:
        """Compile for a batch without running anything: the training step, and where there is no target for its loss, none."""
        batch = self._read(args, kwargs, target)
        trains = target is not None or self.request.loss_fn is None
        if self.stream is not None and trains:
            return self.stream.prepare(batch)
        weights = [1.0] * len(batch.spans(self.options.schedule.microbatches))
        self.runner.compile(batch, weights, "none" if trains else "all", gradients=trains)

    def _seeds(self, count: int) -> tuple[int, ...]:
        """Of the next training step's microbatches."""
        return microbatch_seeds(self.options.seed, self.steps, count)

    def _check_drained(self, what: str) -> None:
        if self.stream is not None:
            self.stream.check_drained(what)

    def _read(self, args: Sequence[Any], kwargs: Mapping[str, Any], target: Any) -> Batch:
        if target is not None and self.request.loss_fn is None:
            raise CompileError("a target was given, but the pipeline has no loss_fn", ways_out=("compile(..., loss_fn=...)",))
        return read_batch(self.request.model, args, kwargs, target, self.options.batch_dims)

    def _add_gradients(self, rank: int, compiled: Compiled, result: Mapping[str, Any]) -> None:
        """To `.grad` of the parameters that this process holds: the sums over ranks, and what no other rank holds."""
        reduced: dict[str, Tensor] = dict(result.get("reduced", {}))
        if self.rank is None:
            holders = self.runner.holders()
            reduced = {name: value for name, value in reduced.items() if holders[name][0] == rank}
        found = dict(reduced)
        for stage, gradients in result.get("gradients", {}).items():
            names = compiled.program.gradient_names[stage]
            found |= {n: g for n, g in zip(names, gradients, strict=True) if n not in result.get("reduced", {})}
        add_gradients(self.holdings.parameters, found, own=compiled.program.summed)

    def _result(
        self, compiled: Compiled, results: Mapping[int, Any], batch: Batch, weights: Sequence[float], *, gradients: bool,
        scale: float = 1.0,
    ) -> StepResult:  # fmt: skip
        result = results[max(results)]
        staged = compiled.staged
        outputs = None
        if "outputs" in result:
            one = len(compiled.step.microbatches) == 1
            dims = (None,) * len(staged.outputs) if one else self.runner.traces.output_dims(batch, gradients)
            outputs = staged.result.rebuild(join_outputs(result["outputs"], dims, weights))
        loss = result.get("loss")
        return StepResult(None if loss is None else loss.detach() / scale, outputs)

    # what is held

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's parameters."""
        return (parameter for _, parameter in self.named_parameters())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters with the model's own names; a tied one once."""
        _ = self.partition
        return iter(self.holdings.parameters.items())

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """This process's buffers with the model's own names, without those that a stage elsewhere writes."""
        _ = self.partition
        return iter(self.holdings.newest_buffers().items())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As of a module; also before anything is compiled, so that a loop may begin with it."""
        for parameter in self.holdings.parameters.values() or self.request.model.parameters():
            if parameter.grad is not None:
                parameter.grad = None if set_to_none else parameter.grad.detach().zero_()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, deterministic: bool = False) -> Tensor:
        """As torch.nn.utils.clip_grad_norm_ of the whole model, on every rank: scales this rank's gradients, returns the norm of
        all. deterministic: equal to one process's to the last bit, with a message more. Without flushes gradients are never there
        all at once: CompileError; each stage can clip its own."""
        if self.stream is not None:
            raise CompileError(
                f"{self.stream.ticks.name} updates each stage when its gradients are there, so there is no norm of all stages'",
                ways_out=("by stage: an optimizer that clips before its step (docs/asynchronous.md)", "a schedule that flushes"),
            )
        _ = self.partition
        self.meter.norm = clip_gradients(self.runner, max_norm, norm_type, deterministic)
        return self.meter.norm

    def metrics(self) -> Metrics:
        """How long the newest training step took, what went through, and how long each rank waited. Every rank calls it."""
        return self.meter.metrics(self.steps)

    def train(self, mode: bool = True) -> Pipeline:
        """Set the modules' mode, as of a module."""
        self.request.model.train(mode)
        return self

    def eval(self) -> Pipeline:
        """Set the modules to evaluation mode: `step` then trains with dropout off and statistics frozen."""
        return self.train(False)

    def state_dict(self) -> dict[str, Tensor]:
        """What this rank holds, under the model's own names; in one process the whole model's. Without flushes: after a drain."""
        self._check_drained("state_dict")
        _ = self.partition
        return self.holdings.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor], strict: bool = True) -> None:
        """Load the model's own state_dict (or this rank's part of it). Without flushes: after a drain."""
        self._check_drained("load_state_dict")
        _ = self.partition
        self.holdings.load_state_dict(state, strict)

    def close(self) -> None:
        """Leave the process group, if this pipeline made it."""
        if self.runner.backend is not None and self.runner.backend.own_group:
            self.runner.backend.close()
