"""Every model of the zoo trains in plain PyTorch: without that, a failure to compile it would mean nothing."""

import pytest
import torch

from pdcompiler.testing import plain_eval, plain_step, rows_of, split_rows
from tests.models import ROWS, ZOO

# A softmax does not change when all its inputs grow alike, so that the bias of attention's keys has no gradient.
ONLY_ROUNDING = ("key.bias", "k_proj.bias")

pytestmark = pytest.mark.parametrize("name", ZOO)


def test_a_model_has_a_finite_loss_and_a_gradient_for_every_parameter(name: str) -> None:
    example = ZOO[name]()
    assert example.name == name
    assert rows_of(example.model, example.args, example.kwargs) == ROWS
    observed = plain_step(
        example.model, example.args, example.kwargs, target=example.target, loss_fn=example.loss_fn,
        rows_of_microbatches=split_rows(ROWS, 3),
    )  # fmt: skip
    assert torch.isfinite(observed.loss)
    for parameter, weight in example.model.named_parameters():
        gradient = observed.gradients[parameter]
        if not weight.requires_grad:
            assert gradient is None, parameter
            continue
        assert gradient is not None and torch.isfinite(gradient).all(), parameter
        if not parameter.endswith(ONLY_ROUNDING):
            assert gradient.abs().max() > 1e-9, parameter


def test_a_model_is_the_same_each_time_and_draws_nothing(name: str) -> None:
    before = torch.get_rng_state()
    first, second = ZOO[name](), ZOO[name]()
    assert torch.equal(before, torch.get_rng_state())
    state = second.model.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in first.model.state_dict().items())


def test_a_model_evaluates_one_row(name: str) -> None:
    example = ZOO[name]()
    part = {key: value[:1] for key, value in example.kwargs.items()}
    assert plain_eval(example.model, [value[:1] for value in example.args], part) is not None
