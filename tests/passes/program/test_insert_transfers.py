"""Every value that another rank reads crosses once to each such rank, right behind the call that made it."""

import operator

import torch

from pdcompiler.core import ops
from pdcompiler.passes.program.insert_transfers import insert_transfers
from pdcompiler.testing import assert_shows
from tests.levels import Writer


def test_the_docstrings_drawing() -> None:
    writer = Writer()
    h = writer.call(torch.relu, writer.input("x"), name="h")
    y = writer.call(torch.neg, h, rank=1, name="y")
    program = writer.program({1: {"loss": y}})
    assert_shows(program, """
        x = input
        h = relu(x)  # rank 0
        y = neg(h)  # rank 1
        return {}  # rank 0
        return {loss: y}  # rank 1
    """)
    assert_shows(insert_transfers(program), """
        x = input
        h = relu(x)  # rank 0
        h = transfer(h, to=1)  # rank 1
        y = neg(h)  # rank 1
        return {}  # rank 0
        return {loss: y}  # rank 1
    """)


def test_once_for_each_rank_however_many_read_it() -> None:
    writer = Writer(3)
    h = writer.call(torch.relu, writer.input("x"), name="h")
    a = writer.call(torch.neg, h, rank=2, name="a")
    b = writer.call(torch.add, h, a, rank=2, name="b")
    c = writer.call(torch.neg, h, rank=1, name="c")
    d = writer.call(torch.neg, h, rank=0, name="d")
    assert_shows(insert_transfers(writer.program({2: {"loss": b}, 1: {"loss": c}, 0: {"loss": d}})), """
        x = input
        h = relu(x)  # rank 0
        h = transfer(h, to=1)  # rank 1
        h = transfer(h, to=2)  # rank 2
        a = neg(h)  # rank 2
        b = add(h, a)  # rank 2
        c = neg(h)  # rank 1
        d = neg(h)  # rank 0
        return {loss: d}  # rank 0
        return {loss: c}  # rank 1
        return {loss: b}  # rank 2
    """)


def test_behind_all_results_of_the_call() -> None:
    writer = Writer()
    call = writer.call("stage0_forward", writer.input("x"))
    h = writer.call(operator.getitem, call, 0, name="h")
    mask = writer.call(operator.getitem, call, 1, name="mask")
    saved = writer.call(operator.getitem, call, 2, name="saved", type=None)
    y = writer.call("stage1_forward", h, mask, rank=1)
    assert_shows(insert_transfers(writer.program({1: {"loss": y}, 0: {"loss": saved}})), """
        x = input
        h, mask, saved = stage0_forward(x)  # rank 0
        h = transfer(h, to=1)  # rank 1
        mask = transfer(mask, to=1)  # rank 1
        stage1_forward_0 = stage1_forward(h, mask)  # rank 1
        return {loss: saved}  # rank 0
        return {loss: stage1_forward_0}  # rank 1
    """)


def test_what_only_results_need_goes_at_the_end() -> None:
    writer = Writer()
    loss = writer.call(torch.relu, writer.input("x"), rank=1, name="loss")
    other = writer.call(torch.neg, loss, rank=1, name="other")
    assert_shows(insert_transfers(writer.program({0: {"loss": loss}, 1: {"loss": loss, "outputs": [[other]]}})), """
        x = input
        loss = relu(x)  # rank 1
        other = neg(loss)  # rank 1
        loss = transfer(loss, to=0)  # rank 0
        return {loss: loss}  # rank 0
        return {loss: loss, outputs: [[other]]}  # rank 1
    """)


def test_inputs_and_the_parts_of_a_reduction_do_not_cross() -> None:
    writer = Writer()
    x = writer.input("x")
    parts = [writer.call(torch.relu, x, rank=rank, name="part") for rank in (0, 1)]
    sums = writer.call(ops.all_reduce, tuple(parts), name="sums", type=None, ranks=(0, 1))
    own = [writer.call(operator.getitem, sums, rank, rank=rank, name="own") for rank in (0, 1)]
    program = writer.program({rank: {"reduced": {"w": own[rank]}} for rank in (0, 1)})
    text = str(program)
    assert_shows(insert_transfers(program), text)
