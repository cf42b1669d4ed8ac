"""Cases 13 to 16: any number of rows, lengths that change, which inputs are split, masks and numbers of rows."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pdcompiler
from pdcompiler import CompileError
from pdcompiler.testing import assert_close_by_tensor, plain_eval, plain_step
from tests.cases.against_loop import EXACT, SCHEDULES, AgainstLoop, begins, drawn, drawn_integers, layers, seeded
from tests.models import gpt2, token_loss

each_schedule = pytest.mark.parametrize("schedule", SCHEDULES)


@each_schedule
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_case_13_seven_rows_in_four_microbatches(schedule: str, world_size: int) -> None:
    """A peer pads or drops rows: 8 output rows of which the last is stale memory, or gradients of another mean."""
    checked = AgainstLoop(layers(4), world_size, schedule, loss_fn=F.mse_loss, partition=begins(4, world_size))
    x, y = drawn(7, 4), drawn(7, 4, seed=1)
    assert checked.step(x, target=y).outputs.shape == (7, 4)
    checked.full_batch_gradients(x, target=y)
    assert checked.evaluate(x).shape == (7, 4)


@each_schedule
def test_case_14_full_batch_then_smaller_and_back(schedule: str) -> None:
    """A peer returns stale rows after a smaller batch; the last batch of an epoch, fewer rows than microbatches, one row."""
    checked = AgainstLoop(layers(3), 3, schedule, loss_fn=F.mse_loss, partition=["1", "2"])
    for number, rows in enumerate([8, 5, 8, 3, 1, 2, 8]):
        x, y = drawn(rows, 4, seed=number), drawn(rows, 4, seed=50 + number)
        checked.step(x, target=y)
        checked.full_batch_gradients(x, target=y)
        checked.evaluate(x)


@each_schedule
@pytest.mark.parametrize("rows", [1, 6])
def test_case_14_one_microbatch(schedule: str, rows: int) -> None:
    """One microbatch leaves nothing to overlap and nothing to accumulate."""
    checked = AgainstLoop(layers(3), 2, schedule, microbatches=1, loss_fn=F.mse_loss)
    checked.step(drawn(rows, 4), target=drawn(rows, 4, seed=1))


class Tokens(nn.Module):
    """An embedding tied to the head, positions, and a mean over what came before."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.positions = nn.Embedding(16, 6)
        self.mix = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1])
        hidden = self.embed(ids) + self.positions(places)
        hidden = hidden + torch.tanh(self.mix(hidden.cumsum(1) / (places + 1)[None, :, None]))
        result: Tensor = self.head(hidden)
        return result


@each_schedule
def test_case_15_lengths_change_between_training_and_evaluation(schedule: str) -> None:
    """Train 8x5, evaluate 3x9, train 8x7: a peer keeps receive buffers of the first shape."""
    checked = AgainstLoop(seeded(Tokens), 2, schedule, loss_fn=token_loss, partition=["mix"])
    first, second = drawn_integers(11, 8, 5), drawn_integers(11, 8, 7, seed=1)
    checked.step(first, target=first)
    owners = checked.pipe.partition
    checked.evaluate(drawn_integers(11, 3, 9, seed=2))
    checked.step(second, target=second)
    checked.step(first, target=first)
    assert checked.pipe.partition is owners


@pytest.mark.full
def test_case_15_lengths_change_on_gpt2() -> None:
    """The same on Hugging Face's GPT-2, whose mask and positions are made from the length."""
    example = gpt2()
    checked = AgainstLoop(example.model, 3, tolerance=1e-6)
    for training, rows, length in [(True, 8, 5), (False, 3, 9), (True, 8, 7)]:
        ids = drawn_integers(100, rows, length, seed=length)
        if training:
            checked.step(input_ids=ids, labels=ids)
        else:
            checked.evaluate(input_ids=ids)


