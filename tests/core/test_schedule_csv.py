"""Torch's CSV: the drawing is true, every cell says what it means, and both sides read what the other writes."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from torch.distributed.pipelining import schedules as peer

from pdcompiler.core import schedule_csv as core
from pdcompiler.core.lint import lint
from pdcompiler.core.schedule import Action, Schedule
from pdcompiler.core.schedule_csv import Op, read_cells, schedule_of, to_csv
from pdcompiler.passes.schedules.named import SCHEDULES, interleaved
from pdcompiler.passes.schedules.v_shaped import dualpipe_v, zb_v
from pdcompiler.schedule_strategies import any_schedules


def errors(text: str) -> list[str]:
    return [str(finding) for finding in lint(read_cells(text)) if finding.is_error]


def test_the_drawing_is_a_schedule() -> None:
    lines = [line.split()[0] for line in (core.__doc__ or "").splitlines() if line.startswith(("    0F0", "    1F0"))]
    assert schedule_of(read_cells("\n".join(lines))) == Schedule.parse("F0 F1 B0 B1 \n F0 B0 F1 B1 W0 W1")


@pytest.mark.parametrize(
    ("text", "ops"),
    [
        ("0F0", [Op(0, "F", 0)]),
        ("1B3", [Op(1, "B", 3)]),
        ("2I1", [Op(2, "I", 1)]),
        ("12W10", [Op(12, "W", 10)]),
        ("1SEND_F0", [Op(1, "SEND_F", 0)]),
        ("1RECV_B7", [Op(1, "RECV_B", 7)]),
        ("0UNSHARD", [Op(0, "UNSHARD")]),
        ("0REDUCE_GRAD", [Op(0, "REDUCE_GRAD")]),
        (" 0F0 ", [Op(0, "F", 0)]),
        ("(0F1;1B0)OVERLAP_F_B", [Op(0, "F", 1), Op(1, "B", 0)]),
        ("", []),
    ],
)
def test_a_cell_and_its_meaning(text: str, ops: list[Op]) -> None:
    (cell, _), *_ = read_cells(f"{text},0B9")
    assert (list(cell.ops), cell.wrong, cell.text) == (ops, (), text.strip())
    if text and not text.startswith("("):
        assert str(ops[0]) == text.strip()


@pytest.mark.parametrize(
    ("text", "ops", "wrong"),
    [
        ("0F0junk", [Op(0, "F", 0)], "'junk' stands after the action; torch reads 0F0 and says nothing"),
        ("0UNSHARD3", [Op(0, "UNSHARD")], "'3' stands after the action; torch reads 0UNSHARD and says nothing"),
        ("0F", [], "0F lacks its microbatch"),
        ("0X0", [], f"there is no action 'X'; expected one of {', '.join(core.KINDS)}"),
        ("F", [], "'F' is no action; expected a stage, an action and a microbatch: 0F0"),
        ("-1F0", [], "'-1F0' is no action; expected a stage, an action and a microbatch: 0F0"),
        ("(0F1;1B0", [], "its brackets do not match; expected (0F1;1B0)OVERLAP_F_B"),
        ("(0F1;1B0)OVERLAP", [Op(0, "F", 1), Op(1, "B", 0)], "the action after its brackets is 'OVERLAP', expected OVERLAP_F_B"),
        ("(0F1;0SEND_F1)OVERLAP_F_B", [Op(0, "F", 1)], "only F, B, I and W may stand in brackets"),
        ("(0F1;)OVERLAP_F_B", [Op(0, "F", 1)], "'' is no action; expected a stage, an action and a microbatch: 0F0"),
        (
            "(0F1;1B0)OVERLAP_F_B!",
            [Op(0, "F", 1), Op(1, "B", 0)],
            "'!' stands after the action; torch reads (0F1;1B0)OVERLAP_F_B and says nothing",
        ),
    ],
)
def test_what_is_wrong_with_a_cell(text: str, ops: list[Op], wrong: str) -> None:
    (_, cell), *_ = read_cells(f"0B9,{text}")
    assert (list(cell.ops), cell.wrong, cell.place) == (ops, (wrong,), f"rank 0, cell 1, {text}")


def test_the_text_form_has_cells_too() -> None:
    (first, second), (_, wrong) = read_cells("F0@0 B0@0  # the first\n\nF0 Bx\n")
    assert (first.ops, second.ops, second.place) == ((Op(0, "F", 0),), (Op(0, "B", 0),), "rank 0, cell 1, B0@0")
    assert wrong.wrong == ("it is no action; expected F, B or W, a microbatch, perhaps @stage: F0@0",)
    assert [cell.ops[0].kind for cell in read_cells("F0 B0 W0")[0]] == ["F", "I", "W"]


@given(any_schedules())
def test_every_form_parses_back(schedule: Schedule) -> None:
    for text in (str(schedule), to_csv(schedule), to_csv(schedule, communication=True)):
        rows = read_cells(text)
        assert schedule_of(rows) == schedule
        assert not [finding for finding in lint(rows) if finding.is_error], text


def test_communication_stands_where_torch_places_it() -> None:
    text = to_csv(Schedule.parse("F0 F1 B0 B1\nF0 B0 F1 B1"), communication=True)
    assert text == ("0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n1RECV_F0,1RECV_F1,1F0,1B0,1SEND_B0,1F1,1B1,1SEND_B1\n")


# Torch


def runtime(ranks: int, stages: int, microbatches: int) -> Any:
    """Torch's schedule runner, of stages that are not there."""
    made = object.__new__(peer._PipelineScheduleRuntime)
    made._stages, made._num_stages, made._n_microbatches, made.pp_group_size = [], stages, microbatches, ranks
    made.pipeline_order, made._defer_pp_recv = {}, False
    return made


