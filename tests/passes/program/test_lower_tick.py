"""One tick as a program: what is put by and taken back, gradients of a round, buffers at the end of a drain."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pdcompiler.core import ops
from pdcompiler.core.ir import Microbatch, Program, Staged
from pdcompiler.core.tick_text import tick_text
from pdcompiler.core.ticks import Ticks, pipedream_depths
from pdcompiler.passes.program.forward_stashes import forward_stashes
from pdcompiler.passes.program.lower_tick import lower_tick
from pdcompiler.testing import assert_shows
from tests.levels import staged_of, two_layers_staged


def tick(staged: Staged, replicas: tuple[int, ...], number: int, minibatches: int | None = None, **options: Any) -> Program:
    """Tick `number` of a stream, with 2 rows in each minibatch."""
    ticks = Ticks(replicas, pipedream_depths(replicas), **options)
    text = tick_text(ticks, number, minibatches)
    plan = Microbatch(0, 2, staged)
    first = [sum(replicas[:stage]) for stage in range(len(replicas))]
    ranks = {stage: tuple(range(first[stage], first[stage] + count)) for stage, count in enumerate(replicas)}
    dims = {name: 0 for stage in staged.stages for name in stage.batch.values()}
    return lower_tick(text, dict.fromkeys(text.minibatches, plan), staged, dims, ranks)


def test_a_tick_in_steady_state() -> None:
    """The first stage's backward reads its input and no weights, so none are kept."""
    assert_shows(forward_stashes(tick(two_layers_staged(), (1, 1), 3)), """
        x = input
        target = input
        loss_weights = input
        stage0_weights = weights(stage=0, rank=0)  # rank 0
        x_0 = microbatch(x, start=0, stop=2, dim=0)  # rank 0
        tanh_0, saved_0 = stage0_forward(stage0_weights, x_0)  # rank 0
        stash(saved_0, kind='saved', stage=0, minibatch=0, rank=0)  # rank 0
        stash(x_0, kind='x', stage=0, minibatch=0, rank=0)  # rank 0
        saved_1 = restore(kind='saved', stage=0, minibatch=-1, rank=0)  # rank 0
        d_second_mm_1 = restore(kind='d_second_mm', stage=0, minibatch=-1, rank=0)  # rank 0
        x_1 = restore(kind='x', stage=0, minibatch=-1, rank=0)  # rank 0
        gradients_1 = stage0_backward(saved_1, d_second_mm_1, x_1)[0]  # rank 0
        update(stage0_weights, gradients_1, stage=0, rank=0, keep=False)  # rank 0
        stage1_weights = weights(stage=1, rank=1)  # rank 1
        target_0 = microbatch(target, start=0, stop=2, dim=0)  # rank 1
        loss_0, _, saved_0 = stage1_forward(stage1_weights, tanh_0, target_0)  # rank 1
        loss_weight_0 = loss_weights[0]  # rank 1
        stash(loss_0, kind='loss', stage=1, minibatch=0, rank=0)  # rank 0
        stash(loss_0, kind='loss', stage=1, minibatch=0, rank=1)  # rank 1
        d_second_mm_0, gradients_0 = stage1_backward(stage1_weights, saved_0, loss_weight_0, target_0)  # rank 1
        stash(d_second_mm_0, kind='d_second_mm', stage=0, minibatch=0, rank=0)  # rank 0
        update(stage1_weights, gradients_0, stage=1, rank=1, keep=False)  # rank 1
        loss_1 = restore(kind='loss', stage=1, minibatch=-1, rank=0)  # rank 0
        loss_1 = restore(kind='loss', stage=1, minibatch=-1, rank=1)  # rank 1
        return {losses: [loss_1]}  # rank 0
        return {losses: [loss_1]}  # rank 1
    """)


class Norm(nn.Module):
    """Statistics, weights that backward reads, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.norm(x))
        return result


def normed() -> Staged:
    return staged_of(Norm(), ["head"], torch.zeros(2, 4), target=torch.zeros(2, 4), loss_fn=nn.functional.mse_loss)


def words(program: Program, word: Any, stage: int) -> list[Any]:
    return [node for node in program.graph.nodes if node.target is word and node.kwargs["stage"] == stage]


def test_weights_that_a_backward_to_come_reads_are_put_by_and_kept() -> None:
    program = forward_stashes(tick(normed(), (1, 1), 5))
    (update,) = words(program, ops.update, 0)
    assert update.kwargs["keep"] is True
    kinds = {node.kwargs["kind"] for node in words(program, ops.stash, 0)}
    assert "weights" in kinds and kinds == {node.kwargs["kind"] for node in words(program, ops.restore, 0)}
    (last,) = words(program, ops.update, 1)
    assert last.kwargs["keep"] is False and not words(program, ops.restore, 1)[0].kwargs["kind"].startswith("weights")


def test_a_round_of_replicas_is_reduced_and_every_one_of_them_updates() -> None:
    program = tick(normed(), (2, 1), 5)
    (reduction,) = [node for node in program.graph.nodes if node.target is ops.all_reduce]
    assert reduction.kwargs["ranks"] == (0, 1)
    assert [node.kwargs["rank"] for node in words(program, ops.update, 0)] == [0, 1]
    assert [node.kwargs["count"] for node in program.graph.nodes if node.target is ops.divide] == [2, 2]


def test_a_replica_without_a_share_in_the_last_round_updates_with_the_others_gradients() -> None:
    """Three minibatches on two replicas, drained: the last round has one."""
    program = tick(normed(), (2, 1), 4, 3)
    assert not [node for node in program.graph.nodes if node.target in (ops.all_reduce, ops.divide)]
    own, other = words(program, ops.update, 0)
    assert (own.kwargs["rank"], other.kwargs["rank"]) == (0, 1)


def test_a_drain_ends_with_the_first_replicas_buffers_for_all() -> None:
    last = tick(normed(), (2, 1), 4, 3)
    assert [node.kwargs["rank"] for node in words(last, ops.write_buffers, 0)] == [1]
    middle = tick(normed(), (2, 1), 3, 3)
    assert not words(middle, ops.write_buffers, 0)
