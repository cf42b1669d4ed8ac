"""Receives are started early, within the window and in the channel's order, and finished right before their first reader."""

import operator

import pytest
import torch
from torch import fx

from pdcompiler.core import ops
from pdcompiler.core.ir import RankProgram
from pdcompiler.core.verify_ranks import verify_ranks
from pdcompiler.passes.program.split_ranks import split_ranks
from pdcompiler.passes.ranks.overlap_transfers import overlap_transfers
from pdcompiler.testing import assert_shows
from tests.levels import Writer


def ranks(count: int) -> tuple[RankProgram, ...]:
    """Rank 0 sends a value for each microbatch, rank 1 reads each, two operations later."""
    writer = Writer()
    x = writer.input("x")
    results = []
    for m in range(count):
        value = writer.call(torch.relu, x, name=f"a{m}", microbatch=m)
        moved = writer.call(ops.transfer, value, rank=1, name=f"a{m}", microbatch=m, to=1)
        other = writer.call(torch.neg, x, rank=1, name=f"other{m}", microbatch=m)
        results.append(writer.call(torch.add, moved, other, rank=1, name=f"y{m}", microbatch=m))
    return split_ranks(writer.program({1: {"outputs": [results]}}))


def test_the_docstrings_drawing() -> None:
    receiver = ranks(3)[1]
    what = "frm=0, channel='0->1', shape=(4,), dtype=float32"
    assert_shows(receiver, f"""
        x = input
        a0 = recv({what})
        other0 = neg(x)
        y0 = add(a0, other0)
        a1 = recv({what})
        other1 = neg(x)
        y1 = add(a1, other1)
        a2 = recv({what})
        other2 = neg(x)
        y2 = add(a2, other2)
        return {{outputs: [[y0, y1, y2]]}}
    """)
    assert_shows(overlap_transfers(receiver, {"0->1": 2}), f"""
        x = input
        pending_a0 = start_recv({what})
        pending_a1 = start_recv({what})
        pending_a2 = start_recv({what})
        other0 = neg(x)
        a0 = finish_recv(pending_a0)
        y0 = add(a0, other0)
        other1 = neg(x)
        a1 = finish_recv(pending_a1)
        y1 = add(a1, other1)
        other2 = neg(x)
        a2 = finish_recv(pending_a2)
        y2 = add(a2, other2)
        return {{outputs: [[y0, y1, y2]]}}
    """)


@pytest.mark.parametrize("window", [1, 2, 3, 9])
def test_the_window_the_order_and_the_place_of_the_finish(window: int) -> None:
    sender, receiver = ranks(6)
    overlap_transfers(receiver, {"0->1": window})
    verify_ranks((sender, receiver))
    started: list[str] = []
    open_ = most = 0
    for node in receiver.graph.nodes:
        if node.target is ops.start_recv:
            started.append(node.name.removeprefix("pending_"))
            open_ += 1
            most = max(most, open_)
        elif node.target is ops.finish_recv:
            open_ -= 1
            assert node.next is first_reader(node)
    assert started == [f"a{m}" for m in range(6)]
    assert most == min(window + 1, 6)  # `window` ahead, and the one whose place has come but not its reader


def first_reader(node: fx.Node) -> fx.Node:
    following = node.next
    while following not in node.users:
        following = following.next
    return following


def test_a_message_of_several_values_is_finished_and_taken_apart_where_the_first_is_read() -> None:
    """In the programs' one order both messages stand before the first reader; to wait for the second there would hold up rank 0,
    too, which waits for what rank 1 makes of the first."""
    writer = Writer()
    x, values = writer.input("x"), []
    for m in range(2):
        packed = writer.call(ops.pack, (x, x), name=f"packed{m}", microbatch=m)
        moved = writer.call(ops.transfer, packed, rank=1, name=f"moved{m}", microbatch=m, to=1)
        unpacked = writer.call(ops.unpack, moved, rank=1, name=f"unpacked{m}", microbatch=m)
        values.append([writer.call(operator.getitem, unpacked, i, rank=1, name=f"v{m}{i}", microbatch=m) for i in range(2)])
    results = [writer.call(torch.add, *pair, rank=1, name=f"y{m}", microbatch=m) for m, pair in enumerate(values)]
    receiver = split_ranks(writer.program({1: {"outputs": [results]}}))[1]
    names = [node.name for node in overlap_transfers(receiver, {"0->1": 2}).graph.nodes]
    parts = ["moved0", "unpacked0", "v00", "v01", "y0", "moved1", "unpacked1", "v10", "v11", "y1"]
    assert [name for name in names if name in parts] == parts


