"""The oracle is right: it is checked against full batches, autograd by hand, and faults that it must see."""

import copy
import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pdcompiler
from pdcompiler.random_model import Late, ModelSpec, RandomModel, Skip, Tie, batch_for
from pdcompiler.testing import (
    assert_close_by_tensor,
    assert_same,
    assert_transparent,
    join_outputs,
    plain_eval,
    plain_step,
    split_rows,
)

TIED = ModelSpec(
    blocks=("linear", "counter", "linear", "batchnorm", "gated"), skips=(Skip(0, 3, "concat"),),
    tie=Tie(0, 2, "parameter"), unused=1, frozen=(4,), late=Late(2, "mask"), output="dict", auxiliary=1, extras=(0,),
)  # fmt: skip


def observe(model: nn.Module, rows: int, **options: Any) -> Any:
    inputs = torch.randn(rows, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return plain_step(model, (inputs,), {}, target=inputs.tanh(), loss_fn=F.mse_loss, **options)


# The loop


@pytest.mark.parametrize("sizes", [(2, 2, 2, 2), (8,), (5, 3), (1, 6, 1)])
def test_a_loop_over_any_microbatches_is_the_full_batch_for_a_mean_loss(sizes: tuple[int, ...]) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)).double()
    inputs = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    observed = observe(model, 8, rows_of_microbatches=sizes)
    loss = F.mse_loss(model(inputs), inputs.tanh())
    loss.backward()  # type: ignore[no-untyped-call]
    assert_close_by_tensor(observed.loss, loss.detach(), 1e-12, "loss")
    for name, parameter in model.named_parameters():
        assert_close_by_tensor(observed.gradients[name], parameter.grad, 1e-12, name)


def test_weights_multiply_the_losses_and_weight_0_runs_forward_only() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double()
    both = observe(model, 4, rows_of_microbatches=(2, 2), weights=(1.0, 0.0))
    alone = observe(model, 4, rows_of_microbatches=(2, 2), weights=(2.0, 0.0))
    assert_close_by_tensor(alone.loss, 2 * both.loss, 1e-15, "loss")
    assert_close_by_tensor(alone.gradients["1.bias"], 2 * both.gradients["1.bias"], 1e-15, "1.bias")
    assert both.buffers["1.num_batches_tracked"] == 2
    assert len(both.outputs) == 2


def test_a_nan_loss_of_weight_0_contributes_nothing() -> None:
    model, inputs, target = nn.Linear(3, 3), torch.ones(4, 3), torch.tensor([1, 2, -100, -100])

    def loss(weights: tuple[float, float] | None) -> Tensor:
        return plain_step(
            model, (inputs,), {}, target=target, loss_fn=F.cross_entropy, rows_of_microbatches=(2, 2), weights=weights
        ).loss

    assert loss(None).isnan()
    assert loss((1.0, 0.0)).isfinite()


@pytest.mark.parametrize(
    ("rows", "microbatches", "sizes"), [(7, 4, (2, 2, 2, 1)), (8, 4, (2, 2, 2, 2)), (2, 4, (1, 1)), (5, 1, (5,))]
)
def test_rows_are_split_as_tensor_split_does(rows: int, microbatches: int, sizes: tuple[int, ...]) -> None:
    assert split_rows(rows, microbatches) == sizes
    assert [len(part) for part in torch.arange(rows).tensor_split(microbatches) if len(part)] == list(sizes)


def test_seven_rows_in_four_microbatches() -> None:
    observed = observe(nn.Linear(4, 4).double(), 7, rows_of_microbatches=split_rows(7, 4))
    assert [output.size(0) for output in observed.outputs] == [2, 2, 2, 1]


def test_the_callers_model_and_batch_are_untouched() -> None:
    model, batch = RandomModel(TIED), batch_for(TIED, 6)
    dict(model.named_parameters())["blocks.0.body.linear.weight"].grad = torch.ones(4, 4, dtype=torch.float64)
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    inputs = copy.deepcopy(batch.args)
    observed = plain_step(
        model, batch.args, batch.kwargs, target=batch.target, loss_fn=batch.loss_fn, rows_of_microbatches=(4, 2)
    )
    plain_eval(model, batch.args, batch.kwargs)
    assert_same(dict(model.state_dict()), dict(before), 0.0, "state")
    assert_same(batch.args, inputs, 0.0, "inputs")
    assert torch.equal(random, torch.get_rng_state())
    assert model.training and model.head.weight.grad is None
    assert "blocks.2.body.linear.weight" not in observed.gradients, "the copy's tie is broken"
    gradient = observed.gradients["blocks.0.body.linear.weight"]
    assert gradient is not None and not (gradient == 1).any(), "an earlier gradient was added to"
    assert observed.gradients["blocks.1.unused"] is None
    assert observed.gradients["blocks.4.body.linear.weight"] is None
    assert observed.buffers["blocks.1.body.count"] == 2


