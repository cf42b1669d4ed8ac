"""`pdcompiler profile` and `pdcompiler fit`: files that the planner reads, tables for people; bad input told, nothing written."""

from __future__ import annotations

from dataclasses import replace
from math import inf, isclose
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner, Result

from pdcompiler.cli import app
from pdcompiler.commands import costs
from pdcompiler.compiler import fingerprint
from pdcompiler.core.graph_txt import Graph
from pdcompiler.core.machine import Machine
from pdcompiler.core.profile import Measured, Profile

RUNNER = CliRunner()
HERE = "tests.commands.test_costs"


class Tied(nn.Module):
    """A tied embedding, an index buffer, a mask: what random values must leave usable."""

    positions: Tensor
    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(50, 16), nn.LayerNorm(16), nn.Linear(16, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("positions", torch.arange(8))
        self.register_buffer("mask", torch.ones(8, dtype=torch.bool))

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        x = self.norm(self.embedding(ids) + self.embedding(self.positions)) * self.mask[:, None]
        return {"loss": nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())}


def tied() -> tuple[nn.Module, dict[str, Tensor]]:
    return Tied(), {"ids": torch.randint(50, (4, 8))}


def on_meta() -> tuple[nn.Module, dict[str, Tensor]]:
    with torch.device("meta"):
        return Tied(), {"ids": torch.zeros(4, 8, dtype=torch.long)}


def huge() -> tuple[nn.Module, dict[str, Tensor]]:
    with torch.device("meta"):
        return nn.Linear(10**7, 10**7), {"input": torch.zeros(4, 10**7)}


def never() -> None:
    raise AssertionError("the model is made before the arguments are checked")


def profile(output: Path, *options: str, model: str = "tied") -> Result:
    return RUNNER.invoke(app, ["profile", f"{HERE}:{model}", "-o", str(output), "--repetitions", "2", *options])


def fit(*arguments: object) -> Result:
    return RUNNER.invoke(app, ["fit", *map(str, arguments)])


def test_a_model_is_measured_and_the_tables_are_shown(tmp_path: Path) -> None:
    done = profile(tmp_path / "profile.json", "--rows", "3")
    assert done.exit_code == 0, done.output
    found = Profile.load(tmp_path / "profile.json")
    assert (found.model, found.rows, found.dtype) == (fingerprint(Tied()), 3, "float32")
    assert found.forward_seconds > 0 and found.backward_seconds > 0
    assert done.stdout == f"{found}\nwritten to {tmp_path / 'profile.json'}\n"


@pytest.mark.parametrize("device", [(), ("--device", "cpu")])
def test_a_model_on_the_meta_device_is_measured_with_random_weights(tmp_path: Path, device: tuple[str, ...]) -> None:
    done = profile(tmp_path / "profile.json", *device, model="on_meta")
    assert done.exit_code == 0, done.output
    found = Profile.load(tmp_path / "profile.json")
    assert found.model == fingerprint(Tied()) and found.rows == 4  # tied parameters stay tied
    assert "the model is on the meta device: measured with random weights\n" in done.stdout


def test_the_layers_as_a_graph_txt(tmp_path: Path) -> None:
    done = profile(tmp_path / "profile.json", "--graph", str(tmp_path / "graph.txt"))
    assert done.exit_code == 0 and done.stdout.endswith(f"written to {tmp_path / 'profile.json'} and {tmp_path / 'graph.txt'}\n")
    found, layers = Profile.load(tmp_path / "profile.json"), Graph.load(tmp_path / "graph.txt").to_workload()
    assert layers.seconds.sum() == pytest.approx(found.seconds, rel=1e-9)
    assert layers.forward.sum() == pytest.approx(found.forward_seconds, rel=1e-9)
    assert any("norm" in name for name in layers.names) and layers.parameters.sum() >= 50 * 16 * 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--rows", "0"), "--rows is 0, expected 1 or more"),
        (("--repetitions", "-1"), "--repetitions is -1, expected 1 or more"),
        (("--device", "gpu"), "--device is 'gpu': "),
        (("--device", "meta"), "there is no clock for device 'meta'"),
        (("--device", "cuda:99"), "--device is 'cuda:99', this computer has "),
        (("--graph", "nowhere/graph.txt"), "nowhere/graph.txt can't be written: there is no folder nowhere"),
        (("--graph", "profile.json"), "two results are to be written to profile.json"),
        (("-o", "."), ". can't be written: it is a folder"),
    ],
)
def test_arguments_are_checked_before_the_model_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], message: str
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    done = profile(Path("profile.json"), *options, model="never")
    assert done.exit_code == 1 and done.stderr.startswith(f"CompileError: {message}")
    assert not list(tmp_path.iterdir()) and done.stdout == ""


