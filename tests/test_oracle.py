"""The oracle of asynchronous training: the paper's equations in closed form, plain torch where that is equal, what it refuses."""

import copy
import functools
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn
from torch.nn import functional as F

from pdcompiler import CompileError
from pdcompiler.asynchronous_strategies import OPTIMIZERS
from pdcompiler.testing import (
    AsynchronousCase,
    AsynchronousResult,
    asynchronous_cases,
    asynchronous_steps,
    largest_difference,
)
from tests.closed_forms import (
    RATE,
    Weights,
    half_squared,
    linear,
    minibatches,
    one_batch_behind,
    one_each,
    sgd,
    two_replicas_and_one,
)


def train(model: nn.Sequential, count: int, **options: Any) -> AsynchronousResult:
    options = {"optimizer": sgd, "loss_fn": half_squared} | options
    return asynchronous_steps(list(model), minibatches(count), model=model, **options)


# Versions


def test_each_forward_and_backward_is_on_the_defined_version() -> None:
    result = train(linear(2), 9, replicas=(2, 1))
    assert result.forward_versions == [[0, 0, 0, 0, 1, 1, 2, 2, 3], [0, 1, 2, 3, 4, 5, 6, 7, 8]]
    assert result.backward_versions == result.forward_versions
    assert result.live_versions == [2, 1] and [len(versions) for versions in result.weights] == [1 + 5, 1 + 9]


def test_after_a_drain_delays_begin_anew_and_versions_go_on() -> None:
    """2-1, drained after 5: the third round of stage 0 is a partial one."""
    result = train(linear(2), 9, replicas=(2, 1), drains=(5,))
    assert result.forward_versions == [[0, 0, 0, 0, 1, 3, 3, 3, 3], [0, 1, 2, 3, 4, 5, 6, 7, 8]]
    assert [len(versions) for versions in result.weights] == [1 + 3 + 2, 1 + 9]
    batches = train(linear(2), 8, semantics="2bw", batch=2, drains=(5,))
    assert batches.forward_versions == [[0, 0, 0, 0, 1, 3, 3, 3]] * 2


# Closed forms


def assert_weights(result: AsynchronousResult, expected: list[Weights], tolerance: float = 1e-12) -> None:
    for stage, (actual, versions) in enumerate(zip(result.weights, expected, strict=True)):
        for version, (weights, closed) in enumerate(zip(actual, versions, strict=True)):
            assert largest_difference(weights[f"{stage}.weight"], closed) <= tolerance, (stage, version)


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_stashing_in_closed_form(stages: int) -> None:
    """w(t+1) = w(t) - rate * gradient of f(w_1(t-n+1), w_2(t-n+2), ..., w_n(t))."""
    assert_weights(train(linear(stages), 12), one_each(list(reversed(range(stages))), 12))


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_vertical_sync_in_closed_form(stages: int) -> None:
    """w(t+1) = w(t) - rate * gradient of f(w_1(t-n+1), ..., w_n(t-n+1))."""
    assert_weights(train(linear(stages), 12, semantics="vertical-sync"), one_each([stages - 1] * stages, 12))


def test_2bw_in_closed_form() -> None:
    assert_weights(train(linear(3), 16, semantics="2bw", batch=4), one_batch_behind(3, batch=4, batches=4))
    replicated = train(linear(3), 16, semantics="2bw", batch=4, replicas=(1, 2, 1))
    assert_weights(replicated, one_batch_behind(3, batch=4, batches=4))


def test_replicas_in_closed_form() -> None:
    expected = two_replicas_and_one(rounds=6)
    assert_weights(train(linear(2), 12, replicas=(2, 1)), expected)
    scaled = train(linear(2), 12, replicas=(2, 1), scale_learning_rate=True)  # the later stage at half the rate
    before, after = expected[1][:2]
    assert largest_difference(scaled.weights[1][1]["1.weight"] - before, (after - before) / 2) <= 1e-12


