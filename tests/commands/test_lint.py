"""`pdcompiler lint`: findings and a summary on stdout, the exit code says whether something is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from pdcompiler.cli import app
from pdcompiler.core.schedule_csv import to_csv
from pdcompiler.passes.schedules.named import gpipe, zb_h1


def lint(folder: Path, text: str, *options: str) -> Result:
    (folder / "own.csv").write_text(text)
    return CliRunner().invoke(app, ["lint", str(folder / "own.csv"), *options])


def test_a_right_schedule_is_summed_up(tmp_path: Path) -> None:
    done = lint(tmp_path, to_csv(gpipe(2, 2)), "--ranks", "2", "--stages", "2", "--buffers", "0")
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[-3:] == [
        "no errors: 2 ranks, 2 stages, 2 microbatches",
        "in flight, by rank: 2, 2",
        "bubble: 33.3% (forward 1, backward 1 + 1, messages 0)",
    ]


def test_remarks_are_no_errors(tmp_path: Path) -> None:
    done = lint(tmp_path, to_csv(zb_h1(2, 3)))
    assert done.exit_code == 0 and done.stdout.startswith("remark: deadlock if a send waits for its receive (unbuffered)")


def test_errors_are_told_whole_and_counted(tmp_path: Path) -> None:
    text = "0F0,[red]\n" + "1F0,1B0,1F1,1B1junk\n"
    done = lint(tmp_path, text)
    lines = done.stdout.splitlines()
    assert done.exit_code == 1 and lines[0] == "error: rank 0, cell 0, 0F0: microbatch 0 has no backward on stage 0"
    assert lines[1].startswith("error: rank 0, cell 1, [red]: '[red]' is no action; ")
    assert lines[-1] == f"{sum(line.startswith('error: ') for line in lines)} errors" and "no errors" not in done.stdout


def test_the_peers_example_is_a_deadlock(tmp_path: Path) -> None:
    done = lint(tmp_path, "0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n")
    assert (done.exit_code, done.stdout) == (
        1,
        "error: deadlock, however messages travel\n"
        "  rank 0, cell 1, 0B0 waits for rank 1, cell 3, 1B0\n"
        "  rank 1, cell 0, 1F1 waits for rank 0, cell 2, 0F1\n"
        "1 error\n",
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--ranks", "0"), "--ranks is 0, expected 1 or more"),
        (("--stages", "-2"), "--stages is -2, expected 1 or more"),
        (("--buffers", "-1"), "--buffers is -1, expected 0 or more"),
    ],
)
def test_options_that_cannot_be(options: tuple[str, ...], message: str, tmp_path: Path) -> None:
    done = lint(tmp_path, "0F0,0B0", *options)
    assert done.exit_code == 1 and done.stderr.strip() == f"CompileError: {message}" and done.stdout == ""


def test_a_file_that_is_not_there() -> None:
    done = CliRunner().invoke(app, ["lint", "nowhere.csv"])
    assert done.exit_code == 1 and "the schedule nowhere.csv can't be read: No such file or directory" in done.stderr