class SequenceFirst(nn.Module):
    """Takes [S,B,D], positions [3,B,S] and a mask [S,S]; attends within a row and gives [S,B,D]."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.value, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        placed = x + positions.sum(0).T.unsqueeze(-1)
        scores = torch.einsum("sbd,tbd->bst", self.query(placed), placed) + mask
        mixed = torch.einsum("bst,tbd->sbd", scores.softmax(-1), self.value(x))
        result: Tensor = self.out(mixed)
        return result


SEQUENCE_FIRST = {"x": 1, "positions": 1, "mask": None, "target": 1}


@pytest.mark.parametrize(("schedule", "rows"), [("gpipe", 1), ("1f1b", 5), ("gpipe", 6)])
def test_case_15b_sequence_first_is_split_as_said(schedule: str, rows: int) -> None:
    """Sequence-first inputs, [3,B,S] positions, a [S,S] mask with S equal to B: a peer splits dimension 0 of all."""
    where = {"batch_dims": SEQUENCE_FIRST, "partition": ["value", "out"]}
    checked = AgainstLoop(seeded(SequenceFirst), 3, schedule, loss_fn=F.mse_loss, **where)
    x, positions, mask = drawn(5, rows, 4), drawn(3, rows, 5, seed=1), drawn(5, 5, seed=2)
    target = drawn(5, rows, 4, seed=3)
    assert checked.step(x, positions, mask, target=target).outputs.shape == (5, rows, 4)
    checked.full_batch_gradients(x, positions, mask, target=target)
    checked.evaluate(x, positions, mask)


class Masked(nn.Module):
    """Attention over [B,S,D] with a mask that is added to the scores."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.value, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        scores = self.query(x) @ x.mT + mask
        result: Tensor = self.out(scores.softmax(-1) @ self.value(x))
        return result


@pytest.mark.parametrize("microbatches", [2, 4])
def test_case_15b_square_mask_as_long_as_the_batch_is_refused(microbatches: int) -> None:
    """A [S,S] mask where S equals B: splitting it is silently wrong as soon as a microbatch has one row (it broadcasts)."""
    model, x = seeded(Masked), drawn(4, 4, 4)
    pipe = pdcompiler.compile(model, 2, loss_fn=F.mse_loss, microbatches=microbatches)
    with pytest.raises(CompileError, match=r"batch_dims.*mask \[4, 4\]"):
        pipe.step(x, drawn(4, 4, seed=1), target=x)
    checked = AgainstLoop(model, 2, loss_fn=F.mse_loss, microbatches=microbatches, batch_dims={"mask": None})
    checked.step(x, drawn(4, 4, seed=1), target=x)


def test_case_15b_a_target_that_is_not_split_is_refused() -> None:
    """Sequence-first inputs without batch_dims: every label would meet a chunk of time instead of its row."""

    class LastStep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.head(torch.tanh(self.inner(x)).mean(0))
            return result

    x, labels = drawn(5, 8, 4), drawn_integers(3, 8)
    pipe = pdcompiler.compile(seeded(LastStep), 2, loss_fn=F.cross_entropy)
    with pytest.raises(CompileError, match=r"target \[8\]") as caught:
        pipe.step(x, target=labels)
    assert "batch_dims" in str(caught.value) and "x [5, 8, 4]" in str(caught.value)
    checked = AgainstLoop(seeded(LastStep), 2, loss_fn=F.cross_entropy, batch_dims={"x": 1, "target": 0})
    checked.step(x, target=labels)


def test_case_15b_a_batch_of_one() -> None:
    """With one row every leading 1 looks like the rows: positions [1,S,D] and a mask [1,1,S] are broadcast ones."""
    checked = AgainstLoop(seeded(Masked), 2, loss_fn=F.mse_loss)
    for rows in (1, 4, 1):
        x = drawn(rows, 3, 4, seed=rows)
        checked.step(x, drawn(1, 3, 3, seed=1), target=x)
        checked.evaluate(x, drawn(1, 3, 3, seed=1))


