"""The last backward of a replicated stage is cut by reductions: same numbers, and each piece is what its docstring draws."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pdcompiler
from pdcompiler import compiler
from pdcompiler.core import ops
from pdcompiler.core.ir import Program
from pdcompiler.core.machine import Machine
from pdcompiler.core.verify import verify_program
from pdcompiler.passes.program.insert_reductions import insert_reductions
from pdcompiler.passes.program.split_backward import split_backward
from pdcompiler.passes.schedules.named import gpipe, replicated
from pdcompiler.testing import assert_close_by_tensor
from tests.cases.against_loop import drawn, drawn_integers, layers, seeded
from tests.levels import lowered, staged_of

BOTH: dict[str, tuple[int, ...]] = {"w0": (0, 1), "w1": (0, 1)}


class TwoScales(nn.Module):
    """tanh(x * w0) * w1."""

    def __init__(self) -> None:
        super().__init__()
        self.w0, self.w1 = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return (torch.tanh(x * self.w0) * self.w1).sum()


def reduced(microbatches: int, bucket: float) -> Program:
    """TwoScales as one stage with two replicas."""
    program = lowered(staged_of(TwoScales(), [], torch.zeros(2, 4)), replicated("1f1b", (2,), microbatches))
    return insert_reductions(program, BOTH, bucket)


def lines(program: Program, rank: int, begin: str) -> list[str]:
    """A rank's lines, from the one that begins so on."""
    own = [line.removesuffix(f"  # rank {rank}") for line in str(program).splitlines() if line.endswith(f"# rank {rank}")]
    return own[next(k for k, line in enumerate(own) if line.startswith(begin)) :]


def test_the_gradient_that_is_made_first_is_reduced_first() -> None:
    program = reduced(3, bucket=16)
    assert lines(program, 1, "gradients_1") == [
        "gradients_1 = stage0_backward(stage0_weights, saved_1, loss_weight_1, 2, x_1)[0]",
        "d_w0 = gradients_1[0]",
        "d_w1 = gradients_1[1]",
        "d_w1_1 = sums[1][0]",
        "d_w0_1 = sums_2[1][0]",
        "return {loss: loss_1, gradients: {}, reduced: {w1: d_w1_1, w0: d_w0_1}}",
    ]
    after = split_backward(program)
    verify_program(after)
    assert lines(after, 1, "gradients_1")[:4] == [
        "gradients_1, rest = stage0_backward_piece0(stage0_weights, saved_1, loss_weight_1, 2)",
        "d_w1 = gradients_1[0]",
        "gradients_1_1 = stage0_backward_piece1(saved_1, x_1, rest)[0]",
        "d_w0 = gradients_1_1[0]",
    ]
    assert lines(after, 1, "return") == [
        "return {loss: loss_1, gradients: {}, reduced: {w1: d_w1_1, w0: d_w0_1}}"
    ]


def test_each_piece_adds_its_own_gradients_to_those_of_earlier_microbatches() -> None:
    assert lines(split_backward(reduced(3, bucket=16)), 0, "gradients_0") == [
        "gradients_0 = stage0_backward(stage0_weights, saved_0, loss_weight_0, 2, x_0)[0]",
        "x_2 = microbatch(x, start=4, stop=6, dim=0)",
        "loss_2, saved_2 = stage0_forward(stage0_weights, x_2)",
        "loss_weight_2 = loss_weights[2]",
        "weighted_loss_2 = mul(loss_2, loss_weight_2)",
        "loss = accumulate(weighted_loss_0, weighted_loss_2)",
        "gradients_2, rest = stage0_backward_piece0(stage0_weights, saved_2, loss_weight_2, 2)",
        "d_w1 = gradients_0[1]",
        "d_w1_1 = accumulate((d_w1,), gradients_2)[0]",
        "gradients_2_1 = stage0_backward_piece1(saved_2, x_2, rest)[0]",
        "d_w0 = gradients_0[0]",
        "d_w0_1 = accumulate((d_w0,), gradients_2_1)[0]",
        "loss_1 = accumulate(loss, weighted_loss_1)",
        "sums = all_reduce(((d_w1_1,), (d_w1,)), ranks=(0, 1))",
        "d_w1_2 = sums[0][0]",
        "sums_2 = all_reduce(((d_w0_1,), (d_w0,)), ranks=(0, 1))",
        "d_w0_2 = sums_2[0][0]",
        "return {loss: loss_1, gradients: {}, reduced: {w1: d_w1_2, w0: d_w0_2}}",
    ]


