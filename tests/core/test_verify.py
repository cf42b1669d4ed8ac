"""Each rule of each level: what breaks it is refused, by name."""

import dataclasses
import operator
from typing import Any

import pytest
import torch
from torch import fx, nn

from pdcompiler.core import ops
from pdcompiler.core.errors import DeadlockError, VerifyError
from pdcompiler.core.ir import Function, Program, RankProgram, Staged, Trace, ValueType, describe
from pdcompiler.core.verify import verify_program, verify_staged, verify_trace
from pdcompiler.core.verify_ranks import verify_ranks
from tests.levels import FLOATS, Writer, trace_of, two_layers_staged

# Traces


@pytest.fixture
def trace() -> Trace:
    return trace_of(nn.Linear(4, 4), torch.zeros(2, 4), gradients=False)


def test_a_trace_whose_nodes_all_have_types_and_meanings_passes(trace: Trace) -> None:
    verify_trace(trace)


def test_a_placeholder_without_meaning(trace: Trace) -> None:
    del trace.inputs["weight"]
    with pytest.raises(VerifyError, match=r"^placeholder weight has no meaning$"):
        verify_trace(trace)


def test_an_operation_without_type(trace: Trace) -> None:
    node = next(node for node in trace.graph.nodes if node.op == "call_function")
    del node.meta["type"]
    with pytest.raises(VerifyError, match=rf"^operation {node.name} has no type$"):
        verify_trace(trace)


def test_more_outputs_than_meanings(trace: Trace) -> None:
    trace.outputs = ()
    with pytest.raises(VerifyError, match=r"^1 outputs with 0 meanings$"):
        verify_trace(trace)


# Stages


@pytest.fixture(scope="module")
def staged() -> Staged:
    return two_layers_staged()


def test_stages_that_give_before_they_take_pass(staged: Staged) -> None:
    verify_staged(staged)


def test_a_forward_that_takes_what_nothing_gives(staged: Staged) -> None:
    first, last = staged.stages
    with pytest.raises(VerifyError, match=r"^stage 1's forward takes \['tanh'\], which nothing before it gives$"):
        verify_staged(dataclasses.replace(staged, stages=(last, first)))


def test_a_backward_that_takes_what_nothing_gives(staged: Staged) -> None:
    first, last = staged.stages
    without = dataclasses.replace(last, backward=None)
    with pytest.raises(VerifyError, match=r"^stage 0's backward takes \['d_second_mm'\], which nothing before it gives$"):
        verify_staged(dataclasses.replace(staged, stages=(first, without)))


def with_forward(staged: Staged, takes: tuple[str, ...], gives: tuple[str, ...], graph: fx.Graph) -> Staged:
    function = Function(fx.GraphModule({}, graph), takes, gives)
    first = dataclasses.replace(staged.stages[0], forward=function, backward=None)
    return dataclasses.replace(staged, stages=(first,))


def test_placeholders_that_are_not_what_is_taken(staged: Staged) -> None:
    graph = fx.Graph()
    graph.output((graph.placeholder("x"),))
    with pytest.raises(VerifyError, match=r"^stage 0's forward has placeholders \['x'\], takes \('x', 'weights'\)$"):
        verify_staged(with_forward(staged, ("x", "weights"), ("y",), graph))


@pytest.mark.parametrize("whole", ["weights", "buffers"])
def test_a_saved_value_that_shares_memory_with_a_weight_or_buffer(staged: Staged, whole: str) -> None:
    graph = fx.Graph()
    weight = graph.create_node("call_function", operator.getitem, (graph.placeholder(whole), 0), name="weight")
    view = graph.create_node("call_function", torch.ops.aten.t.default, (weight,), name="view")
    graph.output(((view,),))
    with pytest.raises(VerifyError, match=r"^stage 0 saves view, which shares memory with a parameter or buffer$"):
        verify_staged(with_forward(staged, (whole,), ("saved",), graph))


