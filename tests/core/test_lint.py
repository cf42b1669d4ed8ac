"""What is wrong with a schedule file: each defect by its row and cell, and no others beside it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcompiler.core import lint as core
from pdcompiler.core.errors import CompileError, DeadlockError
from pdcompiler.core.lint import lint
from pdcompiler.core.schedule import Action, Schedule
from pdcompiler.core.schedule_csv import read_cells, schedule_of, to_csv
from pdcompiler.passes.schedules.named import SCHEDULES, interleaved, replicated
from pdcompiler.passes.schedules.v_shaped import zb_v
from pdcompiler.schedule_strategies import any_schedules


def errors(text: str, **expected: int) -> list[str]:
    return [str(finding) for finding in lint(read_cells(text), **expected) if finding.is_error]


def remarks(text: str, **expected: int) -> list[str]:
    return [str(finding) for finding in lint(read_cells(text), **expected) if not finding.is_error]


def test_the_docstring_is_true() -> None:
    lines = [line.strip().split(maxsplit=1) for line in (core.__doc__ or "").splitlines() if line.startswith("    ")]
    text = "\n".join(line[0] for line in lines[:2])
    told = [lines[0][1], lines[1][1], " ".join(lines[2])]
    assert sorted(errors(text)) == sorted(told)


DEFECTS = [
    ("empty", "", "the file has no forwards and no backwards"),
    ("junk", "0F0junk,0B0", "rank 0, cell 0, 0F0junk: 'junk' stands after the action; torch reads 0F0 and says nothing"),
    ("twice", "0F0,0B0,0F0", "rank 0, cell 2, 0F0: stands twice, first at rank 0, cell 0, 0F0"),
    ("twice, on another rank", "0F0,0B0\n1F0,1B0,0F0", "rank 1, cell 2, 0F0: stands twice, first at rank 0, cell 0, 0F0"),
    (
        "two kinds of backward",
        "0F0,0I0,0W0,0B0",
        "rank 0, cell 3, 0B0: is a second backward, the first is at rank 0, cell 1, 0I0",
    ),
    ("no backward", "0F0,0F1,0B0", "rank 0, cell 1, 0F1: microbatch 1 has no backward on stage 0"),
    ("no forward", "0F0,0B1,0B0", "rank 0, cell 1, 0B1: microbatch 1 has no forward on stage 0"),
    ("no backwards", "0F0,0F1", "there are no backwards: this is no schedule of a training step"),
    ("neither", "0F0,0B0,0F1,0B1\n1F0,1B0", "stage 1 has neither forward nor backward of microbatch 1"),
    ("no such microbatch", "0F0,0B0,0F2,0B2", "no stage runs microbatch 1"),
    ("no such stage", "0F0,0B0\n2F0,2B0", "no rank runs stage 1"),
    ("backward first", "0B0,0F0", "rank 0, cell 0, 0B0: stands before 0F0 of cell 1, which it needs"),
    (
        "backward first, fused",
        "(0B0;0F0)OVERLAP_F_B",
        "rank 0, cell 0, (0B0;0F0)OVERLAP_F_B: stands before 0F0 of cell 0, which it needs",
    ),
    ("W first", "0F0,0W0,0I0", "rank 0, cell 1, 0W0: stands before 0I0 of cell 2, which it needs"),
    ("no W", "0F0,0I0", "rank 0, cell 1, 0I0: it has no W: the gradients of stage 0's weights of microbatch 0 are lost"),
    ("W of a whole backward", "0F0,0B0,0W0", "rank 0, cell 2, 0W0: 0B0 is a whole backward: with a W it must be an I"),
    ("two ranks", "0F0,0F1,0B1\n1F0,1B0,1F1,1B1,0B0", "rank 1, cell 4, 0B0: 0F0 is on rank 0, where what it saved is"),
    ("an idle rank", "0F0,0B0\n,,\n1F0,1B0", "rank 1: has nothing to compute"),
    (
        "send without receive",
        "0F0,0SEND_F0,0RECV_B0,0B0\n1F0,1B0,1SEND_B0",
        "rank 0, cell 1, 0SEND_F0: a send without its receive: there is no 1RECV_F0",
    ),
    (
        "receive without send",
        "0F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0",
        "rank 1, cell 0, 1RECV_F0: a receive without its send: there is no 0SEND_F0",
    ),
    (
        "neither send nor receive",
        "0F0,0RECV_B0,0B0\n1F0,1B0,1SEND_B0",
        "rank 1, cell 0, 1F0: no message brings what 0F0 on rank 0 gives: there is neither 0SEND_F0 nor 1RECV_F0",
    ),
    (
        "sent to itself",
        "0F0,0SEND_F0,1F0,1B0,0B0",
        "rank 0, cell 1, 0SEND_F0: 1F0, which needs it, is on the same rank: there must be no message",
    ),
    ("sent to nobody", "0F0,0SEND_F0,0B0", "rank 0, cell 1, 0SEND_F0: no action needs what it sends"),
    ("taken from nobody", "0RECV_F0,0F0,0B0", "rank 0, cell 0, 0RECV_F0: no action makes what it receives"),
    ("taken for nobody", "0F0,0B0,1RECV_F0", "rank 0, cell 2, 1RECV_F0: no action needs what it receives"),
    (
        "sent too early",
        "0SEND_F0,0F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0",
        "rank 0, cell 0, 0SEND_F0: what it sends is not there: 0F0 stands behind it",
    ),
    (
        "taken too late",
        "0F0,0SEND_F0,0RECV_B0,0B0\n1F0,1RECV_F0,1B0,1SEND_B0",
        "rank 1, cell 1, 1RECV_F0: 1F0, which needs it, stands before it",
    ),
    (
        "a message twice",
        "0F0,0SEND_F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0",
        "rank 0, cell 2, 0SEND_F0: stands twice, first at rank 0, cell 1, 0SEND_F0",
    ),
    (
        "gradients summed too early",
        "0F0,0REDUCE_GRAD,0B0",
        "rank 0, cell 1, 0REDUCE_GRAD: 0B0 of cell 2 comes later: its gradients are left out",
    ),
    ("a stage that is elsewhere", "0F0,0B0\n0UNSHARD,1F0,1B0", "rank 1, cell 0, 0UNSHARD: stage 0 does not run on this rank"),
    ("in the text form", "F0 B0 W0\nF0 W0 B0", "rank 1, cell 1, W0: stands before B0 of cell 2, which it needs"),
]


@pytest.mark.parametrize(("text", "error"), [pytest.param(text, error, id=name) for name, text, error in DEFECTS])
def test_a_defect_is_told_by_its_place_and_nothing_else(text: str, error: str) -> None:
    assert errors(text) == [error]


LOOPED, FORTH_AND_BACK = to_csv(interleaved(2, 4)), to_csv(zb_v(2, 4))
SWAPPED = "1F0,1B0\n0F0,0B0\n"


@pytest.mark.parametrize(
    ("text", "expected", "told"),
    [
        (LOOPED, {"ranks": 2, "stages": 4}, []),
        (FORTH_AND_BACK, {"stages": 4}, []),
        (LOOPED, {"ranks": 3}, ["the file has 2 ranks, a row each, expected 3"]),
        ("0F0,0B0\n1F0,1B0", {"stages": 3}, ["no rank runs stage 2"]),
        ("0F0,0B0\n1F0,1B0", {"stages": 1}, ["rank 1, cell 0, 1F0: there is a stage 1, the last should be 0"]),
        ("1F0,1B0\n0F0,0B0,2F0,2B0", {}, ["deadlock"]),
        (SWAPPED, {}, []),
        (
            SWAPPED,
            {"stages": 2},
            [f"rank {1 - s}, cell 0, {s}F0: stage {s} belongs on rank {s} (stage i on rank i mod 2)" for s in (0, 1)],
        ),
        ("0F0,2F0,2B0,0B0\n1F0,1B0", {"stages": 2}, ["rank 0, cell 1, 2F0: there is a stage 2, the last should be 1"]),
        (
            "0F0,0B0\n0F1,0B1",
            {"ranks": 2, "stages": 2},
            ["no rank runs stage 1", "rank 1, cell 0, 0F1: stage 0 belongs on rank 0"],
        ),
    ],
)
def test_ranks_and_stages_as_they_should_be(text: str, expected: dict[str, int], told: list[str]) -> None:
    found = errors(text, **expected)
    assert len(found) == len(told) and all(any(f.startswith(t) for f in found) for t in told), found


def test_replicas_are_worth_a_remark() -> None:
    text = str(replicated("1f1b", (2, 1), 4))
    assert errors(text) == []
    assert "stage 0 runs on ranks 0, 1: replicas, which torch does not load" in remarks(text)


def test_of_many_missing_numbers_the_first_is_told() -> None:
    assert errors("0F0,0B0,0F999999999,0B999999999") == ["no stage runs microbatch 1, nor 999999997 more"]


def test_memory_that_grows_with_the_microbatches_is_worth_a_remark() -> None:
    first, second = remarks(to_csv(SCHEDULES["gpipe"](2, 8)))
    assert first == (
        "rank 0: what 8 of 8 forwards save is held at once, and grows with the number of microbatches; "
        "2 are enough to keep all ranks busy"
    )
    assert second.startswith("rank 1: what 8 of 8 forwards save is held at once")


@pytest.mark.parametrize("make", [*(make for name, make in SCHEDULES.items() if name != "gpipe"), interleaved, zb_v])
def test_memory_that_does_not_grow_is_not(make: object) -> None:
    assert callable(make)
    for ranks, microbatches in [(2, 12), (3, 12), (4, 12)]:
        assert not [r for r in remarks(to_csv(make(ranks, microbatches))) if "held at once" in r]


@given(any_schedules(), st.data())
def test_a_changed_schedule_has_errors_where_check_refuses_it(schedule: Schedule, data: st.DataObject) -> None:
    """Actions swapped, left out or repeated: lint finds what `check` refuses, and lets pass what it lets pass."""
    rows = [list(actions) for actions in schedule.ranks]
    for _ in range(data.draw(st.integers(1, 3))):
        row = rows[data.draw(st.integers(0, len(rows) - 1))]
        i, j = data.draw(st.integers(0, len(row) - 1)), data.draw(st.integers(0, len(row) - 1))
        change = data.draw(st.sampled_from(["swap", "drop", "repeat"]))
        if change == "swap":
            row[i], row[j] = row[j], row[i]
        elif change == "repeat":
            row.insert(i, row[j])
        elif len(row) > 1:
            del row[i]
    changed = Schedule(tuple(map(tuple, rows)))
    found = errors(str(changed))
    if not found:
        assert schedule_of(read_cells(str(changed))).check() == changed
    else:
        with pytest.raises((CompileError, DeadlockError)):
            changed.check()


def test_order_of_the_findings_is_that_of_the_file() -> None:
    text = "0F0,0B0,0F1x,0B1\n1F0,1B0,1F1,1B1,1B1\n"
    found = lint(read_cells(text))
    assert [(f.is_error, f.cell and f.cell.rank) for f in found] == [(True, 0), (True, 1)]
    assert found[0].cell is not None and found[0].cell.ops[0].action == Action("F", 0, 1)
