"""A partition written by hand: what is wrong with it is said when it is compiled, before any process group or message; nothing is
written, nothing of the model is changed. And what may be left out of one."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pdcompiler
from pdcompiler import CompileError, Machine, Partition
from pdcompiler.core.machine import Device
from pdcompiler.core.partition import StagePlan, parse_call
from tests.cases.against_loop import AgainstLoop, drawn, seeded

PLANNED = "\n  try: let pdcompiler choose the partition"


class Block(nn.Module):
    """A Linear, and a Tanh beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.tanh = nn.Linear(4, 4), nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.tanh(self.linear(x))


class Tied(nn.Module):
    """Two blocks between an embedding and a head that are one weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.head = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.head.weight = self.start.weight
        self.first, self.second = Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.second(self.first(self.start(x))))
        result: Tensor = self.head(hidden)
        return result


class Scaled(nn.Module):
    """x * scale."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale * (self.seen + 1)


class Counts(Scaled):
    """Counts its calls in the buffer of another module."""

    def __init__(self, other: Scaled) -> None:
        super().__init__()
        self.others = [other]  # in a list: not a module of this one

    def forward(self, x: Tensor) -> Tensor:
        self.others[0].seen += 1
        return super().forward(x)


class Counted(nn.Module):
    """`reads` and `counts` read a buffer, which the second writes."""

    def __init__(self) -> None:
        super().__init__()
        self.reads, self.last = Scaled(), nn.Linear(4, 4)
        self.counts = Counts(self.reads)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.counts(self.reads(x)))
        return result


Said = tuple[Sequence[str], Sequence[str]]
START: Said = (["start.weight"], ["start"])
FIRST: Said = (["first.linear.weight", "first.linear.bias"], ["first"])
SECOND: Said = (["second.linear.weight", "second.linear.bias"], ["second"])
HEAD: Said = (["start.weight"], ["head"])


def said(*stages: Sequence[Said]) -> Partition:
    """Stages of (parameters, module calls)."""
    plans = []
    for parts in stages:
        names, calls = ([text for part in parts for text in part[side]] for side in (0, 1))
        plans.append(StagePlan(tuple(names), tuple(map(parse_call, calls))))
    return Partition(tuple(plans))


def test_modules_may_be_named_without_those_inside() -> None:
    """first.linear and first.tanh stand where `first` does; relu, which is of no module, stands where its input is made."""
    partition = said([START, FIRST], [SECOND, HEAD])
    checked = AgainstLoop(seeded(Tied), 2, loss_fn=F.mse_loss, partition=partition)
    checked.step(drawn(8, 4), target=drawn(8, 4, seed=1))
    assert [stage.parameters for stage in checked.pipe.stages] == [stage.parameters for stage in partition.stages]
    assert str(partition).splitlines()[1].split()[:4] == ["0", "start", "...", "first"]


def swapped(part: Said, old: str, new: str) -> Said:
    return [text.replace(old, new) for text in part[0]], [text.replace(old, new) for text in part[1]]


