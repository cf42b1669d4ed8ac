"""Each rank gets its own part of the program; a transfer becomes a send and a receive, a reduction one call on each rank."""

import operator

import torch
from torch import fx, nn

from pdcompiler.core import ops
from pdcompiler.core.schedule import Schedule
from pdcompiler.passes.program.insert_transfers import insert_transfers
from pdcompiler.passes.program.split_ranks import split_ranks
from pdcompiler.testing import assert_shows
from tests.levels import Writer, lowered, two_layers_staged


def test_the_docstrings_drawing() -> None:
    staged = two_layers_staged()
    program = insert_transfers(lowered(staged, Schedule.parse("F0\nF0"), outputs="last"))
    first, last = split_ranks(program)
    assert_shows(first, """
        x = input
        stage0_weights = weights(stage=0, rank=0)
        x_0 = microbatch(x, start=0, stop=2, dim=0)
        tanh_0 = stage0_forward(stage0_weights, x_0)[0]
        send(tanh_0, to=1, channel='0->1')
        weighted_loss_0 = recv(frm=1, channel='1->0', shape=(), dtype=float32)
        return {loss: weighted_loss_0}
    """)
    assert_shows(last, """
        target = input
        loss_weights = input
        tanh_0 = recv(frm=0, channel='0->1', shape=(2, 8), dtype=float32)
        stage1_weights = weights(stage=1, rank=1)
        target_0 = microbatch(target, start=0, stop=2, dim=0)
        loss_0, second_addmm_0 = stage1_forward(stage1_weights, tanh_0, target_0)
        loss_weight_0 = loss_weights[0]
        weighted_loss_0 = mul(loss_0, loss_weight_0)
        send(weighted_loss_0, to=0, channel='1->0')
        return {loss: weighted_loss_0, outputs: [[second_addmm_0]]}
    """)


def test_a_reduction_is_one_call_on_each_of_its_ranks_and_on_no_other() -> None:
    writer = Writer(3)
    x = writer.input("x")
    parts = [writer.call(torch.relu, x, rank=rank, name=f"part_{rank}") for rank in (0, 2)]
    sums = writer.call(ops.all_reduce, tuple(parts), name="d_w", type=None, ranks=(0, 2))
    own = {rank: writer.call(operator.getitem, sums, place, rank=rank, name="d_w") for place, rank in enumerate((0, 2))}
    ranks = split_ranks(writer.program({rank: {"reduced": {"w": value}} for rank, value in own.items()}))
    for rank in (0, 2):
        assert_shows(ranks[rank], f"""
            x = input
            part_{rank} = relu(x)
            d_w = all_reduce(part_{rank}, ranks=(0, 2))
            return {{reduced: {{w: d_w}}}}
        """)
    assert_shows(ranks[1], "return {}")


def test_each_rank_holds_the_functions_that_it_calls() -> None:
    writer = Writer()
    for stage in range(2):
        writer.root.add_module(f"stage{stage}_forward", fx.symbolic_trace(nn.ReLU()))
    h = writer.call("stage0_forward", writer.input("x"))
    y = writer.call("stage1_forward", h, rank=1)
    ranks = split_ranks(insert_transfers(writer.program({1: {"loss": y}})))
    assert [dict(rank.root.named_children()).keys() for rank in ranks] == [{"stage0_forward"}, {"stage1_forward"}]
