"""Cases 23, 24b to 25 and 27: buffers, Python state of the model, what a compile leaves behind, memory."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pdcompiler
from pdcompiler import CompileError
from pdcompiler.testing import assert_close_by_tensor, plain_step
from tests.cases.against_loop import EXACT, SCHEDULES, AgainstLoop, begins, drawn, layers, seeded

each_schedule = pytest.mark.parametrize("schedule", SCHEDULES)


def normed() -> nn.Sequential:
    """Four Linear, BatchNorm, Tanh, after a few plain forwards, so that its statistics are not the initial ones."""
    model: nn.Sequential = seeded(
        lambda: nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh()) for _ in range(4)])
    )
    for seed in range(3):
        model(drawn(6, 4, seed=seed))
    return model


@each_schedule
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_case_23_batchnorm_counts_microbatches(schedule: str, world_size: int) -> None:
    """A peer runs the model once on uninitialised memory, or updates statistics twice where a forward is run again."""
    model = normed()
    before = copy.deepcopy(dict(model.named_buffers()))
    checked = AgainstLoop(
        model, world_size, schedule, loss_fn=F.mse_loss, partition=begins(4, world_size),
        example_args=(drawn(8, 4),), example_target=drawn(8, 4),
    )  # fmt: skip
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name]), f"compile changed {name}"
    checked.step(drawn(8, 4), target=drawn(8, 4, seed=1))
    assert all(int(layer[1].num_batches_tracked) == 3 + 4 for layer in model)
    checked.step(drawn(10, 4, seed=2), target=drawn(10, 4, seed=3))


def test_case_23_evaluation_leaves_statistics_alone() -> None:
    """Evaluation uses the running statistics and counts nothing; a frozen part of the model (eval) counts nothing either."""
    model = normed()
    model[1].eval()
    checked = AgainstLoop(model, 2, loss_fn=F.mse_loss)
    checked.step(drawn(8, 4), target=drawn(8, 4, seed=1))
    assert [int(layer[1].num_batches_tracked) for layer in model] == [7, 3, 7, 7]
    checked.evaluate(drawn(5, 4, seed=2))
    assert [module.training for module in model] == [True, False, True, True]


class Counts(nn.Module):
    """Counts its calls in Python, keeps its last input, and a running total in a buffer that it reassigns."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("total", torch.zeros(4))
        self.calls = 0
        self.last: Tensor | None = None
        self.seen: list[Any] = []
        self.log: dict[str, list[int]] = {"rows": []}

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.last = x
        self.seen.append(x)
        self.log["rows"].append(len(self.seen))
        self.total = self.total + x.detach().sum(0)
        result: Tensor = self.outer(torch.tanh(self.inner(x))) + self.total
        return result


@each_schedule
def test_case_24c_reassigned_buffer_is_right_and_compile_leaves_no_trace(schedule: str) -> None:
    """A peer loses `self.buf = self.buf + 1`; a compile that runs forward leaves its own tensors in `self.last`."""
    model = seeded(Counts)
    buffer, attributes = model.total, set(vars(model))
    checked = AgainstLoop(
        model, 2, schedule, loss_fn=F.mse_loss, partition=["outer"], example_args=(drawn(8, 4),), example_target=drawn(8, 4)
    )

    def untouched() -> bool:
        python = model.calls == 0 and model.last is None and model.seen == [] and model.log == {"rows": []}
        return python and model.total is buffer and set(vars(model)) == attributes and not model._forward_hooks

    assert untouched() and torch.equal(buffer, torch.zeros_like(buffer))
    checked.step(drawn(8, 4), target=drawn(8, 4, seed=1))
    checked.step(drawn(7, 4, seed=2), target=drawn(7, 4, seed=3))
    assert untouched()
    assert_close_by_tensor(buffer, drawn(8, 4).sum(0) + drawn(7, 4, seed=2).sum(0), EXACT, "total")


