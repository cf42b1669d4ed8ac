"""Replicated stages under schedules with a flush: the gradients are plain PyTorch's, whatever the replicas."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import pdcompiler
from pdcompiler import traces
from pdcompiler.core.errors import CompileError
from pdcompiler.core.ir import ModuleCall
from pdcompiler.core.partition import Partition, StagePlan
from pdcompiler.passes.schedules.named import replicated as schedule_of
from pdcompiler.testing import assert_close_by_tensor, plain_step, split_rows
from tests.cases.against_loop import drawn, seeded
from tests.cases.every_cut import TracedOnce
from tests.models import ZOO, Example

EXACT = 1e-12
COUNTS = [
    replicas for stages in (1, 2, 3) for replicas in itertools.product((1, 2, 3, 4), repeat=stages) if stages < sum(replicas) <= 4
]


def stages_of(example: Example, stages: int) -> Partition:
    """The best cut with one rank a stage."""
    pipe = pdcompiler.compile(
        copy.deepcopy(example.model), stages, example_args=example.args, example_kwargs=example.kwargs,
        example_target=example.target, loss_fn=example.loss_fn,
    )  # fmt: skip
    return pipe.partition


def replicated(partition: Partition, replicas: Sequence[int], pipelines: int = 1) -> Partition:
    pairs = zip(partition.stages, replicas, strict=True)
    stages = tuple(dataclasses.replace(stage, replicas=count) for stage, count in pairs)
    return Partition(stages, partition.model, pipelines)


def check(example: Example, partition: Partition, schedule: str, microbatches: int) -> None:
    """One step in this process: loss and every gradient; and the buffers are those of the first replicas' microbatches."""
    model = copy.deepcopy(example.model)
    pipe: Any = pdcompiler.compile(
        model, partition.devices, example_args=example.args, example_kwargs=example.kwargs, example_target=example.target,
        loss_fn=example.loss_fn, schedule=schedule, microbatches=microbatches, partition=partition,
    )  # fmt: skip
    rows = next(iter((*example.args, *example.kwargs.values()))).shape[0]
    expected = plain_step(
        example.model, example.args, example.kwargs, target=example.target, loss_fn=example.loss_fn,
        rows_of_microbatches=split_rows(rows, microbatches), training=example.model.training,
    )  # fmt: skip
    result = pipe.step(*example.args, target=example.target, **example.kwargs)
    tolerance = max(EXACT, example.tolerance)
    assert_close_by_tensor(result.loss, expected.loss, tolerance, "loss")
    gradients = {name: parameter.grad for name, parameter in pipe.named_parameters()}
    assert gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        assert_close_by_tensor(gradients[name], gradient, tolerance, f"gradient of {name}")


def check_all(name: str, plans: Iterable[tuple[tuple[int, ...], int, str]]) -> None:
    """plans: replicas, pipelines, schedule. The model is traced once."""
    example = ZOO[name]()
    with mock.patch.object(traces, "trace_model", TracedOnce()):
        partitions: dict[int, Partition] = {}
        for replicas, pipelines, schedule in plans:
            if len(replicas) not in partitions:
                partitions[len(replicas)] = stages_of(example, len(replicas))
            check(example, replicated(partitions[len(replicas)], replicas, pipelines), schedule, 5)


@pytest.mark.parametrize("name", ["resnet"])
def test_a_sample_of_the_replicas_is_exact(name: str) -> None:
    check_all(name, [((3,), 1, "gpipe"), ((2, 1), 1, "1f1b"), ((1, 1), 2, "1f1b")])


@pytest.mark.full
@pytest.mark.parametrize("name", ["gpt2", "resnet", "unet", "t5"])
def test_all_replicas_up_to_four_ranks_are_exact(name: str) -> None:
    check_all(name, [(counts, 1, schedule) for counts in COUNTS for schedule in ("gpipe", "1f1b")])