# Where plain torch is the same


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("replicas", [1, 3])
def test_one_stage_is_plain_training_with_larger_batches(replicas: int, name: str) -> None:
    """Bitwise as accumulated over a round, to 1e-12 as one large batch. Depth is 0, so a drain only cuts a round short."""
    model, stream = case_model(1), minibatches(7 * replicas + 1)
    result = asynchronous_steps(
        [model], stream, replicas=(replicas,), drains=(3 * replicas + 1,), optimizer=OPTIMIZERS[name], loss_fn=F.mse_loss
    )
    rounds = [range(i, min(i + replicas, end)) for start, end in ((0, 3 * replicas + 1), (3 * replicas + 1, len(stream)))
              for i in range(start, end, replicas)]  # fmt: skip
    for tolerance in (0.0, 1e-12):
        plain = copy.deepcopy(model)
        optimizer = OPTIMIZERS[name](plain.parameters())
        for number, members in enumerate(rounds, start=1):
            optimizer.zero_grad()
            if tolerance:
                inputs, targets = (torch.cat(column) for column in zip(*[stream[t] for t in members], strict=True))
                F.mse_loss(plain(inputs), targets).backward()
            else:
                for t in members:
                    F.mse_loss(plain(stream[t][0]), stream[t][1]).backward()
                for parameter in plain.parameters():
                    assert parameter.grad is not None
                    parameter.grad /= len(members)
            optimizer.step()
            for key, parameter in plain.named_parameters():
                assert largest_difference(result.weights[0][number][f"0.{key}"], parameter) <= tolerance, (number, key)


def case_model(stages: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(stages)]).double()


@settings(max_examples=25)
@given(asynchronous_cases())
def test_without_steps_the_losses_are_the_models_own(case: AsynchronousCase) -> None:
    model = case.model()
    before = copy.deepcopy(model.state_dict())
    options = case.options() | {"optimizer": lambda weights: torch.optim.SGD(weights, lr=0.0), "replicas": None, "depths": None}
    if case.batch is not None:
        options["batch"] = max(case.batch, len(case.kinds))
    result = asynchronous_steps(list(model.stages), case.minibatches(), model=model, loss_fn=F.mse_loss, **options)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items()), "the caller's model"
    assert set(result.final_weights) == {name for name, _ in model.named_parameters()}
    for loss, (x, target) in zip(result.losses, case.minibatches(), strict=True):
        assert torch.equal(loss, F.mse_loss(model(x), target))
    assert all(torch.equal(result.buffers[name], buffer) for name, buffer in model.named_buffers())


def test_microbatches_count_by_their_weights() -> None:
    """A batch of 5 rows as 3 and 2, on two replicas: the full batch's gradient; the last batch is cut short."""
    model, (x, target) = case_model(1), minibatches(1, rows=5)[0]
    parts = [(x[:3], target[:3]), (x[3:], target[3:]), (x[:3], target[:3])]
    result = asynchronous_steps(
        [model], parts, replicas=(2,), semantics="2bw", batch=2, weights=(3, 2, 3), optimizer=sgd, loss_fn=F.mse_loss
    )
    for version, (inputs, targets) in enumerate([(x, target), parts[2]]):
        found = torch.autograd.grad(F.mse_loss(model(inputs), targets), list(model.parameters()))  # both at W(0)
        moved = zip(result.weights[0][version].values(), result.weights[0][version + 1].values(), found, strict=True)
        assert all(largest_difference(old - new, RATE * gradient) <= 1e-12 for old, new, gradient in moved)


def test_statistics_are_the_first_replicas() -> None:
    """Each replica's forwards move its own; after a drain all begin with the first one's."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double()
    still = functools.partial(torch.optim.SGD, lr=0.0)
    result = asynchronous_steps([model], minibatches(8), replicas=(2,), drains=(5,), optimizer=still, loss_fn=F.mse_loss)
    for t in (0, 2, 4, 5, 7):
        model(minibatches(8)[t][0])
    assert {name: int(value) for name, value in result.buffers.items() if value.dim() == 0} == {"0.1.num_batches_tracked": 5}
    assert all(torch.equal(result.buffers[f"0.{name}"], buffer) for name, buffer in model.named_buffers())


class Tracks(nn.Module):
    """Its outputs depend on its buffer, which is not even changed in place."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(4, dtype=torch.float64))

    def forward(self, hidden: Tensor) -> Tensor:
        self.mean = (self.mean + hidden.detach().mean(0)) / 2
        return hidden * self.mean