def test_case_15c_loss_of_each_row_is_refused() -> None:
    """A loss of shape [B] has no gradient of its own: a peer sums or averages as it likes."""
    pipe = pdcompiler.compile(layers(2), 2, loss_fn=lambda out, target: ((out - target) ** 2).mean(1))
    with pytest.raises(CompileError, match=r"the loss has shape \[rows\], a training step needs one number") as caught:
        pipe.step(drawn(8, 4), target=drawn(8, 4))
    assert "try: return its mean or sum" in str(caught.value)


@each_schedule
def test_case_15c_microbatch_whose_targets_are_all_ignored(schedule: str) -> None:
    """Its loss is NaN and its weight 0: the others must give the full batch's gradient, and nothing may become NaN."""
    model, ids = seeded(Tokens), drawn_integers(11, 8, 5)
    target = drawn_integers(11, 8, 5, seed=1)
    target[2:4] = -100
    target[0, 1:] = -100
    valid = [float((target[i : i + 2] != -100).sum()) for i in range(0, 8, 2)]
    assert valid[1] == 0 and math.isnan(token_loss(torch.zeros(2, 5, 11), target[2:4]))
    checked = AgainstLoop(model, 2, schedule, loss_fn=token_loss, loss_weight=lambda part: (part["target"] != -100).sum())
    result = checked.step(ids, target=target, weights=[count / sum(valid) for count in valid])
    assert result.loss is not None and math.isfinite(result.loss)
    checked.full_batch_gradients(ids, target=target)


@each_schedule
def test_case_15c_all_frozen_model(schedule: str) -> None:
    """A model without any trainable parameter has a loss and no gradient; a step is forward only."""
    model = layers(3)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    checked = AgainstLoop(model, 3, schedule, loss_fn=F.mse_loss)
    checked.step(drawn(7, 4), target=drawn(7, 4, seed=1))
    assert all(parameter.grad is None for parameter in checked.pipe.parameters())


@each_schedule
@pytest.mark.parametrize("per_row", [True, False])
def test_case_16_float_mask_of_the_rows_or_of_all(schedule: str, per_row: bool) -> None:
    """A mask [B,1,S,S] that differs per row goes with its rows; one of [1,1,S,S] goes whole to each microbatch."""
    checked = AgainstLoop(seeded(Masked), 2, schedule, loss_fn=F.mse_loss, partition=["value"])
    x = drawn(7, 1, 3, 4)
    mask = drawn(7 if per_row else 1, 1, 3, 3, seed=2)
    checked.step(x, mask, target=drawn(7, 1, 3, 4, seed=1))
    checked.evaluate(x, mask)


class ComputesWithRows(nn.Module):
    """Python numbers made of the input's shape: in a view, an arange, a scale and a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        rows, length = x.shape[0], x.shape[1]
        flat = torch.tanh(self.first(x.view(rows * length, 4)))
        order = torch.arange(rows * length).view(rows, length, 1) % 3
        hidden = flat.view(rows, length, -1) * (order + 1) / rows
        result: Tensor = self.second(hidden).reshape(rows, -1) * (rows + 2 * length - 1)
        return result


@each_schedule
def test_case_16_numbers_computed_from_the_shape(schedule: str) -> None:
    """A peer bakes in the numbers of microbatch 0: with 7 rows in 4 microbatches they are 2 and 1."""
    checked = AgainstLoop(seeded(ComputesWithRows), 2, schedule, loss_fn=F.mse_loss, partition=["second"])
    for rows in (7, 8, 3):
        checked.step(drawn(rows, 3, 4, seed=rows), target=drawn(rows, 12, seed=1))
    sizes = [2, 2, 2, 1]
    x, y = drawn(7, 3, 4, seed=7), drawn(7, 12, seed=1)
    expected = plain_step(checked.model, (x,), {}, target=y, loss_fn=F.mse_loss, rows_of_microbatches=sizes)
    assert not torch.allclose(expected.outputs[3], plain_eval(checked.model, (x,), {})[6:])  # the numbers do matter
    assert_close_by_tensor(checked.pipe.step(x, target=y).loss, expected.loss, EXACT, "loss")