def test_a_model_larger_than_the_memory_is_refused_before_it_gets_any(tmp_path: Path) -> None:
    done = profile(tmp_path / "profile.json", model="huge")
    assert done.exit_code == 1 and "the model's parameters and buffers need 363.8 TiB, cpu has " in done.stderr
    assert "profile it with fewer layers" in done.stderr and not list(tmp_path.iterdir())


def test_nothing_is_written_where_measuring_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "profile.json").write_text("the last one")
    monkeypatch.setattr(costs, "profile_trace", lambda *args, **kwargs: replace(PROFILE, operations=()))
    done = profile(tmp_path / "profile.json", "--graph", str(tmp_path / "graph.txt"))
    assert done.exit_code == 1 and "no operation that took any time" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["profile.json"]
    assert (tmp_path / "profile.json").read_text() == "the last one"


# Fitting

SIZES = [(8e9, 1e7), (1e9, 4e7), (1e6, 1e8), (1e3, 1e4), (2e6, 6e6)]
OPERATIONS = tuple(
    Measured("", False, "mm.default", k, "product", flops / 4e12 + moved / 5e11 + 3e-6, flops, moved, 1)
    for k, (flops, moved) in enumerate(SIZES)
)
PROFILE = Profile("0123456789abcdef", "GPU", 8, "float32", 1.0, 0.0, 1.0, OPERATIONS)


def test_the_constants_are_shown_and_written_as_a_machine(tmp_path: Path) -> None:
    first, second, toml = tmp_path / "1.json", tmp_path / "2.json", tmp_path / "machine.toml"
    replace(PROFILE, operations=OPERATIONS[:2]).save(first)
    replace(PROFILE, operations=OPERATIONS[2:]).save(second)
    done = fit(first, second, "--name", "mine", "--toml", toml, "--memory", "80 GB", "--machine", "h100-servers")
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[0] == "mine: 4000.0 GFLOP/s, 500.0 GB/s, 3.0 us per operation"
    assert done.stdout.splitlines()[-1].endswith("this device with 74.5 GiB of memory, and the links of machine 'h100-servers'")
    machine, given = Machine.load(toml), Machine.load("h100-servers")
    ((device, count),) = machine.devices
    assert (machine.name, machine.levels, count, machine.overlap) == ("mine", given.levels, given.devices[0][1], given.overlap)
    assert (device.name, device.memory_bytes) == ("mine", 80e9) and isclose(device.flops_per_second, 4e12, rel_tol=1e-6)


def test_a_machine_of_its_own_with_the_laptops_links_which_plan_reads(tmp_path: Path) -> None:
    measured, toml = tmp_path / "profile.json", tmp_path / "machine.toml"
    assert profile(measured).exit_code == 0 and fit(measured, "--toml", toml).exit_code == 0
    assert fit(measured).stdout.splitlines() == fit(measured, "--toml", toml).stdout.splitlines()[:-1]
    machine = Machine.load(toml)
    assert machine.name == Profile.load(measured).device and machine.levels == Machine().levels
    assert machine.devices[0][0].memory_bytes == inf
    words = ["plan", f"{HERE}:on_meta", "--world-size", "2"]
    done = RUNNER.invoke(app, [*words, "--machine", str(toml), "--profile", str(measured)])
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere.json",), "the profile's file nowhere.json can't be read: No such file or directory"),
        (("a.json", "text.json"), "text.json: the text is no profile"),
        (("a.json", "cpu.json"), "the profiles are of different devices: CPU, GPU"),
        (("a.json", "half.json"), "the profiles are of different dtypes: bfloat16, float32"),
        (("a.json", "--memory", "16GB"), "--memory is for the machine that --toml writes"),
        (("a.json", "--toml", "m.toml", "--memory", "16 Gbit"), '--memory: "16 Gbit" is in bits'),
        (("a.json", "--toml", "m.toml", "--machine", "nowhere"), "the machine's file nowhere can't be read"),
        (("a.json", "--toml", "nowhere/m.toml"), "nowhere/m.toml can't be written: there is no folder nowhere"),
        (("a.json", "--toml", "m.toml", "--machine", "mixed.toml"), "machine 'mixed' has 2 kinds of devices"),
    ],
)
def test_what_cannot_be_fitted_is_told_and_nothing_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    PROFILE.save("a.json")
    replace(PROFILE, device="CPU").save("cpu.json")
    replace(PROFILE, dtype="bfloat16").save("half.json")
    Path("text.json").write_text("[]")
    base = Machine.load("h100-servers")
    replace(base, name="mixed", devices=((base.devices[0][0], 8), (base.devices[0][0], None))).save("mixed.toml")
    before = sorted(tmp_path.iterdir())
    done = fit(*arguments)
    assert done.exit_code == 1 and done.stderr.startswith(f"CompileError: {message}")
    assert sorted(tmp_path.iterdir()) == before and done.stdout == ""
