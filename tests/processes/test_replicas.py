"""Replicated stages on gloo: the gradients are the plain loop's on every replica; one stage is DistributedDataParallel."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pdcompiler
from pdcompiler.core import ops
from pdcompiler.core.batch import read_batch
from pdcompiler.core.machine import Machine
from pdcompiler.core.partition import Partition
from pdcompiler.testing import assert_close_by_tensor, plain_step, rows_of, split_rows
from pdcompiler.traces import Traces
from tests.levels import request
from tests.models import ZOO, Example
from tests.processes.pool import Group

pytestmark = pytest.mark.processes


def replicated_step(name: str, replicas: tuple[int, ...], schedule: str, pipelines: int = 1) -> list[str]:
    """One step of a zoo model, its stages cut by the planner; gives the parameters that this rank holds."""
    example = ZOO[name]()
    ranks = dist.get_world_size()
    cut = _stages(example, len(replicas))
    stages = tuple(dataclasses.replace(stage, replicas=count) for stage, count in zip(cut.stages, replicas, strict=True))
    pipe = pdcompiler.compile(
        example.model, ranks, partition=Partition(stages, cut.model, pipelines), schedule=schedule, microbatches=5,
        loss_fn=example.loss_fn,
    )  # fmt: skip
    expected = plain_step(
        example.model, example.args, example.kwargs, target=example.target, loss_fn=example.loss_fn,
        rows_of_microbatches=split_rows(rows_of(example.model, example.args, example.kwargs), 5), training=example.model.training,
    )  # fmt: skip
    result = pipe.step(*example.args, target=example.target, **example.kwargs)
    assert result.loss is not None
    assert_close_by_tensor(result.loss, expected.loss, example.tolerance, "loss")
    for parameter_name, parameter in pipe.named_parameters():
        gradient = expected.gradients[parameter_name]
        assert_close_by_tensor(parameter.grad, gradient, example.tolerance, f"gradient of {parameter_name}")
    return [parameter_name for parameter_name, _ in pipe.named_parameters()]


def _stages(example: Example, count: int) -> Partition:
    """The best cut with one rank a stage: planned as outside of the launched ranks, which are of another number."""
    model = copy.deepcopy(example.model)
    made = Traces(request(model, count, loss_fn=example.loss_fn))
    made.staged(read_batch(model, example.args, example.kwargs, example.target, None), [2], True)
    return made.fixed_partition()


@pytest.mark.parametrize(
    ("name", "replicas", "schedule"),
    [
        ("gpt2", (2, 1), "1f1b"),
        ("resnet", (2, 1, 1), "1f1b"),
        pytest.param("gpt2", (1, 2), "gpipe", marks=pytest.mark.full),
        pytest.param("unet", (3, 1), "1f1b", marks=pytest.mark.full),
        pytest.param("t5", (1, 3), "gpipe", marks=pytest.mark.full),
        pytest.param("gpt2", (2, 2), "1f1b", marks=pytest.mark.full),
        pytest.param("resnet", (1, 2, 1), "gpipe", marks=pytest.mark.full),
    ],
)
def test_replicas_are_exact(pool: Callable[[int], Group], name: str, replicas: tuple[int, ...], schedule: str) -> None:
    held = pool(sum(replicas)).run(replicated_step, name, replicas, schedule)
    assert held[0] == held[replicas[0] - 1]  # replicas of the first stage hold the same


@pytest.mark.full
def test_whole_pipelines_are_exact(pool: Callable[[int], Group]) -> None:
    held = pool(4).run(replicated_step, "gpt2", (1, 1), "1f1b", 2)
    assert held[0] == held[2] != held[1] == held[3]


def against_ddp() -> float:
    """A conv net with BatchNorm on all ranks, a microbatch each; gives the largest difference, relative to the tensor."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)
    )  # fmt: skip
    images, labels = torch.randn(4 * ranks, 3, 8, 8), torch.randint(5, (4 * ranks,))
    plain = DistributedDataParallel(copy.deepcopy(model))
    pipe = pdcompiler.compile(
        model, ranks, partition=[], replicas=(ranks,), microbatches=ranks, loss_fn=nn.functional.cross_entropy,
        machine=Machine.flat(latency_seconds=1e-9, bytes_per_second=1e9),  # a reduction for each gradient
    )  # fmt: skip
    ours = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    own = slice(4 * rank, 4 * rank + 4)
    for _ in range(3):
        pipe.zero_grad()
        pipe.step(images, target=labels)
        ours.step()
        theirs.zero_grad()
        nn.functional.cross_entropy(plain(images[own]), labels[own]).backward()
        theirs.step()
    words = [str(node.target) if node.op == "call_module" else node.target for node in pipe.ranks[rank].graph.nodes]
    last_piece = max(place for place, word in enumerate(words) if "_piece" in str(word))
    assert words[:last_piece].count(ops.start_all_reduce) >= 2, "no gradients travel while the last backward runs"
    state, expected = pipe.state_dict(), plain.module.state_dict()
    if rank == 0:  # DistributedDataParallel gives the others rank 0's statistics at its next forward
        assert state.keys() == expected.keys()
    differences = [
        float((state[name] - value).abs().max() / value.abs().max().clamp(min=1e-3))
        for name, value in expected.items() if value.is_floating_point() and (rank == 0 or "running" not in name)
    ]  # fmt: skip
    return max(differences)


@pytest.mark.parametrize("ranks", [2, 4])
def test_one_stage_is_distributed_data_parallel(pool: Callable[[int], Group], ranks: int) -> None:
    assert max(pool(ranks).run(against_ddp)) <= 1e-6


def kept_gradients() -> bool:
    """Gradients that the user holds on to, and views of them, stay as they are in later steps; released memory is used again."""
    torch.manual_seed(0)
    model, rank = nn.Linear(5, 3), dist.get_rank()
    pipe = pdcompiler.compile(model, 2, partition=[], replicas=(2,), microbatches=2, loss_fn=nn.functional.mse_loss)
    batches = [(torch.randn(6, 5), torch.randn(6, 3)) for _ in range(10)]
    held: list[tuple[torch.Tensor, torch.Tensor]] = []
    places = []
    for data, target in batches:
        pipe.step(data, target=target)
        grad = model.weight.grad
        assert grad is not None
        if len(held) < 2:
            held.append((grad[1:], grad[1:].clone()))
        places.append(grad.data_ptr())
        del grad
        pipe.zero_grad()
    assert all(torch.equal(view, copied) for view, copied in held), f"rank {rank}: a gradient changed after its step"
    return len(set(places)) < len(places)  # not always the next step's: a sum that is just done may be held by gloo for a moment


def test_gradients_that_a_user_keeps_stay_as_they_are(pool: Callable[[int], Group]) -> None:
    assert pool(2).run(kept_gradients) == [True, True]
