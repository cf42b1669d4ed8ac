"""One rank fails: all others stop soon and raise its cause. Bad input is refused before there is a process group."""

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pdcompiler
from pdcompiler.given_schedule import SEVERAL
from pdcompiler.passes.schedules.named import SCHEDULES

pytestmark = pytest.mark.processes

SCRIPTS = Path(__file__).parent / "scripts"
LIMIT = 180
"""Seconds for a whole launch, less than a rank would wait for a message: who raises sooner was woken."""


SAMPLE = [("1f1b", "raises"), ("dualpipe-v", "raises"), ("interleaved", "killed"), ("zb-h2", "one step fewer")]
"""Of case 30, what runs in `make test`."""


def launch(way: str, folder: Path, schedule: str = "1f1b") -> tuple[list[int], list[Any]]:
    """Three processes of fail.py: their exit codes and what they wrote down."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(3):
        launched = {"RANK": str(rank), "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        with (folder / f"{rank}.err").open("w") as errors:
            command = [sys.executable, str(SCRIPTS / "fail.py"), way, str(folder), schedule]
            processes.append(subprocess.Popen(command, env=os.environ | launched, stderr=errors))
    try:
        codes = [process.wait(timeout=LIMIT) for process in processes]
    except subprocess.TimeoutExpired:
        said = "\n".join(path.read_text() for path in sorted(folder.glob("*.err")))
        raise AssertionError(f"still waiting after {LIMIT} s:\n{said}") from None
    finally:
        for process in processes:
            process.kill()
    reports = [folder / f"{rank}.json" for rank in range(3)]
    return codes, [json.loads(report.read_text()) if report.exists() else None for report in reports]


def failures() -> Iterator[Any]:
    """Every schedule that flushes, with each failure: a sample, and all of them in `make test-all`."""
    for schedule, failure in itertools.product((*SCHEDULES, *SEVERAL), ("raises", "killed", "one step fewer")):
        yield pytest.param(schedule, failure, marks=() if (schedule, failure) in SAMPLE else pytest.mark.full)


@pytest.mark.parametrize(("schedule", "failure"), list(failures()))
def test_case_30_a_failure_of_one_rank_stops_all_others_with_its_cause(tmp_path: Path, schedule: str, failure: str) -> None:
    """A stage's forward raises, the process is killed, or it is done one step earlier. Peers hang."""
    way, code, message = {
        "raises": ("index", 1, "rank 1: stage 1 forward, microbatch 5, module table: IndexError: index out of range in self"),
        "killed": ("kill 1", -signal.SIGKILL, "rank 1 is gone: rank "),
        "one step fewer": ("stop 1", 0, "rank 1 is gone: rank "),
    }[failure]
    codes, reports = launch(way, tmp_path, schedule)
    assert codes == [1, code, 1]
    if failure == "raises":
        assert reports[1]["message"] == message
    for report in (reports[0], reports[2]):
        assert report["raised"] == "WorkerError"
        assert report["message"] == message if failure == "raises" else report["message"].startswith(message)
        assert report["rank"] == 1


def test_an_error_in_a_stream_is_raised_on_every_rank(tmp_path: Path) -> None:
    """Also on those that are ticks ahead, with receives that are put by."""
    codes, reports = launch("index", tmp_path, "pipedream")
    assert codes == [1, 1, 1]
    for report in reports:
        assert report["raised"] == "WorkerError"
        assert report["message"] == "rank 1: stage 1 forward, microbatch 0, module table: IndexError: index out of range in self"


@pytest.mark.full
def test_a_rank_that_is_killed_in_a_stream_is_named_by_all_others(tmp_path: Path) -> None:
    codes, reports = launch("kill 1", tmp_path, "pipedream")
    assert codes == [1, -signal.SIGKILL, 1]
    assert all(report["message"].startswith("rank 1 is gone: rank ") for report in (reports[0], reports[2]))


def test_the_rank_that_holds_the_store_may_be_killed_too(tmp_path: Path) -> None:
    codes, reports = launch("kill 0", tmp_path)
    assert codes == [-signal.SIGKILL, 1, 1]
    for report in reports[1:]:
        assert report["raised"] == "WorkerError"
        assert "the store is gone too, so rank 0 or the launcher, which held it, may have been first" in report["message"]


@pytest.mark.full
def test_a_rank_that_does_not_answer_is_given_up(tmp_path: Path) -> None:
    """In a process group of the user's own, after the pipeline's timeout."""
    codes, reports = launch("late", tmp_path)
    assert codes == [1, 1, 1]
    assert [report["raised"] for report in reports] == ["WorkerError"] * 3
    messages = {report["message"] for report in (reports[0], reports[2])}
    assert messages in [{f"rank 1 did not answer rank {other} within 10 s"} for other in (0, 2)]


@pytest.mark.parametrize(
    ("world_size", "options", "message"),
    [
        (3, {}, "world_size is 3, but 2 processes were launched"),
        (2, {"partition": ["9"]}, "9"),
        (2, {"partition": ["1", "2"]}, "the partition has 3 stages, world_size is 2"),
        (2, {"schedule": "zigzag"}, "there is no schedule 'zigzag'"),
        (2, {"loss_fn": None, "example_target": None}, "loss"),
    ],
)
def test_bad_input_is_refused_before_there_is_a_process_group(
    monkeypatch: pytest.MonkeyPatch, world_size: int, options: dict[str, Any], message: str
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **kwargs: pytest.fail("a process group was made"))
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    given = {"example_args": (torch.randn(4, 4),), "example_target": torch.randn(4, 4), "loss_fn": nn.functional.mse_loss}
    with pytest.raises(pdcompiler.CompileError, match=message):
        pdcompiler.compile(model, world_size, **given | options)


def test_a_users_script_under_torchrun_ends_cleanly() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPTS / "train.py")]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    said = sorted(line.split(": ", 1) for line in done.stdout.splitlines())
    assert [rank for rank, _ in said] == ["rank 0", "rank 1"]
    assert said[0][1] == said[1][1] and said[0][1].endswith("12 of 12 right")
    assert done.stderr == ""
