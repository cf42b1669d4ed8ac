"""The command: a plan printed and saved, the same as from Python; bad input told in one line, nothing written."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.main import get_group
from typer.testing import CliRunner, Result

from pdcompiler import cli
from pdcompiler.cli import app
from pdcompiler.core.machine import Device, Machine
from pdcompiler.core.partition import Partition
from pdcompiler.core.profile import Measured, Profile
from pdcompiler.microbatches import microbatch_counts

RUNNER = CliRunner()
VGG16 = Path(__file__).parents[2] / "shared" / "data" / "pipedream_profiles" / "vgg16.txt"
GRAPH = """\
node1 -- Linear(8) -- forward_compute_time=1000.0, backward_compute_time=1000.0, activation_size=1e6, parameter_size=1e12
node2 -- Linear(8) -- forward_compute_time=1000.0, backward_compute_time=1000.0, activation_size=1e6, parameter_size=1e12
\tnode1 -- node2
"""
"""Two layers of two seconds; a cut sends 1 MB each way. Cut in two they are faster if that takes less than two seconds more."""


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


def never() -> None:
    raise AssertionError("the model is made before the arguments are checked")


def plan(*options: str, model: str = "tests.test_cli:summed") -> Result:
    return RUNNER.invoke(app, ["plan", model, "--world-size", "4", *options])


def break_even(source: object, *options: str) -> Result:
    return RUNNER.invoke(app, ["break-even", str(source), "--world-size", "2", "--low", "1e5", "--high", "100MB/s", *options])


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
        (("--microbatches", "33"), "microbatches is 33, the example batch has 32 rows"),
    ],
)
def test_what_cannot_be_planned_is_told_and_nothing_written(
    machine: str, tmp_path: Path, options: tuple[str, ...], message: str
) -> None:  # fmt: skip
    done = plan("--machine", machine, "--json", str(tmp_path / "plan.json"), *options)
    assert done.exit_code == 1 and message in done.stderr and done.stderr.startswith("CompileError: ")
    assert not (tmp_path / "plan.json").exists() and done.stdout == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--memory", "16 Gbit"), '--memory: "16 Gbit" is in bits'),
        (("--schedule", "2f2b"), "the planner knows no schedule '2f2b'"),
        (("--world-size", "5"), "world_size is 5, machine 'flat' has 4"),
        (("--machine", "nowhere.toml"), "the machine's file nowhere.toml can't be read"),
        (("--profile", "nowhere.json"), "the profile's file nowhere.json can't be read: No such file or directory"),
        (("--break-even", "1Gbit/s", "1e9"), '--break-even: "1Gbit/s" is in bits\n  try: "0.125 GB/s", the same in bytes'),
        (("--break-even", "1e9", "1e9"), "the bandwidths go from 1e+09 to 1e+09 bytes per second, expected 0 < from < to"),
        (("--break-even", "1e10", "1GB/s"), "the bandwidths go from 1e+10 to 1e+09 bytes per second"),
        (("--break-even", "fast", "1e9"), '--break-even: "fast" has no unit that is known here'),
        (("--json", "nowhere/plan.json"), "nowhere/plan.json can't be written: there is no folder nowhere"),
        (("--json", "."), ". can't be written: it is a folder"),
    ],
)
def test_arguments_are_checked_before_the_model_is_made(
    machine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], message: str
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    before = list(tmp_path.iterdir())
    done = plan("--machine", machine, "--json", "plan.json", *options, model="tests.test_cli:never")
    assert done.exit_code == 1 and done.stderr.startswith(f"CompileError: {message}")
    assert list(tmp_path.iterdir()) == before and done.stdout == ""


def test_a_function_that_gives_no_model_is_told() -> None:
    done = plan(model="tests.test_cli:nothing")
    assert done.exit_code == 1 and "'tests.test_cli:nothing' gives no model" in done.stderr


# Measured costs


def profiled(path: Path, model: str = "tests.test_cli:summed") -> Profile:
    done = RUNNER.invoke(app, ["profile", model, "--repetitions", "2", "-o", str(path)])
    assert done.exit_code == 0, done.output
    return Profile.load(path)


def test_a_plan_with_measured_costs_takes_what_was_measured(machine: str, tmp_path: Path) -> None:
    measured = profiled(tmp_path / "profile.json")
    options = ("--world-size", "1", "--microbatches", "1", "--profile", str(tmp_path / "profile.json"))
    done = plan("--machine", machine, *options, "--json", str(tmp_path / "plan.json"))
    assert done.exit_code == 0, done.output
    found = Partition.load(tmp_path / "plan.json").explanation
    assert found is not None and found.seconds == pytest.approx(measured.seconds, rel=1e-9)
    assert done.stdout.endswith(f"costs: measured on {measured.device} with microbatches of 32 rows\n")


def test_another_models_profile_is_refused_before_the_trace(
    machine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    other = Measured("", False, "mm.default", 0, "product", 1e-3, 1e6, 1e6, 1)
    Profile("0123456789abcdef", "cpu", 8, "float32", 1e-3, 0.0, 1e-3, (other,)).save(tmp_path / "other.json")
    monkeypatch.setattr(cli, "planning_trace", never)
    done = plan("--machine", machine, "--microbatches", "1", "--profile", str(tmp_path / "other.json"))
    assert done.exit_code == 1 and done.stderr.startswith("CompileError: the profile is of another model")


def test_one_profile_for_several_kinds_of_devices_is_refused(tmp_path: Path) -> None:
    profiled(tmp_path / "profile.json")
    kinds = tuple((Device(name, 1e9, 1e12, 1e9), 2) for name in ("slow", "fast"))
    Machine("mixed", Machine.flat(4).levels, kinds).save(tmp_path / "mixed.toml")
    options = ("--machine", str(tmp_path / "mixed.toml"), "--profile", str(tmp_path / "profile.json"))
    done = plan(*options, model="tests.test_cli:never")
    assert done.exit_code == 1 and "the profile has the costs of one kind of device, machine 'mixed' has 2 kinds" in done.stderr
    assert plan(*options, "--world-size", "2").exit_code == 0  # on the first two, of one kind


# Bandwidths


def rows_of(text: str) -> list[tuple[float, float, str]]:
    """from, to and plan of each row of a table that ends a text."""
    lines = text.splitlines()
    begin = next(k for k, line in enumerate(lines) if line.startswith("from "))
    return [(float(line.split()[0]), float(line.split()[1]), line.split()[2]) for line in lines[begin + 1 :]]


def test_a_graph_txts_table(tmp_path: Path) -> None:
    (tmp_path / "graph.txt").write_text(GRAPH)
    done = break_even(tmp_path / "graph.txt")
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("best plans by the bandwidth of level 'link' of machine 'flat', in bytes per second\n")
    (low, first, one), (begin, high, two) = rows_of(done.stdout)
    assert (low, begin, high, one, two) == (1e5, first, 1e8, "1", "1-1")
    # Two stages take the larger of 2 s and the 2 MB of a cut; one device 4 s.
    assert first == pytest.approx(0.5e6, rel=0.02)


def test_the_outermost_level_and_the_machines_memory_count(tmp_path: Path) -> None:
    (tmp_path / "graph.txt").write_text(GRAPH)
    done = break_even(tmp_path / "graph.txt", "--world-size", "16", "--machine", "pipedream-a", "--memory", "10TB")
    assert done.exit_code == 0 and "level 'network' of machine 'pipedream-a'" in done.stdout
    done = break_even(tmp_path / "graph.txt", "--machine", "pipedream-a", "--memory", "10TB")
    assert done.exit_code == 0 and "level 'PCIe' of machine 'pipedream-a'" in done.stdout
    done = break_even(tmp_path / "graph.txt", "--machine", "pipedream-a")
    assert done.exit_code == 1 and "the device has 14.9 GiB" in done.stderr and done.stdout == ""


def test_the_table_under_a_plan_is_that_of_break_even(machine: str, tmp_path: Path) -> None:
    done = plan("--machine", machine, "--microbatches", "8", "--break-even", "1e5", "1e12", "--json", str(tmp_path / "plan.json"))
    assert done.exit_code == 0, done.output
    partition = Partition.load(tmp_path / "plan.json")
    assert done.stdout.startswith(f"{partition}\n\nbest plans by the bandwidth of level 'link'")
    rows = rows_of(done.stdout)
    assert len(rows) > 1 and rows[0][0] == 1e5 and rows[-1][1] == 1e12
    assert rows[-1][2] == "-".join(str(stage.replicas) for stage in partition.stages)  # the machine's links have 1e12
    options = ("--world-size", "4", "--machine", machine, "--microbatches", "8", "--schedule", "1f1b", "--high", "1e12")
    alone = break_even("tests.test_cli:summed", *options)
    assert alone.exit_code == 0 and f"\n\n{alone.stdout}" in done.stdout


@pytest.mark.skipif(not VGG16.exists(), reason=f"there is no {VGG16}")
@pytest.mark.parametrize("factor", ["2", "4"])
def test_vgg16_on_16_devices_has_the_papers_plan_at_25_gigabits_per_second(factor: str) -> None:
    done = break_even(VGG16, "--world-size", "16", "--low", "1e9", "--high", "10GB/s", "--reduce-factor", factor)
    (own,) = [plan for low, high, plan in rows_of(done.stdout) if low <= 3.125e9 < high]
    assert own == "15-1" and len(rows_of(done.stdout)) > 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--low", "800Mbit/s"), '--low and --high: "800Mbit/s" is in bits'),
        (("--low", "1GB/s"), "the bandwidths go from 1e+09 to 1e+08 bytes per second, expected 0 < from < to"),
        (("--low", "-1"), "--low and --high must be above 0"),
        (("--world-size", "0"), "world_size is 0, expected a whole number of at least 1"),
        (("--world-size", "17", "--machine", "pipedream-a"), "world_size is 17, machine 'pipedream-a' has 16"),
        (("--microbatches", "0"), "microbatches is 0, expected 1 or more"),
        (("--reduce-factor", "-1"), "reduce_factor is -1.0, expected 0 or more"),
        ((), "the profile nowhere.txt can't be read: No such file or directory"),
    ],
)
def test_what_no_table_can_be_made_of(options: tuple[str, ...], message: str) -> None:
    done = break_even("nowhere.txt", *options)
    assert done.exit_code == 1 and done.stderr.startswith(f"CompileError: {message}") and done.stdout == ""


# Help


@pytest.mark.parametrize("command", ["plan", "break-even", "profile", "fit", "lint"])
def test_help_ends_with_an_example_that_can_be_read(command: str) -> None:
    done = RUNNER.invoke(app, [command, "--help"])
    text = " ".join(done.stdout.split())
    name, *arguments = shlex.split(text[text.index("Example: ") :])[2:]
    assert done.exit_code == 0 and name == command
    parsed = get_group(app).commands[command].make_context(command, arguments)
    assert parsed.params and not parsed.args


def test_help_names_the_commands() -> None:
    done = RUNNER.invoke(app, ["--help"])
    assert done.exit_code == 0 and all(f"  {name} " in done.stdout for name in ("plan", "break-even", "profile", "fit", "lint"))


def test_an_asynchronous_plan_takes_the_rows_with_which_the_whole_batch_is_done_first(tmp_path: Path) -> None:
    """Where each operation takes long to begin, a microbatch of one row takes nearly as long as the whole batch."""
    slow = Device("device", 1e9, 1e12, 1e9, seconds_per_operation=1.0)
    Machine.flat(4, bytes_per_second=1e12, latency_seconds=0.0, device=slow, overlap=True).save(tmp_path / "machine.toml")
    asked = ("--machine", str(tmp_path / "machine.toml"), "--schedule", "pipedream-2bw", "--json", str(tmp_path / "plan.json"))
    assert plan(*asked).exit_code == 0
    why = Partition.load(tmp_path / "plan.json").explanation
    assert why is not None and why.microbatches <= 4


def test_an_update_with_too_few_microbatches_for_its_pipeline_is_refused(machine: str) -> None:
    """PipeDream-2BW needs as many as are in flight on the first stage."""
    done = plan("--machine", machine, "--schedule", "pipedream-2bw", "--microbatches", "2", "--memory", "230kB")
    assert done.exit_code == 1
    assert "pipedream-2bw has 2 microbatches an update, the plan 1-1-1-1 needs 3" in done.stderr
