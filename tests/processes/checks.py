"""What the cases of several files check on each rank: a step of a pipeline against the plain loop, for what this rank holds."""

import copy
import dataclasses
import functools
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

import pdcompiler
from pdcompiler import Pipeline, Schedule, StepResult, traces
from pdcompiler.compiler import Request
from pdcompiler.core.batch import Batch
from pdcompiler.core.ir import Trace
from pdcompiler.core.random_ops import microbatch_seeds
from pdcompiler.testing import Observed, assert_close_by_tensor, assert_same, join_outputs, plain_step, rows_of, split_rows
from pdcompiler.traces import Traces
from tests.cases.every_cut import TracedOnce
from tests.models import ZOO, Example

names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
"""Of the models of the zoo that were compiled in this process."""


class ZooTraces(TracedOnce):
    """Of all models of the zoo: the one trace of a signature serves all cases of a process. Others are traced as ever."""

    def __call__(self, request: Request, batch: Batch, **options: Any) -> Trace:
        if request.model not in names:
            return self.trace_model(request, batch, **options)
        signature = Traces(request).signature(batch, options["gradients"])
        return self.kept((names[request.model], signature, *options.items()), request, batch, **options)


@functools.cache
def share_traces() -> None:
    """From now on, for as long as this process lives."""
    mock.patch.object(traces, "trace_model", ZooTraces()).start()


def compile_example(example: Example, **options: Any) -> Pipeline:
    """The example compiled for the ranks that there are; 4 microbatches unless told otherwise."""
    share_traces()
    if example.name in ZOO:
        names[example.model] = example.name
    options = {"microbatches": 4, "loss_fn": example.loss_fn} | options
    return pdcompiler.compile(example.model, dist.get_world_size(), **options)


def first_rows(example: Example, rows: int) -> Example:
    """The example with a smaller batch."""
    part = [value[:rows] for value in example.args], {name: value[:rows] for name, value in example.kwargs.items()}
    target = None if example.target is None else example.target[:rows]
    return dataclasses.replace(example, args=tuple(part[0]), kwargs=part[1], target=target)


def check_step(pipe: Pipeline, example: Example, outputs: str = "all") -> StepResult:
    """One step from zero gradients: loss, outputs, this rank's gradients and buffers are those of the plain loop."""
    rows = rows_of(example.model, example.args, example.kwargs)
    sizes = split_rows(rows, pipe.schedule.microbatches)
    expected = plain_step(
        example.model, example.args, example.kwargs, target=example.target, loss_fn=example.loss_fn,
        rows_of_microbatches=sizes, training=example.model.training, seeds=microbatch_seeds(0, pipe.steps, len(sizes)),
    )  # fmt: skip
    whole = whole_outputs(example)
    example.model.zero_grad(set_to_none=True)
    result = pipe.step(*example.args, target=example.target, outputs=outputs, **example.kwargs)
    assert result.loss is not None
    assert_close_by_tensor(result.loss, expected.loss, example.tolerance, "loss")
    assert isinstance(pipe.schedule, Schedule)
    last = pipe.schedule.replicas[pipe.schedule.stages - 1]
    if outputs == "all" or (outputs == "last" and dist.get_rank() in last):
        assert_same(result.outputs, join_outputs(expected.outputs, whole, sizes), example.tolerance, "outputs")
    else:
        assert result.outputs is None
    check_gradients(pipe, expected, example.tolerance)
    check_buffers(pipe, expected, example.tolerance)
    return result


def whole_outputs(example: Example) -> Any:
    """The model's outputs for the whole batch at once, in its own mode."""
    with torch.no_grad():
        return copy.deepcopy(example.model)(*example.args, **example.kwargs)


def check_gradients(pipe: Pipeline, expected: Observed, tolerance: float) -> None:
    """Of every parameter that this rank holds, and it holds those of its stages."""
    assert isinstance(pipe.schedule, Schedule)
    own = [stage for stage, ranks in pipe.schedule.replicas.items() if dist.get_rank() in ranks]
    names = {name for stage in own for name in pipe.partition.stages[stage].parameters}
    held = dict(pipe.named_parameters())
    assert sorted(held) == sorted(names)
    for name, parameter in held.items():
        assert_close_by_tensor(parameter.grad, expected.gradients[name], tolerance, f"gradient of {name}")


def check_buffers(pipe: Pipeline, expected: Observed, tolerance: float) -> None:
    """Every buffer that this rank gives away as its own is the plain loop's; all ranks together give all of them."""
    state = pipe.state_dict()
    given = [name for name in expected.buffers if name in state]
    for name in given:
        assert_close_by_tensor(state[name], expected.buffers[name], tolerance, f"buffer {name}")
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, given)
    persistent = [name for name in expected.buffers if name in pipe.request.model.state_dict()]
    assert sorted(set().union(*everywhere)) == sorted(persistent)