def test_a_saved_integer(staged: Staged) -> None:
    graph = fx.Graph()
    size = graph.create_node("call_function", operator.mul, (graph.placeholder("rows"), 2), name="size")
    size.meta["type"] = 4
    graph.output(((size,),))
    with pytest.raises(VerifyError, match=r"^stage 0 saves the integer size$"):
        verify_staged(with_forward(staged, ("rows",), ("saved",), graph))


# Programs


def crossing(*, by_transfer: bool) -> Program:
    """One value crosses by a transfer, or not; another always does."""
    writer = Writer()
    x = writer.input("x")
    h = writer.call(torch.relu, x, name="h")
    moved = writer.call(ops.transfer, h, rank=1, name="moved", to=1)
    y = writer.call(torch.neg, moved if by_transfer else h, rank=1, name="y")
    return writer.program({1: {"loss": y, "outputs": [[moved]]}})


def test_a_value_is_read_where_it_is() -> None:
    verify_program(crossing(by_transfer=True))
    with pytest.raises(VerifyError, match=r"^y on rank 1 reads h, which is on rank 0$"):
        verify_program(crossing(by_transfer=False))


def test_before_the_first_transfer_values_cross_freely() -> None:
    writer = Writer()
    y = writer.call(torch.neg, writer.call(torch.relu, writer.input("x"), name="h"), rank=1, name="y")
    verify_program(writer.program({1: {"loss": y}}))


def test_a_node_without_rank() -> None:
    program = crossing(by_transfer=True)
    next(node for node in program.graph.nodes if node.name == "y").meta.pop("rank")
    with pytest.raises(VerifyError, match=r"^node y has no rank$"):
        verify_program(program)


# Ranks: messages


def ranks(*programs: list[tuple[Any, dict[str, Any]]]) -> list[RankProgram]:
    """Rank programs of messages alone: (word, its arguments), where "m" is the microbatch. A finish is of the word before it."""
    made = []
    for rank, words in enumerate(programs):
        graph = fx.Graph()
        value = last = graph.placeholder("value")
        for word, given in words:
            options = {key: item for key, item in given.items() if key not in ("m", "type", "name")}
            finishes = word in (ops.finish_recv, ops.finish_all_reduce)
            args: tuple[Any, ...] = (value,) if word is ops.send else (last,) if finishes else ()
            if word in (ops.all_reduce, ops.start_all_reduce):
                part = graph.create_node("call_function", operator.getitem, (value, 0), name=given["name"])
                args = ((describe(part, rank=rank, type=FLOATS),),)
            last = graph.create_node("call_function", word, args, options)
            describe(last, rank=rank, stage=0, microbatch=given.get("m", 0), phase="F", type=given.get("type", FLOATS))
        graph.output({})
        made.append(RankProgram(rank, graph, nn.Module()))
    return made


def send(frm: int, to: int, **more: Any) -> tuple[Any, dict[str, Any]]:
    return ops.send, {"to": to, "channel": f"{frm}->{to}", **more}


def recv(frm: int, to: int, word: Any = ops.recv, **more: Any) -> tuple[Any, dict[str, Any]]:
    return word, {"frm": frm, "channel": f"{frm}->{to}", "shape": (4,), "dtype": torch.float32, **more}


def reduce(*over: int, name: str = "d_w") -> tuple[Any, dict[str, Any]]:
    return ops.all_reduce, {"ranks": over, "name": name}


def test_sends_and_receives_in_one_order_pass() -> None:
    verify_ranks(ranks([send(0, 1, m=0), recv(1, 0, m=0)], [recv(0, 1, m=0), send(1, 0, m=0)]))


def test_as_many_sends_as_receives() -> None:
    with pytest.raises(VerifyError, match=r"^channel 0->1: 2 sends meet 1 receives$"):
        verify_ranks(ranks([send(0, 1), send(0, 1)], [recv(0, 1)]))


