"""The command: a plan printed and saved, the same as from Python; bad input told in one line, nothing written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner, Result

from pdcompiler.cli import app, microbatch_counts
from pdcompiler.core.machine import Device, Machine
from pdcompiler.core.partition import Partition

RUNNER = CliRunner()


class Summed(nn.Module):
    """Eight equal layers, and their output's mean as the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layers(x).square().mean()}


def summed() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """On the meta device: only shapes matter."""
    with torch.device("meta"):
        return Summed(), {"x": torch.zeros(32, 64)}


def plan(*options: str, model: str = "tests.test_cli:summed") -> Result:
    return RUNNER.invoke(app, ["plan", model, "--world-size", "4", *options])


@pytest.fixture
def machine(tmp_path: Path) -> str:
    """Four devices with fast links, slow at computing."""
    device = Device("device", 1e9, 1e12, 1e9)
    path = tmp_path / "machine.toml"
    Machine.flat(4, bytes_per_second=1e12, latency_seconds=0.0, device=device, overlap=True).save(path)
    return str(path)


def test_a_plan_is_printed_and_saved(machine: str, tmp_path: Path) -> None:
    done = plan("--machine", machine, "--microbatches", "8", "--json", str(tmp_path / "plan.json"))
    assert done.exit_code == 0, done.output
    partition = Partition.load(tmp_path / "plan.json")
    assert str(partition) in done.stdout
    assert partition.explanation is not None and partition.explanation.gap < 1e-6
    assert partition.devices == 4  # all compute: with free links, four devices are four times as fast
    assert partition.explanation.one_device == pytest.approx(4 * partition.explanation.seconds, rel=0.01)


def test_the_microbatches_are_chosen_where_they_are_left_free(machine: str, tmp_path: Path) -> None:
    chosen = plan("--machine", machine, "--json", str(tmp_path / "plan.json"))
    assert chosen.exit_code == 0, chosen.output
    best = Partition.load(tmp_path / "plan.json").explanation
    assert best is not None and best.rows * best.microbatches == 32
    assert microbatch_counts(32, None) == [1, 2, 4, 8, 16, 32]
    for count in (1, 8):
        assert plan("--machine", machine, "--microbatches", str(count), "--json", str(tmp_path / "one.json")).exit_code == 0
        other = Partition.load(tmp_path / "one.json").explanation
        assert other is not None and best.seconds <= other.seconds * (1 + 1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--memory", "10 kB"), "needs"),
        (("--memory", "16 Gbit"), "is in bits"),
        (("--microbatches", "33"), "microbatches is 33, the example batch has 32 rows"),
        (("--schedule", "2f2b"), "the planner knows no schedule '2f2b'"),
        (("--world-size", "5"), "world_size is 5, machine"),
        (("--machine", "nowhere.toml"), "can't be read"),
    ],
)
def test_bad_input_is_told_and_nothing_written(machine: str, tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    done = plan("--machine", machine, "--json", str(tmp_path / "plan.json"), *options)
    assert done.exit_code == 1 and message in done.stderr and done.stderr.startswith("CompileError: ")
    assert not (tmp_path / "plan.json").exists() and done.stdout == ""


def test_a_function_that_gives_no_model_is_told() -> None:
    done = plan(model="tests.test_cli:nothing")
    assert done.exit_code == 1 and "'tests.test_cli:nothing' gives no model" in done.stderr


def test_help_has_an_example() -> None:
    done = RUNNER.invoke(app, ["plan", "--help"])
    assert done.exit_code == 0 and "pdcompiler plan models:llama --world-size 64" in " ".join(done.stdout.split())
