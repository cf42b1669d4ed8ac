"""Schedules from files: either form is read; what is wrong is told by its place, the first errors of many."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdcompiler.core.errors import CompileError
from pdcompiler.core.schedule import Schedule
from pdcompiler.core.schedule_csv import to_csv
from pdcompiler.core.schedule_file import read_schedule_file
from pdcompiler.passes.schedules.v_shaped import zb_v

EACH = [str, to_csv, lambda schedule: to_csv(schedule, communication=True)]


@pytest.mark.parametrize("form", EACH)
@pytest.mark.parametrize("name", ["own.csv", "own.txt", "own"])
def test_the_content_tells_which_form_it_is(form: object, name: str, tmp_path: Path) -> None:
    assert callable(form)
    (tmp_path / name).write_text(form(zb_v(2, 4)))
    found = read_schedule_file(tmp_path / name)
    assert (found, found.name) == (zb_v(2, 4), name)


def refused(path: Path) -> str:
    with pytest.raises(CompileError) as caught:
        read_schedule_file(path)
    return str(caught.value).replace(str(path), "FILE")


def test_the_first_errors_are_told(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text("0F0,0B0x\n")
    junk = "  rank 0, cell 1, 0B0x: 'x' stands after the action; torch reads 0B0 and says nothing\n"
    assert refused(path) == f"the schedule FILE has 1 error:\n{junk}  try: pdcompiler lint FILE"
    path.write_text("0F0,0B0x,0F0,0F0,0F0,0F0\n")
    told = refused(path).splitlines()
    assert told[0] == "the schedule FILE has 5 errors:" and told[4] == "  and 2 more" and len(told) == 6


def test_deadlock_is_told_with_its_cycle(tmp_path: Path) -> None:
    path = tmp_path / "own.txt"
    path.write_text("F0 B0 F1 B1\nF1 B1 F0 B0\n")
    assert "\n    rank 0, cell 1, B0 waits for rank 1, cell 3, B0\n" in refused(path)


@pytest.mark.parametrize(
    ("content", "why"), [(None, "No such file or directory"), (b"\xff\xfe0F0", "'utf-8' codec can't decode")]
)
def test_what_cannot_be_read(content: bytes | None, why: str, tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    if content is not None:
        path.write_bytes(content)
    assert refused(path).startswith(f"the schedule FILE can't be read: {why}")


def test_one_rank_and_one_microbatch(tmp_path: Path) -> None:
    (tmp_path / "own.csv").write_text("0F0,0B0")
    assert read_schedule_file(tmp_path / "own.csv") == Schedule.parse("F0 B0")
