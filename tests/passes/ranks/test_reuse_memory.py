"""A total is added to in place where it is this program's own memory and nobody else reads it."""

import operator

import torch
from torch import fx

from pdcompiler.core import ops
from pdcompiler.core.ir import RankProgram
from pdcompiler.passes.program.split_ranks import split_ranks
from pdcompiler.passes.ranks.reuse_memory import reuse_memory
from pdcompiler.testing import assert_shows
from tests.levels import Writer


def sums(count: int, also_read: int | None = None) -> RankProgram:
    """The sum of `count` values; one of the partial sums is a result too."""
    writer = Writer(1)
    x = writer.input("x")
    total: fx.Node = writer.call(torch.relu, x, name="g0")
    totals = []
    for m in range(1, count):
        value = writer.call(torch.relu, x, name=f"g{m}")
        total = writer.call(ops.accumulate, total, value, name=f"t{m}")
        totals.append(total)
    extra = {} if also_read is None else {"loss": totals[also_read]}
    [program] = split_ranks(writer.program({0: {"gradients": {0: total}, **extra}}))
    return program


def test_the_first_sum_is_new_memory_and_the_others_use_it() -> None:
    assert_shows(reuse_memory(sums(4)), """
        x = input
        g0 = relu(x)
        g1 = relu(x)
        t1 = accumulate(g0, g1)
        g2 = relu(x)
        t2 = accumulate_in_place(t1, g2)
        g3 = relu(x)
        t3 = accumulate_in_place(t2, g3)
        return {gradients: {0: t3}}
    """)


def test_a_total_that_is_read_elsewhere_is_not_added_to() -> None:
    text = str(reuse_memory(sums(4, also_read=1)))
    assert "t2 = accumulate_in_place(t1, g2)" in text and "t3 = accumulate(t2, g3)" in text


def parts(items: tuple[int, ...], whole: bool = False) -> RankProgram:
    """A sum of tuples, then one of some of its items; perhaps the whole is a result too."""
    writer = Writer(1)
    x = writer.input("x")
    g0, g1, g2 = (writer.call(torch.chunk, x, 2, name=f"g{m}") for m in range(3))
    total = writer.call(ops.accumulate, g0, g1, name="t1")
    own = tuple(writer.call(operator.getitem, total, k, name=f"d{place}") for place, k in enumerate(items))
    last = writer.call(ops.accumulate, own, g2, name="t2")
    [program] = split_ranks(writer.program({0: {"gradients": {0: last}, **({"loss": total} if whole else {})}}))
    return program


def test_items_of_a_total_are_added_to_in_place_where_nothing_else_of_it_is_read() -> None:
    assert "t2 = accumulate_in_place((d0, d1), g2)" in str(reuse_memory(parts((1, 0))))
    assert "t2 = accumulate((d0, d1), g2)" in str(reuse_memory(parts((0, 0))))
    assert "t2 = accumulate((d0, d1), g2)" in str(reuse_memory(parts((1, 0), whole=True)))


def test_a_value_that_was_not_summed_here_is_not_added_to() -> None:
    text = str(reuse_memory(sums(2)))
    assert "in_place" not in text