WITHOUT_BIAS: Said = (["second.linear.weight"], ["second"])
WRONG: dict[str, tuple[Partition, str]] = {
    "a parameter is forgotten": (
        said([START, FIRST], [WITHOUT_BIAS, HEAD]),
        "the partition forgets 1 of the model's parameters: second.linear.bias\n"
        "  try: add each to the stage that reads it" + PLANNED,
    ),
    "a parameter by another name": (
        said([START, FIRST], [SECOND, (["head.weight"], ["head"])]),
        "stage 1 of the partition has the parameter 'head.weight', the model does not\n"
        "  try: 'start.weight', the first name of the same parameter",
    ),
    "a parameter that the model does not have": (
        said([START, FIRST], [swapped(SECOND, "second.linear.bias", "second.linear.bais"), HEAD]),
        "stage 1 of the partition has the parameter 'second.linear.bais', the model does not\n"
        "  try: one of ['second.linear.bias', ",
    ),
    "a parameter twice": (
        said([START, START, FIRST], [SECOND, HEAD]), "stage 0 of the partition has the parameter 'start.weight' twice",
    ),
    "a module that the model does not have": (
        said([START, FIRST], [SECOND, (["start.weight"], ["haed"])]),
        "stage 1 of the partition has the module call 'haed', the model has no such module\n  try: one of ['head'",
    ),
    "a module call on two stages": (
        said([START, FIRST, ([], ["second"])], [SECOND, HEAD]),
        "the partition puts the module call 'second' on stages 0 and 1\n"
        "  try: name it on one; a call that lies on several stages is not named, the calls inside it are",
    ),
    "stages that are not contiguous": (
        said([START, SECOND], [FIRST, HEAD]),
        "the partition is not contiguous: first of stage 1 runs before second.linear of stage 0, which needs what it makes\n"
        "  at: second.linear",
    ),
    "a module without parameters that is not contiguous": (
        said([START, ([], ["second.tanh"])], [FIRST, SECOND, HEAD]),
        "the partition is not contiguous: second.linear of stage 1 runs before second.tanh of stage 0, which needs what it "
        "makes\n  at: second.tanh",
    ),
    "a module call is forgotten": (
        said([START, (FIRST[0], ["first.linear"])], [SECOND, HEAD]),
        "the partition forgets 2 of the model's module calls: first.tanh, first\n"
        "  try: add 'first.tanh' to the calls of stage 0, which makes its inputs, or of a later one" + PLANNED,
    ),
    "weight and bias apart": (
        said([START, FIRST, (["second.linear.bias"], [])], [WITHOUT_BIAS, HEAD]),
        "the partition parts what must stand together: one operation reads second.linear.weight of stage 1 and "
        "second.linear.bias of stage 0\n  at: second.linear",
    ),
    "a module and its parameters apart": (
        said([START, FIRST, ([], ["second.linear"])], [(SECOND[0], []), HEAD]),
        "the partition parts what must stand together: second.linear of stage 0 reads second.linear.weight of stage 1\n"
        "  at: second.linear",
    ),
    "a parameter on a stage that does not read it": (
        said([START, FIRST, (["second.linear.weight"], [])], [SECOND, HEAD]),
        "the partition puts second.linear.weight on stages 0 and 1, but no operation of stage 0 reads it\n"
        "  try: leave it out of stage 0" + PLANNED,
    ),
}  # fmt: skip


def state(model: nn.Module) -> Mapping[str, Any]:
    """All that a user could see of it."""
    values = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modes = {name: (module.training, sorted(vars(module))) for name, module in model.named_modules()}
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"values": {name: value.tolist() for name, value in values.items()}, "modes": modes, "gradients": gradients}


def refused(build: Callable[[], nn.Module], partition: Any, **options: Any) -> str:
    """What is said of it; the model stays as it was."""
    model = seeded(build)
    before = state(model)
    given = {"example_args": (drawn(8, 4),), "example_target": drawn(8, 4), "loss_fn": F.mse_loss, **options}
    with pytest.raises(CompileError) as caught:
        pdcompiler.compile(model, 2, partition=partition, **given)
    assert state(model) == before
    return str(caught.value)


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_is_said(case: str, tmp_path: Path) -> None:
    """As an object and as a file; the file stays as it was, and no other appears."""
    partition, message = WRONG[case]
    assert refused(Tied, partition).startswith(message)
    file = tmp_path / "partition.json"
    partition.save(file)
    text = file.read_text()
    assert refused(Tied, file).startswith(message)
    assert [path.name for path in tmp_path.iterdir()] == ["partition.json"] and file.read_text() == text


@pytest.mark.usefixtures("launched")
def test_a_buffers_update_and_its_readers_stand_together() -> None:
    partition = said([(["reads.scale"], ["reads"])], [(["counts.scale", "last.weight", "last.bias"], ["counts", "last"])])
    assert refused(Counted, partition).startswith(
        "the partition parts what must stand together: the update of buffer reads.seen and what reads it\n  at: reads ("
    )
    assert refused(Counted, ["counts"]).startswith("no stage can begin at 'counts': that would part a buffer's update")