@pytest.mark.parametrize("wrong", [{"type": ValueType((5,), torch.float32)}, {"type": ValueType((4,), torch.float64)}, {"m": 1}])
def test_a_send_meets_a_receive_of_the_same_shape_type_and_microbatch(wrong: dict[str, Any]) -> None:
    message = r"^channel 0->1, message 0: send\(value, to=1, channel='0->1'\) meets recv\(frm=0, channel='0->1', shape=\(4,\), "
    with pytest.raises(VerifyError, match=message):
        verify_ranks(ranks([send(0, 1, **wrong)], [recv(0, 1)]))


def test_reductions_of_the_same_ranks_are_of_the_same_values() -> None:
    verify_ranks(ranks([reduce(0, 1)], [reduce(0, 1)]))
    with pytest.raises(VerifyError, match=r"^reductions over ranks \(0, 1\): \['b: "):
        verify_ranks(ranks([reduce(0, 1, name="a")], [reduce(0, 1, name="b")]))


# Ranks: no rank waits for ever


def deadlock(*programs: list[tuple[Any, dict[str, Any]]]) -> list[str]:
    with pytest.raises(DeadlockError) as stuck:
        verify_ranks(ranks(*programs))
    title, *lines = str(stuck.value).splitlines()
    assert title == "the ranks' programs wait for each other:"
    return lines


def test_two_ranks_that_both_send_first() -> None:
    assert deadlock([send(0, 1), recv(1, 0)], [send(1, 0), recv(0, 1)]) == [
        "  rank 0 waits for rank 1 at send(value, to=1, channel='0->1')",
        "  rank 1 waits for rank 0 at send(value, to=0, channel='1->0')",
    ]


def test_two_ranks_that_both_receive_first() -> None:
    lines = deadlock([recv(1, 0), send(0, 1)], [recv(0, 1), send(1, 0)])
    assert [line.split(" at ")[0] for line in lines] == ["  rank 0 waits for rank 1", "  rank 1 waits for rank 0"]


def test_a_receive_that_is_started_early_lets_the_other_send() -> None:
    start, finish = recv(1, 0, ops.start_recv), (ops.finish_recv, {})
    verify_ranks(ranks([start, finish, send(0, 1)], [send(1, 0), recv(0, 1)]))
    lines = deadlock([start, finish, send(0, 1)], [recv(0, 1), send(1, 0)])
    assert lines[0].startswith("  rank 0 waits for rank 1 at finish_recv(")


def test_the_shortest_cycle_is_shown() -> None:
    """0, 1, 2 wait in a circle, 5 for 0, and 3 and 4 for each other."""
    lines = deadlock(
        [recv(1, 0), send(0, 2), send(0, 5)], [recv(2, 1), send(1, 0)], [recv(0, 2), send(2, 1)],
        [recv(4, 3), send(3, 4)], [recv(3, 4), send(4, 3)], [recv(0, 5)],
    )  # fmt: skip
    assert [line.split(" at ")[0] for line in lines] == ["  rank 3 waits for rank 4", "  rank 4 waits for rank 3"]


def test_a_reduction_that_is_started_early_lets_the_others_go_on() -> None:
    start, finish = (ops.start_all_reduce, reduce(0, 1)[1]), (ops.finish_all_reduce, {})
    verify_ranks(ranks([start, finish, recv(1, 0)], [start, finish, send(1, 0)]))
    verify_ranks(ranks([reduce(0, 1), recv(1, 0)], [start, finish, send(1, 0)]))
    lines = deadlock([start, finish, recv(1, 0)], [send(1, 0), start, finish])
    assert [line.split("(")[0] for line in lines] == [
        "  rank 0 waits for rank 1 at finish_all_reduce", "  rank 1 waits for rank 0 at send",
    ]  # fmt: skip


def test_ranks_that_wait_for_the_one_that_is_not_at_their_reduction() -> None:
    lines = deadlock([reduce(0, 1, 2), send(0, 2)], [reduce(0, 1, 2)], [recv(0, 2), reduce(0, 1, 2)])
    assert [line.split(" at ")[0] for line in lines] == ["  rank 0 waits for rank 2", "  rank 2 waits for rank 0"]