def test_case_24c_buffer_replaced_by_another_shape_is_refused() -> None:
    """A cache that grows (`self.cache = cat([self.cache, x])`) can't be written back: refused by its name, not lost."""

    class Cache(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("cache", torch.zeros(1, 4))

        def forward(self, x: Tensor) -> Tensor:
            self.cache = torch.cat([self.cache, x.detach()])
            result: Tensor = self.linear(x) + self.cache.mean(0)
            return result

    model = seeded(Cache)
    with pytest.raises(CompileError, match=r"forward replaces buffer cache, \[1, 4\] torch.float64, by one of \[rows"):
        pdcompiler.compile(model, 2, loss_fn=F.mse_loss).step(drawn(8, 4), target=drawn(8, 4))
    assert model.cache.shape == (1, 4)


@pytest.mark.parametrize("kind", ["parameter", "attribute"])
def test_case_24c_tensors_that_forward_changes_unseen_are_refused(kind: str) -> None:
    """An in-place change of a parameter, or of a tensor that is no buffer, has no place in the program: refused by name."""

    class Changes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.plain = torch.zeros(4, dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            if kind == "attribute":
                self.plain.add_(1.0)
            else:
                with torch.no_grad():
                    self.linear.weight.clamp_(-0.1, 0.1)
            result: Tensor = self.linear(x) + self.plain
            return result

    model = seeded(Changes)
    weight = model.linear.weight.detach().clone()
    with pytest.raises(CompileError, match="linear.weight" if kind == "parameter" else "plain"):
        pdcompiler.compile(model, 2, loss_fn=F.mse_loss).step(drawn(8, 4), target=drawn(8, 4))
    assert torch.equal(model.linear.weight, weight) and torch.equal(model.plain, torch.zeros_like(model.plain))


def test_case_25_compile_twice_and_the_model_used_plainly() -> None:
    """A peer patches the model and recurses for ever. Two pipelines train the same weights; the model itself still works."""
    model = normed()
    names = [(module, dict(vars(module))) for module in model.modules()]
    x, y = drawn(8, 4), drawn(8, 4, seed=1)
    states = torch.get_rng_state()
    first = AgainstLoop(model, 2, "gpipe", loss_fn=F.mse_loss)
    second = AgainstLoop(model, 3, "1f1b", loss_fn=F.mse_loss, microbatches=2)
    for checked in (first, second, first, second):
        checked.step(x, target=y)
    assert torch.equal(torch.get_rng_state(), states)
    for module, attributes in names:
        assert vars(module).keys() == attributes.keys()
        assert all(vars(module)[key] is value for key, value in attributes.items()), "an attribute was replaced"
        assert module.forward.__func__ is type(module).forward
    plain = plain_step(model, (x,), {}, target=y, loss_fn=F.mse_loss, rows_of_microbatches=(8,))
    model.zero_grad()
    F.mse_loss(model(x), y).backward()
    for name, parameter in model.named_parameters():
        assert_close_by_tensor(parameter.grad, plain.gradients[name], EXACT, name)


@pytest.fixture
def no_gc() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def live_tensors() -> int:
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())


@each_schedule
@pytest.mark.parametrize("outputs", ["none", "all"])
def test_case_27_count_of_live_tensors_is_constant(schedule: str, outputs: str, no_gc: None) -> None:
    """Without the garbage collector: a cycle that holds activations shows as a growing count."""
    model = normed()
    pipe = pdcompiler.compile(model, 3, schedule=schedule, microbatches=4, loss_fn=F.mse_loss)
    optimizer = torch.optim.AdamW(pipe_parameters(pipe), lr=1e-3)
    x, y, counts = drawn(8, 4), drawn(8, 4, seed=1), []
    for _ in range(6):
        optimizer.zero_grad()
        pipe.step(x, target=y, outputs=outputs)
        optimizer.step()
        counts.append(live_tensors())
    assert len(set(counts[1:])) == 1, counts  # the first step compiles


def pipe_parameters(pipe: pdcompiler.Pipeline) -> list[nn.Parameter]:
    """Of a pipeline that is compiled at its first step: those of the model, all of which this process holds."""
    return list(pipe.request.model.parameters())


@each_schedule
def test_case_27_results_hold_no_graph_and_no_activation(schedule: str, no_gc: None) -> None:
    """A returned loss or output with a grad_fn keeps a step's activations alive for as long as the user keeps it."""
    pipe = pdcompiler.compile(layers(3), 3, schedule=schedule, loss_fn=F.mse_loss)
    for step in (lambda: pipe.step(drawn(8, 4), target=drawn(8, 4, seed=1), outputs="all"), lambda: pipe.eval_step(drawn(8, 4))):
        result = step()
        for tensor in (result.loss, result.outputs):
            assert tensor is None or (tensor.grad_fn is None and not tensor.requires_grad)
        before = live_tensors()
        held = [step() for _ in range(3)]
        assert live_tensors() - before <= 2 * len(held)  # the losses and the outputs themselves


@each_schedule
def test_case_27_open_receives_do_not_grow_with_microbatches(schedule: str) -> None:
    """A peer allocates a receive buffer for every microbatch; ours are bounded by what is in flight, plus one."""

    def most_open(microbatches: int) -> dict[str, int]:
        pipe = pdcompiler.compile(
            layers(4), 4, schedule=schedule, microbatches=microbatches, loss_fn=F.mse_loss, partition=["1", "2", "3"]
        )
        pipe.step(drawn(2 * microbatches, 4), target=drawn(2 * microbatches, 4))
        most: dict[str, int] = {}
        for module in pipe.ranks:
            open_: dict[str, int] = {}
            for node in module.graph.nodes:
                word = getattr(node.target, "__name__", "")
                if word in ("start_recv", "finish_recv"):
                    start: Any = node if word == "start_recv" else node.args[0]
                    channel = str(start.kwargs["channel"])
                    open_[channel] = open_.get(channel, 0) + (1 if word == "start_recv" else -1)
                    most[channel] = max(most.get(channel, 0), open_[channel])
            assert not any(open_.values()), "a receive is never finished"
        return most

    few, many = most_open(8), most_open(16)
    if schedule == "1f1b":  # gpipe itself keeps all microbatches in flight
        assert few == many and max(few.values()) <= 2 * 4
    assert max(few.values()) <= 8 + 1