def test_channels_have_windows_of_their_own() -> None:
    writer = Writer(3)
    x = writer.input("x")
    results = []
    for m in range(4):
        for frm in (0, 1):
            value = writer.call(torch.relu, x, rank=frm, name=f"v{frm}{m}", microbatch=m)
            results.append(writer.call(ops.transfer, value, rank=2, name=f"v{frm}{m}", microbatch=m, to=2))
    programs = split_ranks(writer.program({2: {"outputs": [results]}}))
    overlap_transfers(programs[2], {"0->2": 1, "1->2": 4})
    verify_ranks(programs)
    starts = [node.name.removeprefix("pending_") for node in programs[2].graph.nodes if node.target is ops.start_recv]
    assert [name for name in starts if name.startswith("v0")] == ["v00", "v01", "v02", "v03"]
    assert starts.index("v13") < starts.index("v01"), "all four of the wide channel are started at the beginning"


def test_a_program_without_messages_is_left_alone() -> None:
    writer = Writer(1)
    [program] = split_ranks(writer.program({0: {"loss": writer.call(torch.relu, writer.input("x"), name="y")}}))
    text = str(program)
    assert_shows(overlap_transfers(program, {}), text)


def stream() -> tuple[RankProgram, ...]:
    """Rank 0 sends what rank 1 will read in a later program; rank 1 reads what came in an earlier one."""
    writer = Writer()
    x = writer.input("x")
    value = writer.call(torch.relu, x, name="a0")
    moved = writer.call(ops.transfer, value, rank=1, name="a0", to=1)
    stash = writer.call(ops.stash, moved, rank=1, name="stash")
    stash.kwargs = {"kind": "d_h", "stage": 1, "minibatch": 0, "rank": 1}
    taken = writer.call(ops.restore, rank=1, name="a1")
    taken.kwargs, taken.meta["maker"] = {"kind": "d_h", "stage": 1, "minibatch": -1, "rank": 1}, 0
    result = writer.call(torch.neg, taken, rank=1, name="y")
    return split_ranks(writer.program({1: {"losses": [result]}}))


def test_a_receive_for_a_later_program_is_put_by_unfinished() -> None:
    sender, receiver = stream()
    assert_shows(overlap_transfers(receiver, {"0->1": 4}), """
        pending_a0 = start_recv(frm=0, channel='0->1', shape=(4,), dtype=float32)
        stash(pending_a0, kind='d_h', stage=1, minibatch=0, rank=1)
        pending_a1 = restore(kind='d_h', stage=1, minibatch=-1, rank=1)
        a1 = finish_recv(pending_a1)
        y = neg(a1)
        return {losses: [y]}
    """)
    verify_ranks((sender, receiver))


def test_without_a_window_it_is_started_in_its_place() -> None:
    """On NCCL, where operations keep the global order."""
    sender, receiver = stream()
    overlap_transfers(receiver, {})
    assert [node.target for node in receiver.graph.nodes if node.op == "call_function"][:2] == [ops.start_recv, ops.stash]
    verify_ranks((sender, receiver))


def test_what_came_in_an_earlier_program_is_unfinished_also_where_nothing_is_sent_now() -> None:
    _, receiver = stream()
    for node in reversed(list(receiver.graph.nodes)):
        if node.target in (ops.stash, ops.recv):
            receiver.graph.erase_node(node)
    overlap_transfers(receiver, {})
    assert [node.target for node in receiver.graph.nodes if node.op == "call_function"][:2] == [ops.restore, ops.finish_recv]