def test_one_reduction_leaves_the_backward_whole() -> None:
    program = reduced(3, bucket=1000)
    text = str(program)
    assert str(split_backward(program)) == text


def test_without_replicas_nothing_is_cut() -> None:
    program = insert_reductions(lowered(staged_of(TwoScales(), [], torch.zeros(2, 4)), gpipe(1, 2)), {}, 16)
    text = str(program)
    assert str(split_backward(program)) == text


class Tied(nn.Module):
    """An embedding that is the head's weight too, with a BatchNorm and two layers between."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.first, self.norm, self.second = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.norm(torch.tanh(self.first(self.embedding(ids))))
        result: Tensor = self.head(torch.tanh(self.second(hidden)))
        return result


@pytest.mark.parametrize(
    ("cuts", "replicas", "schedule"), [([], (2,), "gpipe"), (["norm"], (2, 1), "1f1b"), (["second"], (2, 3), "1f1b")]
)
def test_pieces_give_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, cuts: list[str], replicas: tuple[int, ...], schedule: str
) -> None:
    """As the whole backwards; and plain PyTorch's gradients are the same up to rounding."""
    model, ids, target = seeded(Tied).double(), drawn_integers(11, 14), drawn_integers(11, 14, seed=1)
    gradients: dict[bool, dict[str, Any]] = {}
    for split in (True, False):
        if not split:
            monkeypatch.setattr(compiler, "split_backward", lambda program: program)
        own = copy.deepcopy(model)
        pipe: Any = pdcompiler.compile(
            own, sum(replicas), partition=cuts, replicas=replicas, schedule=schedule, microbatches=5,
            loss_fn=nn.functional.cross_entropy, machine=small_buckets(),
        )  # fmt: skip
        for _ in range(2):
            pipe.step(ids, target=target)
        assert ("_piece1" in pipe.ranks[0].code) == split
        gradients[split] = {name: parameter.grad for name, parameter in own.named_parameters()}
    for name, gradient in gradients[True].items():
        assert torch.equal(gradient, gradients[False][name]), name
    for _ in range(2):
        for part, wanted in zip(ids.tensor_split(5), target.tensor_split(5), strict=True):
            (nn.functional.cross_entropy(model(part), wanted) * len(part) / len(ids)).backward()
    for name, parameter in model.named_parameters():
        assert_close_by_tensor(gradients[True][name], parameter.grad, 1e-12, name)


@pytest.mark.parametrize("replicas", [(2, 1), (2, 3)])
def test_pieces_give_the_same_weights_without_flushes(monkeypatch: pytest.MonkeyPatch, replicas: tuple[int, ...]) -> None:
    """The last replica's backward of each round is cut, and its sums may travel meanwhile; with rounds that end in the middle."""
    batches, weights = [drawn(4, 6, seed=seed) for seed in range(7)], []
    for split in (True, False):
        if not split:
            monkeypatch.setattr(compiler, "split_backward", lambda program: program)
        model = layers(4, 6)
        pipe: Any = pdcompiler.compile(
            model, sum(replicas), partition=["2"], replicas=replicas, schedule="pipedream", machine=small_buckets(),
            optimizer=lambda own: torch.optim.SGD(own, 0.1, momentum=0.9), loss_fn=lambda y, target: ((y - target) ** 2).mean(),
        )  # fmt: skip
        codes = set()
        for batch in batches:
            pipe.step(batch, target=batch)
            codes.add("_piece1" in "".join(rank.code for rank in pipe.ranks))
        pipe.drain()
        assert codes == {True, False} if split else codes == {False}
        weights.append([parameter.detach() for parameter in model.parameters()])
    for one, other in zip(*weights, strict=True):
        assert torch.equal(one, other)


def small_buckets() -> Machine:
    """A machine on which messages cost hardly any latency."""
    return Machine.flat(latency_seconds=1e-9, bytes_per_second=1e9)


def test_a_rank_starts_its_first_reduction_before_its_last_piece() -> None:
    pipe: Any = pdcompiler.compile(
        seeded(Tied), 2, partition=[], replicas=(2,), microbatches=2, loss_fn=nn.functional.cross_entropy,
        machine=small_buckets(), example_args=(drawn_integers(11, 14),), example_target=drawn_integers(11, 14),
    )  # fmt: skip
    for rank in pipe.ranks:
        nodes = list(rank.graph.nodes)
        starts = [place for place, node in enumerate(nodes) if node.target is ops.start_all_reduce]
        pieces = [place for place, node in enumerate(nodes) if "_piece" in str(node.target)]
        assert len(starts) >= 2 and starts[0] < pieces[-1] and len(pieces) >= 3
