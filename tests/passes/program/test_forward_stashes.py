"""What a program puts by and takes back itself needs neither; what goes on to later programs stays."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from pdcompiler.core import ops
from pdcompiler.core.errors import VerifyError
from pdcompiler.core.ir import Program
from pdcompiler.core.verify import verify_program
from pdcompiler.passes.program.forward_stashes import forward_stashes
from pdcompiler.testing import assert_shows
from tests.levels import Writer


def keyed(node: fx.Node, minibatch: int) -> fx.Node:
    node.kwargs = {"kind": "saved", "stage": 0, "minibatch": minibatch, "rank": 0}
    return node


def program() -> Program:
    """One value that stays in the program, one that goes to a later one, one that comes from an earlier one."""
    writer = Writer(1)
    x = writer.input("x")
    for minibatch, operation in enumerate((torch.relu, torch.neg)):
        value = writer.call(operation, x, name=f"saved_{minibatch}")
        keyed(writer.call(ops.stash, value, name="stash"), minibatch)
    results = []
    for minibatch in (0, -1):
        taken = keyed(writer.call(ops.restore, name=f"taken{minibatch + 1}"), minibatch)
        results.append(writer.call(torch.abs, taken, name=f"y{minibatch + 1}"))
    return writer.program({0: {"losses": results}})


def test_the_docstrings_drawing() -> None:
    assert_shows(forward_stashes(program()), """
        x = input
        saved_0 = relu(x)  # rank 0
        saved_1 = neg(x)  # rank 0
        stash(saved_1, kind='saved', stage=0, minibatch=1, rank=0)  # rank 0
        y1 = abs(saved_0)  # rank 0
        taken0 = restore(kind='saved', stage=0, minibatch=-1, rank=0)  # rank 0
        y0 = abs(taken0)  # rank 0
        return {losses: [y1, y0]}  # rank 0
    """)


def test_a_key_that_stands_twice_is_refused() -> None:
    twice = program()
    for node in twice.graph.nodes:
        if node.target is ops.stash:
            node.kwargs = {**node.kwargs, "minibatch": 1}
    with pytest.raises(VerifyError, match=r"stash of .* stands twice"):
        verify_program(twice)
