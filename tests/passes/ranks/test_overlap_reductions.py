"""Reductions start as soon as their values are there, in their own order, and are finished where they stood."""

import operator

import pytest
import torch

from pdcompiler.core import ops
from pdcompiler.core.ir import RankProgram
from pdcompiler.core.verify_ranks import verify_ranks
from pdcompiler.passes.program.split_ranks import split_ranks
from pdcompiler.passes.ranks.overlap_reductions import overlap_reductions
from pdcompiler.testing import assert_shows
from tests.levels import Writer


def ranks(order: tuple[int, ...]) -> tuple[RankProgram, ...]:
    """On each of two ranks three pieces, and then a reduction of each one's value, in this order."""
    writer = Writer()
    x = writer.input("x")
    values = [[writer.call(f"piece{k}", x, rank=rank, name=f"g{k}") for k in range(3)] for rank in range(2)]
    results: dict[int, list[object]] = {0: [], 1: []}
    for k in order:
        given = tuple((own[k],) for own in values)
        sums = writer.call(ops.all_reduce, given, name=f"sums{k}", type=None, ranks=(0, 1))
        for rank in range(2):
            own = writer.call(operator.getitem, sums, rank, rank=rank, name="own")
            results[rank].append(writer.call(operator.getitem, own, 0, rank=rank, name=f"d{k}"))
    for k in range(3):
        writer.root.add_module(f"piece{k}", torch.nn.Tanh())
    return split_ranks(writer.program({rank: {"outputs": [found]} for rank, found in results.items()}))


def test_the_docstrings_drawing() -> None:
    programs = tuple(map(overlap_reductions, ranks((0, 1, 2))))
    verify_ranks(programs)
    for program in programs:
        assert_shows(program, """
            x = input
            piece0_0 = piece0(x)
            pending_sums0 = start_all_reduce((piece0_0,), ranks=(0, 1))
            piece1_0 = piece1(x)
            pending_sums1 = start_all_reduce((piece1_0,), ranks=(0, 1))
            piece2_0 = piece2(x)
            d0 = finish_all_reduce(pending_sums0)[0]
            d1 = finish_all_reduce(pending_sums1)[0]
            d2 = all_reduce((piece2_0,), ranks=(0, 1))[0]
            return {outputs: [[d0, d1, d2]]}
        """)


@pytest.mark.parametrize("order", [(2, 0, 1), (1, 2, 0), (0, 2, 1)])
def test_none_starts_before_one_that_stands_before_it(order: tuple[int, ...]) -> None:
    program = overlap_reductions(ranks(order)[0])
    verify_ranks([program, overlap_reductions(ranks(order)[1])])
    begun = [node.args[0][0].name for node in program.graph.nodes if node.target in (ops.start_all_reduce, ops.all_reduce)]  # type: ignore[index, union-attr]
    assert begun == [f"piece{k}_0" for k in order]


def test_a_reduction_of_what_is_made_last_is_left_alone() -> None:
    program = ranks((2, 1))[0]
    text = str(program)
    assert_shows(overlap_reductions(program), text)
