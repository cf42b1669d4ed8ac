"""Models of communication: what stops under which, and by the shortest cycle."""

from __future__ import annotations

from hypothesis import given

from pdcompiler.core.lint import lint
from pdcompiler.core.schedule import Schedule
from pdcompiler.core.schedule_csv import read_cells, to_csv
from pdcompiler.passes.schedules.named import SCHEDULES
from pdcompiler.schedule_strategies import any_schedules


def stops(text: str, buffers: int | None = None) -> list[str]:
    """What is said of deadlock, first those that are errors."""
    found = lint(read_cells(text), buffers=buffers)
    return [("error: " if f.is_error else "remark: ") + f.what for f in found if "deadlock" in f.what]


TWO_RANKS = "0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n"
ONE_F_ONE_B = to_csv(SCHEDULES["1f1b"](2, 3))


def test_ranks_that_wait_for_each_other_are_stuck_under_every_model() -> None:
    cycle = "  rank 0, cell 1, 0B0 waits for rank 1, cell 3, 1B0\n  rank 1, cell 0, 1F1 waits for rank 0, cell 2, 0F1"
    for buffers in (None, 0, 1, 100):
        assert stops(TWO_RANKS, buffers) == [f"error: deadlock, however messages travel\n{cycle}"]


def test_a_rank_that_waits_for_itself() -> None:
    assert stops("1F0,0F0,1B0,0B0") == [
        "error: deadlock, however messages travel\n  rank 0, cell 0, 1F0 waits for rank 0, cell 1, 0F0"
    ]


def test_the_shortest_cycle_is_told() -> None:
    """Ranks 0 and 1 wait for each other; ranks 2 and 3, for them."""
    text = "0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n2F0,2B0,2F1,2B1\n3F0,3B0,3F1,3B1\n"
    (message,) = stops(text)
    assert message.count("\n") == 2 and "rank 2" not in message and "rank 3" not in message


def test_1f1b_stops_where_a_send_waits_and_needs_one_buffer() -> None:
    cycle = (
        "  rank 0, cell 1, 0F1: its send waits for rank 1, cell 2, 1F1\n"
        "  rank 1, cell 1, 1B0: its send waits for rank 0, cell 2, 0B0"
    )
    how = "(sends right after their actions, receives right before); 1 buffer a channel would be enough"
    unbuffered = f"deadlock if a send waits for its receive (unbuffered) {how}\n{cycle}"
    assert stops(ONE_F_ONE_B) == [f"remark: {unbuffered}"]
    assert stops(ONE_F_ONE_B, 0) == [f"error: {unbuffered}"]
    assert stops(ONE_F_ONE_B, 1) == []


def test_too_few_buffers() -> None:
    """Rank 0 sends three forwards before rank 1, which has sent two backwards of stage 2, takes one."""
    text = "0F0,0F1,0F2,0F3,0B0,0B1,0B2,0B3\n1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3\n"
    (message,) = stops(text, 1)
    assert (
        message.startswith("error: deadlock with 1 buffer a channel (") and "; 2 buffers a channel would be enough\n" in message
    )
    assert stops(text, 2) == []


def test_gpipe_needs_no_buffer() -> None:
    assert stops(to_csv(SCHEDULES["gpipe"](3, 4)), 0) == []


def test_a_channel_that_keeps_its_order() -> None:
    text = "0F0,0F1,0B0,0B1\n1F1,1F0,1B0,1B1\n"
    in_order, unbuffered = stops(text)
    assert in_order == (
        "remark: deadlock if a channel keeps the order of its messages (sends right after their actions, receives right before); "
        "pdcompiler and torch start receives in the order of the sends\n"
        "  rank 1, cell 0, 1F1: its message is behind one for cell 1, 1F0, which is later"
    )
    assert "(unbuffered)" in unbuffered
    given = "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n1RECV_F1,1F1,1RECV_F0,1F0,1B0,1SEND_B0,1B1,1SEND_B1\n"
    error, _ = stops(given)
    assert error == (
        "error: deadlock if a channel keeps the order of its messages (one cell after the other)\n"
        "  rank 1, cell 0, 1RECV_F1: its message is behind one for cell 2, 1RECV_F0, which is later"
    )


def test_receives_that_stand_too_early() -> None:
    text = "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n"
    assert stops(text, 0) == []
    (message,) = stops(text.replace("0F0,0SEND_F0,0RECV_B0", "0F0,0RECV_B0,0SEND_F0"))
    assert message == (
        "error: deadlock, however messages travel\n"
        "  rank 0, cell 1, 0RECV_B0 waits for rank 1, cell 3, 1SEND_B0\n"
        "  rank 1, cell 0, 1RECV_F0 waits for rank 0, cell 2, 0SEND_F0"
    )


def test_parts_of_a_fused_cell_wait_for_each_others_messages() -> None:
    """Here the forward's result would be needed for the backward beside it."""
    text = "0F0,(0F1;0B0)OVERLAP_F_B,0B1\n1F0,1F1,1B0,1B1"
    assert stops(text)[0].startswith("error: deadlock, however")
    assert not [message for message in stops("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1") if message.startswith("error")]


@given(any_schedules())
def test_communication_as_we_write_it_stops_under_no_model(schedule: Schedule) -> None:
    assert stops(to_csv(schedule, communication=True), 0) == []