def test_after_a_drain_every_replica_has_the_first_ones_buffers() -> None:
    stream, model = minibatches(6), Tracks()
    result = asynchronous_steps([Tracks()], stream, replicas=(2,), drains=(4,), optimizer=sgd, loss_fn=F.mse_loss)
    for t in (0, 2):
        model(stream[t][0])
    assert torch.equal(result.losses[5], F.mse_loss(model(stream[5][0]), stream[5][1]))


def test_frozen_and_unused_parameters_have_no_gradient() -> None:
    """So weight decay does not touch them, as in plain torch; a stage of them alone still counts its updates."""
    model = case_model(3)
    model[1].requires_grad_(False)
    model[2].register_parameter("unused", nn.Parameter(torch.ones(1)))
    result = asynchronous_steps(list(model), minibatches(4), optimizer=OPTIMIZERS["momentum"], loss_fn=F.mse_loss, model=model)
    moved = {name for name, value in model.named_parameters() if not torch.equal(result.final_weights[name], value)}
    assert moved == {"0.0.weight", "0.0.bias", "2.0.weight", "2.0.bias"} and len(result.weights[1]) == 5
    bare = asynchronous_steps([nn.Linear(4, 4).double(), nn.Tanh()], minibatches(2), optimizer=sgd, loss_fn=F.mse_loss)
    assert bare.weights[1] == [{}, {}, {}]


# It can tell them apart


def test_other_semantics_and_depths_give_other_weights() -> None:
    """All start alike; at the end no two are equal, and neither is plain training."""
    model = case_model(3)
    variants: dict[str, dict[str, Any]] = {
        "stash": {}, "vertical sync": {"semantics": "vertical-sync"}, "deeper": {"depths": (3, 1, 0)},
        "2bw": {"semantics": "2bw", "batch": 2}, "2-1-1": {"replicas": (2, 1, 1)}, "drained": {"drains": (4,)},
    }  # fmt: skip
    ends = {name: train(model, 8, **options).final_weights["0.0.weight"] for name, options in variants.items()}
    plain = asynchronous_steps([model], minibatches(8), optimizer=sgd, loss_fn=half_squared).final_weights["0.0.0.weight"]
    found = [*ends.values(), plain]
    assert all(largest_difference(one, other) > 1e-4 for i, one in enumerate(found) for other in found[:i]), ends


# What is refused

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"replicas": (2, 1, 1), "depths": (3, 1, 0)}, "depth 3 of stage 0 is no multiple of its 2 replicas\n  try: (2, 1, 0)"),
    ({"depths": (1, 1, 0)}, "depth 1 of stage 0 must be greater than stage 1's, 1\n  try: (2, 1, 0)"),
    ({"depths": (3, 2, 1)}, "depth 1 of the last stage must be 0"),
    ({"depths": (1, 0)}, "2 depths for 3 stages"),
    ({"replicas": (1, 1)}, "replicas (1, 1) are of 2 stages, there are 3"),
    ({"replicas": (1, 0, 1)}, "replicas is (1, 0, 1), expected at least 1"),
    ({"semantics": "2bw", "batch": 1}, "a batch of 1 microbatches is less than the first stage's depth 2\n  try: batches of 2"),
    ({"semantics": "2bw"}, "semantics is '2bw' and batch is None"),
    ({"batch": 3}, "semantics is 'stash' and batch is 3"),
    ({"semantics": "flush"}, "semantics is 'flush'\n  try: stash"),
    ({"weights": (1, 1)}, "2 weights for 4 minibatches, 'stash'"),
    ({"drains": (2, 5)}, "a drain after 5 of 4 minibatches"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_bad_input(options: dict[str, Any], message: str) -> None:
    with pytest.raises(CompileError, match=re.escape(message)):
        train(linear(3), 4, **options)


def test_a_parameter_belongs_to_one_stage_of_the_model() -> None:
    model = linear(3)
    model[2].weight = model[0].weight
    with pytest.raises(CompileError, match=re.escape("0.weight is on stages 0 and 2, each of which has versions of its own")):
        train(model, 4)
    with pytest.raises(CompileError, match="weight of stage 0 is not in the model"):
        asynchronous_steps([nn.Linear(4, 4)], minibatches(1), optimizer=sgd, model=model)
