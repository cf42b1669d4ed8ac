"""A cut becomes words that hold for every trace: parameters and module calls; and users may say the same words."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pdcompiler.compiler import choose_partition
from pdcompiler.core.errors import CompileError
from pdcompiler.core.ir import ModuleCall
from pdcompiler.core.partition import Partition
from pdcompiler.given_partition import read_partition
from tests.levels import TwoLayers, request, trace_of


class Shared(nn.Module):
    """Blocks of two layers each, a layer called three times, and a head tied to the start."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Linear(4, 4, bias=False)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))
        self.again = nn.Linear(4, 4)
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.start.weight
        self.unread = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x)
        for block in self.blocks:
            x = self.again(block(x))
        result: Tensor = self.head(x)
        return result


def partition_of(model: nn.Module, begins: Any, world_size: int) -> Partition:
    asked = request(model, world_size, partition=begins)
    return choose_partition(asked, trace_of(model, torch.zeros(2, 4), target=torch.zeros(2, 4), loss_fn=F.mse_loss), 5)


def test_stages_hold_parameters_and_whole_module_calls() -> None:
    partition = partition_of(Shared(), ("blocks.1", "head"), 3)
    first, second, third = partition.stages
    again, unread = ("again.weight", "again.bias"), ("unread.weight", "unread.bias")
    assert first.parameters == ("start.weight", "blocks.0.0.weight", "blocks.0.0.bias", *again, *unread)
    assert second.parameters == ("blocks.1.0.weight", "blocks.1.0.bias", "blocks.2.0.weight", "blocks.2.0.bias", *again)
    assert third.parameters == ("start.weight",)
    assert partition.owners()["start.weight"] == (0, 2) and partition.owners()["again.bias"] == (0, 1)
    assert [partition.stage_of(ModuleCall("again", number)) for number in range(3)] == [0, 1, 1]
    assert [partition.stage_of(ModuleCall(path)) for path in ("blocks.0", "blocks.2", "blocks")] == [0, 1, None]


def test_it_prints_as_a_table_with_reasons() -> None:
    """One device would do: a message of the default machine takes 60 us."""
    partition = partition_of(TwoLayers4(), ("second",), 2)
    assert str(partition).splitlines() == [
        "stage  modules  ranks  parameters  share  sends  compute  transfers  memory   of bottleneck",
        "0      first    0      160 B       50%    160 B  258 ns   120 us     1.2 KiB  100%",
        "1      second   1      144 B       50%    0 B    253 ns   120 us     976 B    100%",
        "one step of 1f1b takes 1.08 ms: the best of all cuts in the model's own order, one rank a stage",
        "walked action by action: 964 us",
        "one device: 4.09 us, 265 x as fast",
        "data parallelism: 122 us, 8.87 x as fast",
        "border before second: sends 160 B; no other cut",
    ]


class TwoLayers4(TwoLayers):
    """With four outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(8, 4)


def test_json_round_trip(tmp_path: Path) -> None:
    partition = partition_of(Shared(), ("blocks.1", "head"), 3)
    assert Partition.from_json(partition.to_json()) == partition
    partition.save(tmp_path / "plan.json")
    assert read_partition(tmp_path / "plan.json", Shared()) == partition
    assert read_partition(str(tmp_path / "plan.json"), Shared()) == partition


NO_PARTITIONS = ("", "[]", "{}", '{"stages": [{"parameters": ["w"]}]}', '{"stages": [{"parameters": 1, "calls": 2}]}')


@pytest.mark.parametrize("text", NO_PARTITIONS)
def test_a_text_that_is_no_partition_is_refused(text: str) -> None:
    with pytest.raises(CompileError, match=r"^the text is no partition: "):
        Partition.from_json(text)


def refused(message: str, begins: Any, world_size: int = 2) -> None:
    with pytest.raises(CompileError, match=message):
        partition_of(Shared(), read_partition(begins, Shared()), world_size)


def test_module_paths_that_are_no_places_are_refused() -> None:
    refused(r"^no module 'block\.1' runs in this model\n  try: one of \['blocks\.1', ", ["block.1"])
    refused(r"^no module 'unread' runs in this model", ["unread"])
    refused(r"^no stage can begin at 'start': the model begins there$", ["start"])
    refused(r"^the stage that begins at 'blocks\.0' does not come after the one before it", ["blocks.1", "blocks.0"], 3)


def test_a_partition_for_another_model_is_refused() -> None:
    partition = partition_of(TwoLayers4(), ("second",), 2)
    with pytest.raises(CompileError, match=r"^the partition is for another model: "):
        read_partition(partition, Shared())


def test_what_is_no_partition_is_refused() -> None:
    with pytest.raises(CompileError, match=r"^partition is a int\n  try: a Partition, a JSON file, or module paths$"):
        read_partition(3, Shared())


def test_a_file_that_is_not_there_is_refused() -> None:
    with pytest.raises(CompileError, match=r"^the partition's file blocks\.1 can't be read: No such file"):
        read_partition("blocks.1", Shared())


def test_the_fingerprint_may_be_left_out() -> None:
    partition = dataclasses.replace(partition_of(TwoLayers4(), ("second",), 2), model="")
    assert read_partition(partition, TwoLayers4()) == partition