def torch_makes(kind: Any, ranks: int, microbatches: int) -> Any:
    def remember(self: Any, stages: Any, n_microbatches: int, **_: Any) -> None:
        self.__dict__.update(runtime(ranks, 2 * ranks, n_microbatches).__dict__, _stages=stages)

    stage = types.SimpleNamespace(group_size=ranks, group_rank=0, num_stages=2 * ranks, submod=None)
    with mock.patch.object(peer._PipelineScheduleRuntime, "__init__", remember):
        return kind([stage] * 2, microbatches)


KINDS = [
    peer.ScheduleInterleaved1F1B, peer.ScheduleZBVZeroBubble, peer.ScheduleDualPipeV, peer.ScheduleInterleavedZeroBubble,
    peer.ScheduleLoopedBFS,
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_what_torch_writes_is_read_and_is_right(kind: Any, ranks: int, tmp_path: Path) -> None:
    made, found = torch_makes(kind, ranks, 2 * ranks), []
    for form in ("compute_only", "compute_comms"):
        made._dump_csv(str(tmp_path / "torch.csv"), format=form)
        rows = read_cells((tmp_path / "torch.csv").read_text())
        assert not [str(finding) for finding in lint(rows, ranks, 2 * ranks) if finding.is_error]
        found.append(schedule_of(rows).check())
    assert found[0] == found[1] and (found[0].stages, found[0].microbatches) == (2 * ranks, 2 * ranks)
    assert bool(found[0].split) == (kind not in (peer.ScheduleInterleaved1F1B, peer.ScheduleLoopedBFS))


OURS = [*(make(3, 5) for make in SCHEDULES.values()), interleaved(2, 5), zb_v(3, 4), dualpipe_v(2, 5)]


@pytest.mark.parametrize("schedule", [pytest.param(schedule, id=schedule.name) for schedule in OURS])
def test_torch_reads_and_simulates_what_we_write(schedule: Schedule, tmp_path: Path) -> None:
    loads(schedule, tmp_path)


@given(schedule=any_schedules())
def test_torch_reads_any_schedule(schedule: Schedule, tmp_path_factory: pytest.TempPathFactory) -> None:
    loads(schedule, tmp_path_factory.getbasetemp())


def loads(schedule: Schedule, folder: Path) -> None:
    path = folder / "own.csv"
    made = runtime(len(schedule.ranks), schedule.stages, schedule.microbatches)
    path.write_text(to_csv(schedule))
    made._load_csv(str(path))
    assert [[str(action) for action in made.pipeline_order[rank]] for rank in range(len(schedule.ranks))] == rows_of(path)
    path.write_text(to_csv(schedule, communication=True))
    made._load_csv(str(path), format="compute_comms")
    order = made.pipeline_order_with_comms
    assert [[str(action) for action in order[rank]] for rank in range(len(schedule.ranks))] == rows_of(path)
    ran = peer._simulate_comms_compute(order, made.stage_index_to_group_rank.__getitem__, schedule.stages)
    assert sum(action is not None for row in ran.values() for action in row) == sum(map(len, order.values()))


def rows_of(path: Path) -> list[list[str]]:
    return [line.split(",") for line in path.read_text().splitlines()]


def test_a_split_backward_is_i_and_w() -> None:
    assert to_csv(Schedule.parse("F0 F1 B0 B1 W1")) == "0F0,0F1,0B0,0I1,0W1\n"
    assert schedule_of(read_cells("0F0,,0I0,0W0,")).split == {(0, 0)}
    assert Op(1, "SEND_B", 0).action is None and Op(1, "I", 0).action == Action("B", 1, 0)
