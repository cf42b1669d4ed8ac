"""A partition as JSON: what is saved is loaded as an equal object, and docs/planning.md describes every key that is written."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pdcompiler.core.explanation import Border, Explanation
from pdcompiler.core.ir import ModuleCall
from pdcompiler.core.partition import Partition, StagePlan
from pdcompiler.core.plan import StageCost

PAGE = Path(__file__).parents[2] / "docs" / "planning.md"
ROW = re.compile(r"^\| (partition|stage|cost|explanation|border) \| `(\w+)` \| ?(.*?) \| (.+) \|$", re.MULTILINE)

COST = StageCost(0.1, 0.0, 0.03, 0.4, 0.25, 1e9, 1e9, 2e9, 3.5e8, 1e7, 3, 2)
BORDER = Border("layers.1#1", 1e6 / 3, None, 2.5)
WHY = Explanation("two servers", 4, None, "pipedream", 8, 2, 0.25, 0.2, "all cuts", None, 0.75, (BORDER,), 0.27, (4, 2, 0))
FIRST = StagePlan(("embed.weight", "é"), (ModuleCall("embed"), ModuleCall("layers.1", 1)), 400, 0.1, 333333, 3, True, COST)
SECOND = StagePlan(("head.weight", "embed.weight"), ())
FULL = Partition((FIRST, SECOND), "0123456789abcdef", 2, WHY)


@pytest.mark.parametrize(
    "partition",
    [
        FULL,
        replace(FULL, explanation=None),
        replace(FULL, explanation=replace(WHY, memory_bytes=16e9, one_device=1 / 3, data_parallel=None, borders=())),
        Partition((SECOND,)),
    ],
)
def test_what_is_saved_is_loaded_as_an_equal_object(partition: Partition, tmp_path: Path) -> None:
    partition.save(tmp_path / "plan.json")
    assert Partition.load(tmp_path / "plan.json") == partition
    assert Partition.from_json(partition.to_json()).to_json() == partition.to_json()
    json.loads(partition.to_json(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def written(partition: Partition) -> dict[str, list[str]]:
    """The keys of each kind of object in a partition's JSON, in order."""
    data: dict[str, Any] = json.loads(partition.to_json())
    stage, why = data["stages"][0], data["explanation"]
    objects = {"partition": data, "stage": stage, "cost": stage["cost"], "explanation": why, "border": why["borders"][0]}
    return {name: list(keys) for name, keys in objects.items()}


def test_every_key_that_is_written_is_described_and_no_other() -> None:
    described: dict[str, list[str]] = {}
    for row in ROW.finditer(PAGE.read_text()):
        described.setdefault(row[1], []).append(row[2])
        for unit in ("seconds", "bytes"):
            assert row[2].split("_")[-1] != unit or row[3] == unit, row[0]
    assert {name: sorted(keys) for name, keys in described.items()} == {name: sorted(k) for name, k in written(FULL).items()}


def test_what_a_hand_written_file_needs() -> None:
    text = '{"stages": [{"parameters": ["a"], "calls": ["x", "y#2"]}, {"parameters": [], "calls": []}]}'
    stages = StagePlan(("a",), (ModuleCall("x"), ModuleCall("y", 2))), StagePlan((), ())
    assert Partition.from_json(text) == Partition(stages)


def test_a_parted_module_call_has_no_stage() -> None:
    """Found by T5 in six stages: the norm's weight was on stage 0, and the rest of the block, without the norm, on stage 1."""
    parted = Partition(
        (
            StagePlan(("block.norm.weight",), ()),
            StagePlan(("block.linear.weight",), (ModuleCall("block"), ModuleCall("block.linear"))),
        )
    )
    assert parted.stage_of(ModuleCall("block.norm")) is None
    assert parted.stage_of(ModuleCall("block.dropout")) == 1
    assert parted.stage_of(ModuleCall("block.linear", 1)) == 1
    outer = Partition((StagePlan(("block.norm.weight",), (ModuleCall("block"),)), SECOND))
    assert outer.stage_of(ModuleCall("block.norm")) == 0, "the user need not name what is inside"
