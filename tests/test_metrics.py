"""What `pipe.metrics()` says of the newest step. Who waits for whom is in tests/processes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pdcompiler
from pdcompiler import CompileError
from tests.cases.against_loop import drawn, drawn_integers, layers
from tests.models import ZOO


def test_it_tells_of_the_newest_step() -> None:
    pipe = pdcompiler.compile(layers(4, 6), 2, loss_fn=F.mse_loss, microbatches=2)
    with pytest.raises(CompileError, match="no training step was taken yet"):
        pipe.metrics()
    pipe.step(drawn(8, 6), target=drawn(8, 6, seed=1))
    pipe.step(drawn(6, 6), target=drawn(6, 6, seed=1))
    found = pipe.metrics()
    assert found.steps == 2 and found.seconds > 0 and found.rows == pytest.approx(6 / found.seconds)
    assert found.tokens is None and found.gradient_norm is None and found.waited == (0.0,)
    norm = pipe.clip_grad_norm_(0.1)
    assert pipe.metrics().gradient_norm == pytest.approx(float(norm))
    assert str(pipe.metrics()).startswith("step 2, ") and "gradient norm" in str(pipe.metrics())


def test_tokens_are_the_elements_of_the_first_integer_input() -> None:
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4)).double()
    pipe = pdcompiler.compile(model, 2, loss_fn=F.mse_loss, microbatches=2)
    pipe.step(drawn_integers(9, 4, 5), target=torch.zeros(4, 5, 4, dtype=torch.float64))
    found = pipe.metrics()
    assert found.tokens == pytest.approx(20 / found.seconds) and "tokens/s" in str(found)


def test_an_evaluation_is_no_training_step() -> None:
    example = ZOO["mlp"]()
    pipe = pdcompiler.compile(example.model, 2, loss_fn=example.loss_fn, microbatches=2)
    pipe.eval_step(*example.args)
    with pytest.raises(CompileError, match="no training step was taken yet"):
        pipe.metrics()