class Normalised(nn.Module):
    """A BatchNorm between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(torch.tanh(self.norm(self.first(x)))).mean()
        return result


@pytest.mark.parametrize(("replicas", "seen"), [((1, 1), (0, 1, 2, 3, 4)), ((2, 1), (0, 2, 4)), ((3, 1), (0, 3))])
def test_statistics_are_those_of_the_first_replicas_microbatches(replicas: tuple[int, int], seen: Sequence[int]) -> None:
    """As DistributedDataParallel's are rank 0's. The others get them after the step."""
    model, x = seeded(Normalised).double(), drawn(10, 4).double()
    plain = copy.deepcopy(model)
    for microbatch in seen:
        plain(x[2 * microbatch : 2 * microbatch + 2])
    pipe: Any = pdcompiler.compile(
        model, sum(replicas), example_args=(x,), partition=["last"], replicas=replicas, microbatches=5
    )  # fmt: skip
    pipe.step(x)
    for name, buffer in plain.named_buffers():
        assert_close_by_tensor(dict(pipe.named_buffers())[name], buffer, EXACT, name)


def test_a_batch_with_fewer_rows_than_replicas_leaves_some_idle() -> None:
    model, x = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))).double(), drawn(8, 4).double()
    plain = copy.deepcopy(model)
    pipe: Any = pdcompiler.compile(
        model, 4, partition=["2"], replicas=(3, 1), microbatches=6, loss_fn=lambda y, target: (y * target).mean()
    )  # fmt: skip
    for rows in (8, 2, 1, 7):
        target = drawn(rows, 1, seed=rows).double()
        pipe.step(x[:rows], target=target)
        (plain(x[:rows]) * target).mean().backward()
        for name, parameter in plain.named_parameters():
            assert_close_by_tensor(dict(pipe.named_parameters())[name].grad, parameter.grad, EXACT, f"{name}, {rows} rows")


def test_outputs_are_joined_in_the_batchs_order() -> None:
    model, x = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))).double(), drawn(7, 4).double()
    pipe: Any = pdcompiler.compile(model, 5, partition=["2"], replicas=(2, 3), microbatches=4, loss_fn=lambda y, _: y.sum())
    expected = model(x)
    for result in (pipe.step(x, target=x, outputs="all"), pipe.step(x, target=x, outputs="last"), pipe.eval_step(x, target=x)):
        assert_close_by_tensor(result.outputs, expected, EXACT, "outputs")


def test_verify_speaks_of_replicated_stages_too() -> None:
    model, x = seeded(Normalised).double(), drawn(10, 4).double()
    pipe: Any = pdcompiler.compile(model, 3, partition=["norm"], replicas=(2, 1), microbatches=4)
    assert len(pipe.verify(x).differences) > 5


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "replicas for other stages": (
        {"partition": ["last"], "replicas": (2, 1, 1)}, "replicas are for 3 stages, the partition has 2 stages",
    ),
    "replicas for another number of ranks": (
        {"partition": ["last"], "replicas": (2, 1)},
        "the partition has 2 stages on 3 ranks, world_size is 4\n  try: world_size=3",
    ),
    "no numbers": (
        {"partition": ["last"], "replicas": (0, 4)}, "replicas is (0, 4), expected one number of at least 1 for each stage",
    ),
    "replicas of unknown stages": (
        {"replicas": (2, 2)},
        "replicas are given, but not what they are replicas of\n"
        "  try: partition: the module paths at which stages begin\n  try: a Partition from pdcompiler plan",
    ),
    "more replicas than microbatches": (
        {"partition": ["last"], "replicas": (3, 1), "microbatches": 2},
        "microbatches is 2, but a stage has 3 replicas: some would have nothing to do\n"
        "  try: microbatches=3 or more\n  try: fewer replicas",
    ),
    "a schedule for other replicas": (
        {"partition": ["last"], "replicas": (3, 1), "schedule": schedule_of("1f1b", (2, 2), 4)},
        "the schedule has 2 ranks for stage 0, the partition has 3 replicas: rank 1, position 0: F1@0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_together_is_refused(case: str) -> None:
    options, message = REFUSED[case]
    with pytest.raises(CompileError) as caught:
        pdcompiler.compile(Normalised(), 4, **options)
    assert str(caught.value) == message


def test_recompute_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    stages = (StagePlan(("0.weight", "0.bias"), (ModuleCall("0"),), recompute=True),)
    with pytest.raises(CompileError, match=r"^the partition has stages that recompute their forward; these can be planned, not"):
        pdcompiler.compile(model, 1, partition=Partition(stages))