def test_nested_arguments_are_split_and_others_are_not() -> None:
    @dataclasses.dataclass
    class Pair:
        left: Tensor
        right: list[Tensor]

    class Model(nn.Module):
        def forward(self, pair: Pair, table: Tensor, first: Tensor, *, more: dict[str, Any]) -> dict[str, Any]:
            sizes = [len(pair.left), len(pair.right[0]), len(table), first.size(1), len(more["a"][0]), more["b"]]
            return {"sizes": sizes, "loss": pair.left.sum()}

    ones = torch.ones(4, 3)
    observed = plain_step(
        Model(), (Pair(ones, [ones]), ones, ones.T), {"more": {"a": (ones,), "b": 5}}, rows_of_microbatches=(3, 1),
        batch_dims={1: None, "first": 1},
    )  # fmt: skip
    assert [output["sizes"] for output in observed.outputs] == [[3, 3, 4, 3, 3, 5], [1, 1, 4, 1, 1, 5]]
    assert observed.loss == 3 / 4 * 9 + 1 / 4 * 3


def test_evaluation_uses_the_whole_batch_in_evaluation_mode() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5))
    inputs = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    assert_close_by_tensor(plain_eval(model, (inputs,), {}), inputs, 1e-4, "outputs")


def test_outputs_are_joined_by_rows_means_or_agreement() -> None:
    ones = torch.ones(3, 3)
    parts = [
        {"rows": ones[:2], "late": ones[:, :2], "mean": torch.tensor(1.0), "table": ones[0], "n": 4},
        {"rows": ones[:1] * 0, "late": ones[:, :1], "mean": torch.tensor(4.0), "table": ones[0], "n": 4},
    ]
    whole = {**parts[0], "rows": ones, "late": ones}
    joined = join_outputs(parts, whole, (2, 1))
    assert joined["rows"].tolist() == [[1.0] * 3, [1.0] * 3, [0.0] * 3]
    assert (
        joined["mean"] == 2.0 and joined["n"] == 4 and joined["table"].shape == (3,) and joined["late"].shape == (3, 3)
    )
    with pytest.raises(AssertionError, match=r"\['n'\]: .* over microbatches"):
        join_outputs([parts[0], {**parts[1], "n": 5}], whole, (2, 1))


# Transparency, with the plain loop in the compiler's place


class PlainPipeline:
    """What `compile` returns, as far as `assert_transparent` uses it; `wrong` may spoil it after the step."""

    def __init__(self, model: nn.Module, wrong: Any, **options: Any) -> None:
        self.model, self.wrong, self.options = model, wrong, options

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def step(self, *args: Any, target: Any, outputs: str, **kwargs: Any) -> Any:
        sizes = split_rows(len(args[0]), self.options["microbatches"])
        expected = plain_step(
            self.model, args, kwargs, target=target, loss_fn=self.options["loss_fn"], rows_of_microbatches=sizes
        )
        for name, parameter in self.model.named_parameters():
            parameter.grad = expected.gradients[name]
        for name, buffer in self.model.named_buffers():
            buffer.copy_(expected.buffers[name])
        whole = copy.deepcopy(self.model)(*args, **kwargs)
        result = SimpleNamespace(loss=expected.loss, outputs=join_outputs(expected.outputs, whole, sizes))
        with torch.no_grad():
            self.wrong(self, result)
        return result


def spoil_gradient(pipe: Any, result: Any) -> None:
    pipe.blocks[0].body.linear.weight.grad[1, 2] *= 1 + 1e-9


def forget_gradient(pipe: Any, result: Any) -> None:
    pipe.head.bias.grad = None


def count_once_more(pipe: Any, result: Any) -> None:
    pipe.blocks[1].body.count += 1


def swap_rows(pipe: Any, result: Any) -> None:
    result.outputs["extras"][0][:] = result.outputs["extras"][0].flip(0)


def step_the_weights(pipe: Any, result: Any) -> None:
    pipe.head.weight += 1e-6


def spoil_loss(pipe: Any, result: Any) -> None:
    result.loss += 1e-6


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda pipe, result: None, None),
        (spoil_gradient, r"gradient of blocks\.0\.body\.linear\.weight: .*\(1, 2\)"),
        (forget_gradient, r"gradient of head\.bias: None, expected float64\[4\]"),
        (count_once_more, r"buffer blocks\.1\.body\.count: .*: 5, expected 4"),
        (swap_rows, r"outputs\['extras'\]\[0\]: "),
        (step_the_weights, r"state head\.weight: "),
        (spoil_loss, "loss: "),
    ],
)
def test_transparency_holds_for_the_loop_itself_and_sees_each_fault(
    wrong: Any, message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compile_plainly(model: nn.Module, world_size: int, **options: Any) -> PlainPipeline:
        return PlainPipeline(model, wrong, **options)

    monkeypatch.setattr(pdcompiler, "compile", compile_plainly, raising=False)
    model, batch = RandomModel(TIED), batch_for(TIED, 7)
    before = copy.deepcopy(dict(model.state_dict()))

    def check() -> None:
        assert_transparent(model, *batch.args, target=batch.target, loss_fn=batch.loss_fn, **batch.kwargs)

    if message is None:
        check()
    else:
        with pytest.raises(AssertionError, match=message):
            check()
    assert_same(dict(model.state_dict()), before, 0.0, "state")
