"""A backward in two parts: each has its operations, together they give the same bits, and no more is kept than must be."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pdcompiler
from pdcompiler import traces
from pdcompiler.core.errors import CompileError
from pdcompiler.core.ir import BackwardParts, Staged
from pdcompiler.core.schedule import Schedule
from pdcompiler.core.verify import verify_staged
from pdcompiler.passes.stages.split_weight_gradients import split_weight_gradients
from pdcompiler.testing import assert_transparent
from tests.cases.against_loop import drawn, drawn_integers, seeded
from tests.cases.every_cut import TracedOnce
from tests.levels import TwoLayers, staged_of
from tests.models import ZOO

ROWS = 4


def split_stages(model: nn.Module, begins: list[str], *args: Any, **options: Any) -> Staged:
    staged = split_weight_gradients(staged_of(model, begins, *args, **options), ROWS)
    verify_staged(staged)
    return staged


def parts_of(staged: Staged, stage: int) -> BackwardParts:
    parts = staged.stages[stage].parts
    assert parts is not None
    return parts


def operations(parts: BackwardParts) -> tuple[list[str], list[str]]:
    """Of the two parts; what takes tuples apart is left out."""
    first, second = (
        [node.target._opname for node in function.module.graph.nodes if hasattr(node.target, "_opname")]  # type: ignore[union-attr]
        for function in (parts.input, parts.weight)
    )
    return first, second


def test_the_second_of_two_layers_falls_apart_and_the_first_does_not() -> None:
    staged = split_stages(TwoLayers(), ["second"], torch.zeros(2, 4), target=torch.zeros(2, 3), loss_fn=F.mse_loss)
    assert staged.stages[0].parts is None, "it gives no gradient of an input"
    parts = parts_of(staged, 1)
    assert parts.input.gives == ("d_second_mm", "kept") and parts.weight.gives == ("gradients",)
    assert parts.weight.takes == ("kept",)
    assert operations(parts) == (["mse_loss_backward", "mm"], ["t", "mm", "sum", "reshape"])
    assert parts.kept_bytes == ROWS * (8 + 3) * 4, "the activation that came in, and the gradient of what goes out"


class Normed(nn.Module):
    """An RMS norm written out between two layers, as Llama's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.scale, self.last = nn.Linear(8, 8), nn.Parameter(torch.ones(8)), nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        return torch.as_tensor(self.last(hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-6) * self.scale))


def test_a_sum_over_rows_is_made_early_where_that_keeps_less() -> None:
    """Of the scale's gradient: a vector in place of two activations."""
    model = nn.Sequential(nn.Linear(8, 8), Normed())
    parts = parts_of(split_stages(model, ["1"], torch.zeros(2, 8), loss_fn=lambda y, target: (y**2).sum()), 1)
    assert parts.kept_bytes < 0.9 * parts.plain_bytes
    first, second = operations(parts)
    assert "sum" in first and "mm" in second


def test_products_of_weights_stand_in_the_second_part() -> None:
    """Of a transformer's stage: as many of the backward's products are left for the weights as the stage has weight matrices."""
    example = ZOO["llama"]()
    del example.model.model.layers[2:]
    staged = split_stages(example.model, ["model.layers.1"], **example.kwargs)
    first, second = operations(parts_of(staged, 1))
    matrices = 7 + 1
    assert second.count("mm") == matrices
    assert first.count("mm") + second.count("mm") == 2 * matrices


def test_what_is_kept_is_no_weight() -> None:
    """A weight, or a view of it, is there in the second part too."""
    staged = split_stages(nn.Sequential(nn.Linear(8, 8), Normed()), ["1"], torch.zeros(2, 8), loss_fn=lambda y, t: y.sum())
    outputs: Any = parts_of(staged, 1).input.module.graph.output_node().args[0]
    kept = outputs[parts_of(staged, 1).input.gives.index("kept")]
    assert kept and not any("weight" in node.name for node in kept)


@pytest.mark.parametrize("name", [*(pytest.param(name, marks=pytest.mark.full) for name in ("gpt2", "t5")), "resnet", "unet"])
def test_both_parts_give_the_bits_of_the_whole(name: str) -> None:
    example = ZOO[name]()
    gradients = []
    with mock.patch.object(traces, "trace_model", TracedOnce()):
        for line in ("F0 F1 F2 B0 W0 B1 W1 B2 W2", "F0 F1 F2 B0 B1 B2"):
            own, schedule = copy.deepcopy(example.model), Schedule.parse(f"{line}\n{line}")
            pipe: Any = pdcompiler.compile(own, 2, schedule=schedule, loss_fn=example.loss_fn)
            pipe.step(*example.args, target=example.target, **example.kwargs)
            assert ("backward_weight" in pipe.ranks[1].code) == ("W" in line)
            gradients.append({key: parameter.grad for key, parameter in own.named_parameters()})
    for key, gradient in gradients[0].items():
        assert (gradient is None) == (gradients[1][key] is None), key
        assert gradient is None or torch.equal(gradient, gradients[1][key]), key


def test_a_microbatch_of_weight_0_has_no_second_part() -> None:
    """And one without rows neither: the schedule is for more of them than the batch has rows."""
    schedule = Schedule.parse("F0 F1 F2 B0 B1 B2 W0 W1 W2\nF0 B0 F1 B1 F2 B2 W2 W1 W0")
    model = seeded(TwoLayers).double()
    assert_transparent(
        model, drawn(2, 4), target=drawn_integers(3, 2), loss_fn=F.cross_entropy, schedule=schedule, microbatches=3,
        partition=["second"],
    )  # fmt: skip


def test_forwards_that_update_buffers_must_stand_in_order() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    schedule = Schedule.parse("F1 F0 B0 B1\nF1 F0 B0 B1")
    pipe: Any = pdcompiler.compile(model, 2, partition=["1"], schedule=schedule, loss_fn=F.mse_loss)
    told = r"rank 1 runs the forward of microbatch 1 before that of 0 on stage 1, whose forwards update 1\.running_mean"
    with pytest.raises(CompileError, match=told):
        pipe.step(torch.zeros(6, 4), target=torch.zeros(6, 4))
    pipe.eval().step(torch.zeros(6, 4), target=torch.zeros(6, 4))


def test_the_bytes_are_those_of_the_rows() -> None:
    staged = staged_of(TwoLayers(), ["second"], torch.zeros(2, 4), target=torch.zeros(2, 3), loss_fn=F.mse_loss)
    few, many = (parts_of(split_weight_gradients(dataclasses.replace(staged), rows), 1).kept_bytes for rows in (1, 10))
    assert many == 10 * few
