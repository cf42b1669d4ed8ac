"""Oracles and assertions: what plain PyTorch would have computed, and whether a pipeline computed it too.

The oracle is the plain loop over microbatches, written as a user would write it, on a deep copy of the model.
It knows nothing of traces, stages or schedules, so that it cannot share a fault with the compiler. It is not
fast, and it is no substitute for `Pipeline.verify`, which also says *where* a program first differs.

    expected = plain_step(model, args, kwargs, rows_of_microbatches=(2, 2, 2, 1))
    assert_close_by_tensor(actual.grad, expected.gradients["head.weight"], 1e-12, "head.weight")

For training without flushes, where a minibatch is on older weights, the oracle is `asynchronous_steps`, from `pdcompiler.oracle`.
Random models and whole random cases for property tests come from `pdcompiler.strategies`, asynchronous ones from
`pdcompiler.asynchronous_strategies`, random schedules and faulty ones from `pdcompiler.schedule_strategies`, what `auto` is found
for from `pdcompiler.schedule_problem_strategies`, planner problems from `pdcompiler.workload_strategies`, all re-exported here.
"""

import copy
import difflib
import textwrap
from typing import Any

import torch
from torch import nn

from pdcompiler.asynchronous_strategies import AsynchronousCase as AsynchronousCase
from pdcompiler.asynchronous_strategies import asynchronous_cases as asynchronous_cases
from pdcompiler.comparison import assert_close_by_tensor as assert_close_by_tensor
from pdcompiler.comparison import assert_same as assert_same
from pdcompiler.comparison import assert_same_parts, detached
from pdcompiler.comparison import largest_difference as largest_difference
from pdcompiler.core.printer import show
from pdcompiler.core.random_ops import microbatch_seeds
from pdcompiler.oracle import AsynchronousResult as AsynchronousResult
from pdcompiler.oracle import asynchronous_steps as asynchronous_steps
from pdcompiler.plain import BatchDims as BatchDims
from pdcompiler.plain import LossFunction as LossFunction
from pdcompiler.plain import Observed as Observed
from pdcompiler.plain import dims_by_name, replica
from pdcompiler.plain import join_outputs as join_outputs
from pdcompiler.plain import loss_of as loss_of
from pdcompiler.plain import plain_eval as plain_eval
from pdcompiler.plain import plain_step as plain_step
from pdcompiler.plain import rows_of as rows_of
from pdcompiler.plain import split_rows as split_rows
from pdcompiler.random_model import Batch as Batch
from pdcompiler.random_model import ModelSpec as ModelSpec
from pdcompiler.random_model import RandomModel as RandomModel
from pdcompiler.schedule_problem_strategies import random_problem as random_problem
from pdcompiler.schedule_problem_strategies import schedule_problems as schedule_problems
from pdcompiler.schedule_strategies import any_schedules as any_schedules
from pdcompiler.schedule_strategies import mutated_schedules as mutated_schedules
from pdcompiler.schedule_strategies import named_schedules as named_schedules
from pdcompiler.strategies import Case as Case
from pdcompiler.strategies import Run as Run
from pdcompiler.strategies import cases as cases
from pdcompiler.strategies import features as features
from pdcompiler.strategies import microbatch_counts as microbatch_counts
from pdcompiler.strategies import partitions as partitions
from pdcompiler.strategies import random_models as random_models
from pdcompiler.strategies import row_counts as row_counts
from pdcompiler.strategies import schedules as schedules
from pdcompiler.strategies import specs as specs
from pdcompiler.strategies import training_runs as training_runs
from pdcompiler.workload_strategies import machines as machines
from pdcompiler.workload_strategies import trainings as trainings
from pdcompiler.workload_strategies import workloads as workloads


def assert_transparent(
    model: nn.Module,
    *args: Any,
    target: Any = None,
    loss_fn: LossFunction | None = None,
    world_size: int = 2,
    schedule: Any = "1f1b",
    microbatches: int = 4,
    partition: Any = None,
    tolerance: float = 1e-12,
    batch_dims: BatchDims | None = None,
    outputs: bool = True,
    **kwargs: Any,
) -> None:
    """Compile a copy of the model, take one step in this process, and compare everything with the plain loop, which draws from
    the same seeds."""
    import pdcompiler  # here, since the package may import this module

    sizes = split_rows(rows_of(model, args, kwargs, batch_dims), microbatches)
    expected = plain_step(
        model, args, kwargs, target=target, loss_fn=loss_fn, rows_of_microbatches=sizes, batch_dims=batch_dims,
        training=model.training, seeds=microbatch_seeds(0, 0, len(sizes)),
    )  # fmt: skip
    pipe: Any = pdcompiler.compile(
        copy.deepcopy(model), world_size, example_args=args, example_kwargs=kwargs, example_target=target, loss_fn=loss_fn,
        schedule=schedule, microbatches=microbatches, partition=partition,
        batch_dims=dims_by_name(model, batch_dims),
    )  # fmt: skip
    result = pipe.step(*args, target=target, outputs="all" if outputs else "none", **kwargs)
    assert_close_by_tensor(result.loss.detach(), expected.loss, tolerance, "loss")
    if outputs:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            whole = replica(model, model.training)(*detached(args), **detached(kwargs))
        assert_same(result.outputs, join_outputs(expected.outputs, whole, sizes), tolerance, "outputs")
    _assert_same_model(pipe, model, expected, tolerance)


def assert_shows(level: Any, text: str) -> None:
    """A level (Trace, Stage, Program, RankProgram, fx.Graph) prints as this text, whatever the text's indentation."""
    __tracebackhide__ = True
    actual, expected = show(level), textwrap.dedent(text).strip()
    if actual != expected:
        lines = difflib.unified_diff(expected.splitlines(), actual.splitlines(), "expected", "actual", lineterm="", n=2)
        raise AssertionError("\n".join(["the text differs", *lines, "", "actual:", actual]))


def _assert_same_model(pipe: Any, model: nn.Module, expected: Observed, tolerance: float) -> None:
    """Gradients, buffers and the untouched weights, all under the model's own names."""
    parameters, buffers, state = dict(pipe.named_parameters()), dict(pipe.named_buffers()), pipe.state_dict()
    assert_same_parts("parameters", sorted(expected.gradients), sorted(parameters))
    assert_same_parts("buffers", sorted(expected.buffers), sorted(buffers))
    assert_same_parts("state_dict", sorted(model.state_dict()), sorted(state))
    for name, gradient in expected.gradients.items():
        assert_close_by_tensor(parameters[name].grad, gradient, tolerance, f"gradient of {name}")
    for name, buffer in expected.buffers.items():
        assert_close_by_tensor(buffers[name], buffer, tolerance, f"buffer {name}")
    for name, value in model.state_dict().items():
        assert_close_by_tensor(state[name].detach(), expected.buffers.get(name, value), tolerance, f"state {name}")
