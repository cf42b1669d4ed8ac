"""The text of a level: a short line per node, with names that are apart on each rank."""

import operator
from typing import Any

import pytest
import torch
from torch import fx

from pdcompiler.core import ops
from pdcompiler.core.printer import show, show_node
from pdcompiler.core.schedule import Schedule
from pdcompiler.passes.program.insert_transfers import insert_transfers
from pdcompiler.passes.program.split_ranks import split_ranks
from pdcompiler.testing import assert_shows
from tests.levels import Writer, lowered, two_layers_staged

aten: Any = torch.ops.aten


def test_operations_are_named_without_namespace_and_arguments_without_prefix() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    cast = graph.call_function(aten._to_copy.default, (x,), {"dtype": torch.float64, "device": torch.device("cpu")})
    view = graph.call_function(aten.reshape.default, (cast, [2, -1]))
    graph.output((graph.call_function(operator.mul, (view, 0.5)), None, (x,)))
    assert_shows(graph, """
        x = input
        _to_copy_default = _to_copy(x, dtype=float64, device=cpu)
        reshape_default = reshape(_to_copy_default, [2, -1])
        mul = mul(reshape_default, 0.5)
        return mul, None, (x,)
    """)


def test_results_stand_in_their_calls_line_only_where_nothing_else_reads_the_call() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    pair = graph.call_function(torch.chunk, (x, 3), name="pair")
    last = graph.call_function(operator.getitem, (pair, 2), name="last")
    whole = graph.call_function(torch.chunk, (x, 2), name="whole")
    first = graph.call_function(operator.getitem, (whole, 0), name="first")
    graph.output((last, first, graph.call_function(torch.cat, (whole,), name="again")))
    assert_shows(graph, """
        x = input
        last = chunk(x, 3)[2]
        whole = chunk(x, 2)
        first = whole[0]
        again = cat(whole)
        return last, first, again
    """)


def test_every_level_prints_itself() -> None:
    staged = two_layers_staged()
    program = insert_transfers(lowered(staged, Schedule.parse("F0\nF0"), outputs="last"))
    for level in (staged, staged.stages[0], program, split_ranks(program)[0]):
        assert str(level) == show(level) and "\n" in str(level)
    assert str(staged).count("forward: ") == str(staged).count("backward: ") == 2


def test_names_are_apart_on_each_rank() -> None:
    writer = Writer()
    x = writer.input("x")
    h = writer.call(torch.relu, x, name="h")
    h = writer.call(torch.relu, h, name="h")
    h = writer.call(ops.transfer, h, rank=1, name="h", to=1)
    assert_shows(writer.program({1: {"loss": writer.call(torch.relu, h, rank=1, name="x")}}), """
        x = input
        h = relu(x)  # rank 0
        h_1 = relu(h)  # rank 0
        h = transfer(h_1, to=1)  # rank 1
        x_1 = relu(h)  # rank 1
        return {}  # rank 0
        return {loss: x_1}  # rank 1
    """)


def test_one_node_for_a_message() -> None:
    graph = fx.Graph()
    sent = graph.call_function(ops.send, (graph.placeholder("h"),), {"to": 1, "channel": "0->1"})
    assert show_node(sent) == "send(h, to=1, channel='0->1')"


def test_assert_shows_says_what_differs() -> None:
    graph = fx.Graph()
    graph.output((graph.placeholder("x"),))
    with pytest.raises(AssertionError, match=r"(?s)^the text differs.*-x = inputs\n\+x = input\n"):
        assert_shows(graph, "x = inputs\nreturn x")
