"""Bad input: what a user is told, and that it comes before any process group is made.

Every case runs as one of the launched ranks would (RANK and WORLD_SIZE set), where making a group is forbidden.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pdcompiler
from pdcompiler import CompileError, Machine, Partition, Pipeline, Schedule
from tests.cases.against_loop import drawn, drawn_integers, layers, seeded

pytestmark = pytest.mark.usefixtures("launched")


def told(call: Callable[[], Any]) -> str:
    """The text of the CompileError that a call raises."""
    with pytest.raises(CompileError) as caught:
        call()
    return str(caught.value)


def pipeline(model: nn.Module | None = None, world_size: int = 2, **options: Any) -> Pipeline:
    return pdcompiler.compile(layers(3) if model is None else model, world_size, **{"loss_fn": F.mse_loss, **options})


def stepped(model: nn.Module | None = None, **options: Any) -> Any:
    """One step of a new pipeline, on 8 rows."""
    return pipeline(model, **options).step(drawn(8, 4), target=drawn(8, 4, seed=1))


ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "world size is not the launched one": (
        {"world_size": 4},
        "world_size is 4, but 2 processes were launched\n"
        "  try: compile(model, 2, ...)\n"
        "  try: torchrun --nproc-per-node 4, or without torchrun: all ranks then run in one process",
    ),
    "world size 0": ({"world_size": 0}, "world_size is 0, expected 1 or more"),
    "unknown schedule": (
        {"schedule": "1b1f"},
        "there is no schedule '1b1f'\n  try: one of ['1f1b', 'auto', 'dualpipe-v', 'gpipe', 'interleaved', 'pipedream', "
        "'pipedream-2bw', 'zb-h1', 'zb-h2', 'zb-v']\n  try: a Schedule\n  try: its file",
    ),
    "schedule's file that is not there": (
        {"schedule": "no/such.csv"}, "the schedule no/such.csv can't be read: No such file or directory",
    ),
    "schedule for another number of ranks": (
        {"schedule": Schedule.parse("F0 B0\nF0 B0\nF0 B0")}, "the schedule is for 3 ranks and 3 stages, world_size is 2",
    ),
    "microbatches 0": ({"microbatches": 0}, "microbatches is 0, expected 1 or more"),
    "microbatches of the schedule": (
        {"schedule": Schedule.parse("F0 F1 B0 B1\nF0 F1 B0 B1"), "microbatches": 4},
        "the schedule is for 2 microbatches, microbatches is 4",
    ),
    "module paths for another number of ranks": (
        {"partition": ["1", "2"]}, "the partition has 3 stages, world_size is 2\n  try: world_size=3",
    ),
    "no such file": (
        {"partition": "layers.4"},
        "the partition's file layers.4 can't be read: No such file or directory\n"
        "  try: module paths at which stages begin are given as a list",
    ),
    "a machine without so many devices": (
        {"machine": Machine.flat(1)},
        "world_size is 2, machine 'flat' has 1\n  try: world_size=1 or less\n  try: a machine with 2 devices",
    ),
    "no such machine": (
        {"machine": "cluster.toml"},
        "the machine's file cluster.toml can't be read: No such file or directory\n"
        "  try: a ready machine: laptop, pipedream-a, pipedream-b, pipedream-c, h100-servers",
    ),
    "a machine of no kind": (
        {"machine": 3}, "machine is a int, expected a Machine, a ready name, or a TOML file",
    ),
    "a partition of no kind": (
        {"partition": 3}, "partition is a int\n  try: a Partition, a JSON file, or module paths",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ARGUMENTS)
def test_arguments_of_compile(case: str) -> None:
    options, message = ARGUMENTS[case]
    assert told(lambda: pipeline(**options)) == message


def test_a_machine_by_name_or_file_is_as_large_as_the_pipeline(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    Machine.load("pipedream-b").save(file)
    for machine in ("pipedream-b", file, str(file), Machine.load("pipedream-b")):
        assert pipeline(machine=machine).request.machine == Machine.load("pipedream-b").take(2)


def test_a_model_that_is_no_module() -> None:
    assert told(lambda: pdcompiler.compile(torch.tanh, 2)) == (  # type: ignore[arg-type]
        "model is a builtin_function_or_method, expected an nn.Module"
    )


def test_case_36_more_ranks_than_the_model_can_be_cut_into(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert told(lambda: stepped(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double(), world_size=8)) == (
        "8 stages asked for, but the model can be cut in at most 2 stages\n  try: world_size=2 or less"
    )


def test_an_unknown_module_path() -> None:
    assert told(lambda: stepped(partition=["1.linear"])).startswith("no module '1.linear' runs in this model\n  try: one of ['1.")


def test_a_partition_file_for_another_model(tmp_path: Path) -> None:
    """It names what differs: parameters that only one of the two has, else the shapes."""
    file = tmp_path / "partition.json"
    planned = pdcompiler.compile(layers(3), 2, loss_fn=F.mse_loss, partition=["1"])
    planned.runner.rank = None  # plan in this process
    planned.step(drawn(8, 4), target=drawn(8, 4))
    planned.partition.save(file)
    assert Partition.load(file) == planned.partition
    assert told(lambda: pipeline(layers(4), partition=file)) == (
        "the partition is for another model: 2 parameters of this one are not in it (3.0.bias, 3.0.weight)\n"
        "  try: let pdcompiler choose the partition"
    )
    assert told(lambda: pipeline(layers(2), partition=str(file))) == (
        "the partition is for another model: 2 parameters of it are not in this one (2.0.bias, 2.0.weight)\n"
        "  try: let pdcompiler choose the partition"
    )
    assert told(lambda: pipeline(layers(3, width=5), partition=str(file))) == (
        "the partition is for another model: its parameters have the same names and other shapes\n"
        "  try: let pdcompiler choose the partition"
    )


def test_a_file_that_is_no_partition(tmp_path: Path) -> None:
    file = tmp_path / "partition.json"
    file.write_text('{"stages": [{"calls": []}]}')
    assert told(lambda: pipeline(partition=file)).startswith("the text is no partition: KeyError: 'parameters'\n  try: {")


@pytest.mark.parametrize(
    "use", [lambda p: list(p.parameters()), lambda p: p.state_dict(), lambda p: p.partition, lambda p: p.ranks]
)
def test_no_example_and_no_batch(use: Callable[[Pipeline], Any]) -> None:
    assert told(lambda: use(pipeline())) == (
        "nothing is compiled yet\n  try: give example_args or example_kwargs to compile\n  try: take a step first"
    )


def test_no_loss_to_be_found() -> None:
    assert told(lambda: pipeline(loss_fn=None).step(drawn(8, 4))) == (
        "no loss to be found in the model's output, a tensor of shape [rows, 4]\n"
        "  try: compile with loss_fn=, a function of (outputs, target)\n"
        "  try: let the model return its loss (a Hugging Face model does so when it is given labels)"
    )


def test_a_target_without_loss_fn() -> None:
    expected = "a target was given, but the pipeline has no loss_fn\n  try: compile(..., loss_fn=...)"
    assert told(lambda: stepped(loss_fn=None)) == expected
    assert told(lambda: pipeline(loss_fn=None, example_args=(drawn(8, 4),), example_target=drawn(8, 4))) == expected


def test_a_loss_that_is_not_one_number() -> None:
    assert told(lambda: stepped(loss_fn=lambda out, y: (out - y).pow(2).mean(1))) == (
        "the loss has shape [rows], a training step needs one number\n  try: return its mean or sum"
    )
    assert told(lambda: stepped(loss_fn=lambda out, y: 0.5)) == (
        "the loss is a float, a training step needs a tensor of one number\n  try: compute it from the outputs with torch"
    )


def test_a_loss_that_depends_on_no_parameter() -> None:
    assert told(lambda: stepped(loss_fn=lambda out, y: F.mse_loss(out.detach(), y))) == (
        "the loss does not depend on any trainable parameter\n  try: check for detach, no_grad and frozen parameters"
    )


def test_batch_dims_of_an_unknown_input() -> None:
    assert told(lambda: stepped(batch_dims={"inputs": 0})) == "batch_dims names ['inputs'], the inputs are ['input', 'target']"
    assert told(lambda: stepped(batch_dims={"input": 2})) == "batch_dims: input has 2 dimensions, there is no dimension 2"


def test_inputs_without_rows() -> None:
    assert told(lambda: pipeline().step(drawn(0, 4), target=drawn(0, 4))) == "the batch has no rows"
    assert told(lambda: pipeline(batch_dims={"input": 0, "target": 0}).step(drawn(8, 4), target=drawn(7, 4))) == (
        "the inputs disagree in the number of rows: {'input': 8, 'target': 7}"
    )


class Opaque:
    """Holds tensors where nobody sees them."""


def test_values_of_unknown_types() -> None:
    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor, cache: Any = None) -> Any:
            return {"out": self.second(self.first(x)), "cache": Opaque()}

    model = seeded(Takes)
    pipe = pdcompiler.compile(model, 2, loss_fn=lambda out, y: F.mse_loss(out["out"], y))
    assert told(lambda: pipe.step(drawn(8, 4), cache=Opaque(), target=drawn(8, 4))) == (
        f"cache is a {Opaque.__module__}.Opaque, which is neither a tensor, nor a plain value, nor a container of such\n"
        "  try: pass its tensors in a dict, list, tuple or dataclass"
    )
    pipe.runner.rank = None  # from here on in this process
    with pytest.warns(UserWarning, match=r"the output cache \(Opaque\) is of a type that can't leave the pipeline"):
        outputs = pipe.step(drawn(8, 4), target=drawn(8, 4), outputs="all").outputs
    assert outputs["cache"] is None and outputs["out"].shape == (8, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe.step(drawn(8, 4), target=drawn(8, 4))  # told once


def test_a_model_on_the_meta_device_without_values() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    pipe = pipeline(model)
    pipe.runner.rank = None  # in this process
    x = torch.randn(8, 4)
    assert told(lambda: pipe.step(x, target=x)) == (
        "4 tensors of a model on the meta device have no values: 0.bias, 0.weight, 2.bias, ...\n"
        "  try: pipe.load_state_dict(state)\n"
        "  try: compile(..., init=function of (name, tensor))"
    )
    plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    pipe.load_state_dict(plain.state_dict())
    loss = pipe.step(x, target=x).loss
    assert loss is not None and torch.allclose(loss, F.mse_loss(plain(x), x))


def test_loss_weights_that_make_no_sense() -> None:
    assert told(lambda: stepped(loss_weight="tokens")) == (
        "loss_weight is 'tokens'\n  try: \"rows\", \"sum\", or a function of the microbatch"
    )
    assert told(lambda: stepped(loss_weight=lambda part: 0, microbatches=2)) == (
        "loss_weight gave [0.0, 0.0]: weights are 0 or more, and not all 0"
    )


def test_outputs_that_are_not_joined() -> None:
    assert told(lambda: pipeline().step(drawn(8, 4), target=drawn(8, 4), outputs="first")) == (
        'outputs is \'first\', not "none", "last" or "all"'
    )


def test_too_many_positional_arguments() -> None:
    assert told(lambda: pipeline().step(drawn(8, 4), drawn_integers(4, 8), target=drawn(8, 4))) == (
        "Sequential.forward takes 1 positional arguments, got 2"
    )


def test_an_input_that_wants_a_gradient_is_refused() -> None:
    pipe = pdcompiler.compile(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), 2, loss_fn=F.mse_loss)
    with pytest.raises(CompileError, match="the inputs input want a gradient"):
        pipe.step(torch.randn(4, 4, requires_grad=True), target=torch.randn(4, 4))