class Lengths(nn.Module):
    """Its second module reads as many rows as the first finds positive."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.chosen, self.scaled, self.head = nn.Linear(4, 4), Chosen(), Scaled(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.linear(x) + self.scaled(self.chosen(self.linear(x))).sum(0))
        return result


class Chosen(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[(x > 0).all(1).nonzero().squeeze(1)]


@pytest.mark.usefixtures("launched")
def test_a_value_of_data_dependent_shape_and_its_readers_stand_together() -> None:
    first: Said = (["linear.weight", "linear.bias"], ["linear", "chosen"])
    partition = said([first], [(["scaled.scale", "head.weight", "head.bias"], ["scaled", "head"])])
    assert refused(Lengths, partition).startswith(
        "the partition parts what must stand together: a value whose shape depends on data and what reads it\n  at: chosen ("
    )


def roomy(nbytes: float) -> Machine:
    return Machine.flat(device=Device("small", 1e9, 1e9, nbytes))


@pytest.mark.usefixtures("launched")
def test_a_stage_that_the_memory_does_not_hold_is_refused() -> None:
    """By its cuts and by its words; with the kinds of bytes, and what the best plan would need."""
    for partition in (["head"], said([START, FIRST, SECOND], [HEAD])):
        text = refused(Tied, partition, machine=roomy(1700))
        what, parts, *ways = text.splitlines()
        assert what.startswith("stage 0 of 2 of the given partition needs ") and what.endswith(", the device has 1.7 KiB")
        assert parts == (
            "  of it: weights 448 B, gradients 448 B, saved values of 2 microbatches in flight 640 B, working memory 192 B"
        )
        assert ways[0].startswith("  try: let pdcompiler choose the partition (at most ")
        assert ways[1:] == ["  try: fewer rows in a microbatch", "  try: more devices, or some with more memory"]


@pytest.mark.usefixtures("launched")
def test_a_memory_that_no_partition_fits_says_what_would() -> None:
    """A given partition has then no better one to propose."""
    text = refused(Tied, None, machine=roomy(1000))
    where = "with all cuts in the model's own order, one rank a stage"
    assert text.startswith(f"stage 0 of 2 needs 1.1 KiB, the device has 1000 B\n  {where}, no plan needs less; of it: weights ")
    assert "try: let pdcompiler choose" not in refused(Tied, ["head"], machine=roomy(1000))


@pytest.mark.parametrize("partition", [None, ["head"], said([START, FIRST, SECOND], [HEAD])], ids=["planned", "cuts", "stages"])
def test_where_only_an_optimizer_without_state_fits_there_is_a_warning(partition: Any) -> None:
    """`compile` is not told the optimizer, so it refuses no model that SGD could train."""
    batch: dict[str, Any] = {"example_args": (drawn(8, 4),), "example_target": drawn(8, 4), "loss_fn": F.mse_loss}
    memory = 1400 if partition is None else 2400
    told = r"only an optimizer without state fits; with two values .* needs [0-9.]+ KiB, the device has"
    with pytest.warns(UserWarning, match=told):
        assert pdcompiler.compile(seeded(Tied), 2, partition=partition, machine=roomy(memory), **batch).partition.stages


def test_a_stage_that_the_memory_holds_is_not_refused() -> None:
    """Nor is any where nobody knows the memory."""
    model = seeded(Tied)
    batch: dict[str, Any] = {"example_args": (drawn(8, 4),), "example_target": drawn(8, 4), "loss_fn": F.mse_loss}
    for partition in (["head"], said([START, FIRST, SECOND], [HEAD])):
        for machine in (None, "laptop", roomy(1e5)):
            assert pdcompiler.compile(model, 2, partition=partition, machine=machine, **batch).partition.stages


@pytest.mark.parametrize("name", ["pipelines", "replicas"])
def test_numbers_below_one_are_no_partition(name: str) -> None:
    data = json.loads(said([START, FIRST], [SECOND, HEAD]).to_json())
    (data if name == "pipelines" else data["stages"][0])[name] = -1
    with pytest.raises(CompileError, match=f"^the text is no partition: ValueError: {name} is -1"):
        Partition.from_json(json.dumps(data))
