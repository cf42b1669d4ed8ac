"""The named schedules beside torch.distributed.pipelining's tables, which torch makes here, and beside the papers' bubbles.

At unit costs: F, B and W take 1 each, messages nothing. `held`: microbatches of a rank's stages between F and W (or whole B).
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
from torch.distributed.pipelining import schedules as peer

from pdcompiler import CompileError
from pdcompiler.core.schedule import Action, Phase, Schedule
from pdcompiler.core.timing import unit_timing
from pdcompiler.passes.schedules.named import SCHEDULES, gpipe, interleaved, one_f_one_b, zb_h1, zb_h2
from pdcompiler.passes.schedules.v_shaped import dualpipe_v, zb_v

PHASES: dict[str, Phase] = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "B", "BACKWARD_WEIGHT": "W"}
SIZES = [(ranks, microbatches) for ranks in range(1, 5) for microbatches in range(1, 4 * ranks + 2)] + [
    (ranks, rounds * ranks + more) for ranks in range(5, 9) for rounds in range(1, 5) for more in (-1, 0, 1)
]
"""Ranks and microbatches: all for few ranks; for more those about a whole number of rounds."""


def span(schedule: Schedule) -> float:
    """When everything is done, at unit costs."""
    return unit_timing(schedule).finish


def bubble(schedule: Schedule) -> float:
    """What a rank waits: all have equally much to do."""
    return span(schedule) - 3 * schedule.microbatches * schedule.stages / len(schedule.ranks)


def held(schedule: Schedule) -> list[int]:
    """The most that each rank holds at once."""
    most = []
    for actions in schedule.ranks:
        now, peak = 0, 0
        for action in actions:
            ends = action.phase == "W" or (action.phase == "B" and (action.stage, action.microbatch) not in schedule.split)
            now += (action.phase == "F") - ends
            peak = max(peak, now)
        most.append(peak)
    return most


def torch_schedule(kind: Any, ranks: int, microbatches: int, stages_per_rank: int) -> Schedule:
    """What torch makes for stages that are not there."""

    def remember(self: Any, stages: Any, n_microbatches: int, **_: Any) -> None:
        self._stages, self._num_stages, self._n_microbatches = stages, stages[0].num_stages, n_microbatches

    stage = types.SimpleNamespace(group_size=ranks, group_rank=0, num_stages=stages_per_rank * ranks, submod=None)
    runtime = peer._PipelineScheduleRuntime
    with mock.patch.object(runtime, "__init__", remember), mock.patch.object(runtime, "_prepare_schedule_with_comms"):
        made = kind([stage] * stages_per_rank, microbatches)
    return Schedule(tuple(tuple(actions_of(made.pipeline_order[rank])) for rank in range(ranks)), "torch")


def actions_of(row: list[Any]) -> Iterator[Action]:
    """A row of torch's table: idle cells left out, fused ones taken apart."""
    for cell in row:
        if cell is not None and cell.sub_actions is not None:
            yield from actions_of(list(cell.sub_actions))
        elif cell is not None and cell.computation_type.name != "REDUCE_GRAD":
            yield Action(PHASES[cell.computation_type.name], cell.stage_index, cell.microbatch_index)


@pytest.mark.parametrize(("own", "kind"), [(gpipe, peer.ScheduleGPipe), (one_f_one_b, peer.Schedule1F1B)])
def test_gpipe_and_1f1b_are_torchs(own: Callable[..., Schedule], kind: Any) -> None:
    """Torch's 1f1b takes no fewer microbatches than ranks; its table numbers the last rank's forwards from 1, one too high."""
    for ranks, microbatches in SIZES:
        if microbatches >= ranks:
            table = kind._get_pipeline_order(types.SimpleNamespace(_num_stages=ranks, _n_microbatches=microbatches))
            *others, last = (list(actions_of(table[rank])) for rank in range(ranks))
            if own is one_f_one_b:
                last = [Action(a.phase, a.stage, a.microbatch - (a.phase == "F")) for a in last]
            assert [list(actions) for actions in own(ranks, microbatches).ranks] == [*others, last]


@pytest.mark.parametrize("stages_per_rank", [1, 2, 3])
def test_interleaved_is_torchs(stages_per_rank: int) -> None:
    """Where torch takes the number of microbatches: a multiple of its rounds."""
    for ranks, microbatches in SIZES:
        if microbatches % max(1, microbatches // ranks) == 0:
            other = torch_schedule(peer.ScheduleInterleaved1F1B, ranks, microbatches, stages_per_rank)
            assert interleaved(ranks, microbatches, stages_per_rank) == other, (ranks, microbatches)


V_SHAPED = [(zb_v, peer.ScheduleZBVZeroBubble, 1), (dualpipe_v, peer.ScheduleDualPipeV, 2)]


@pytest.mark.parametrize(("own", "kind", "least"), V_SHAPED, ids=["zb-v", "dualpipe-v"])
def test_v_shaped_schedules_take_no_longer_and_hold_no_more(own: Callable[..., Schedule], kind: Any, least: int) -> None:
    for ranks, microbatches in SIZES:
        if least == 1 or microbatches >= least * ranks:
            schedule, other = own(ranks, microbatches).check(), torch_schedule(kind, ranks, microbatches, 2)
            assert schedule.replicas == {stage: (min(stage, 2 * ranks - 1 - stage),) for stage in range(2 * ranks)}
            assert span(schedule) <= span(other), (ranks, microbatches)
            assert max(held(schedule)) <= max(held(other)), (ranks, microbatches)


@pytest.mark.parametrize("ranks", range(2, 9))
@pytest.mark.parametrize("microbatches", range(1, 17))
def test_bubbles_are_those_of_the_papers(ranks: int, microbatches: int) -> None:
    """1f1b and gpipe for any number of microbatches; the others from as many on as their papers assume."""
    forward, backward, weight = 1, 1, 1
    assert bubble(gpipe(ranks, microbatches)) == bubble(one_f_one_b(ranks, microbatches)) == (ranks - 1) * 3
    if microbatches >= ranks:
        assert bubble(zb_h1(ranks, microbatches)) == (ranks - 1) * (forward + backward - weight)
    if microbatches >= 2 * ranks:
        assert bubble(zb_v(ranks, microbatches)) == bubble(dualpipe_v(ranks, microbatches)) == ranks - 1
    for stages_per_rank in (2, 3):
        if microbatches % ranks == 0:  # a stage is as large as a rank's part of 1f1b by the number of stages
            assert bubble(interleaved(ranks, microbatches, stages_per_rank)) == (ranks - 1) * 3


@pytest.mark.parametrize("ranks", range(2, 9))
def test_zb_h2_lets_no_rank_wait_between_its_first_action_and_its_last(ranks: int) -> None:
    for microbatches in range(2 * ranks - 1, 4 * ranks):
        schedule = zb_h2(ranks, microbatches)
        rows = unit_timing(schedule).ranks
        assert [row[-1].end - row[0].start for row in rows] == [3.0 * microbatches] * ranks, microbatches
        assert max(held(schedule)) <= 2 * ranks - 1


def test_zb_h1_holds_no_more_than_1f1bs_first_rank() -> None:
    for ranks, microbatches in SIZES:
        assert max(held(zb_h1(ranks, microbatches))) <= max(held(one_f_one_b(ranks, microbatches)))


@pytest.mark.parametrize("make", [*SCHEDULES.values(), interleaved, zb_v])
def test_any_numbers_check_and_gradients_are_summed_in_order(make: Callable[[int, int], Schedule]) -> None:
    for ranks, microbatches in SIZES:
        schedule = make(ranks, microbatches).check()
        assert (len(schedule.ranks), schedule.microbatches) == (ranks, microbatches)
        for stage in range(schedule.stages):
            own = schedule.ranks[schedule.replicas[stage][0]]
            for phase in ("F", "B", "W"):
                numbers = [action.microbatch for action in own if (action.phase, action.stage) == (phase, stage)]
                assert numbers in ([], list(range(microbatches))), (ranks, microbatches, stage, phase)


def test_interleaved_takes_any_number_of_stages_and_microbatches() -> None:
    for ranks, microbatches in [(r, m) for r in range(1, 7) for m in range(1, 20)]:
        for stages_per_rank in (1, 2, 3, 4):
            schedule = interleaved(ranks, microbatches, stages_per_rank).check()
            assert schedule.replicas == {stage: (stage % ranks,) for stage in range(ranks * stages_per_rank)}


def test_dualpipe_v_refuses_too_few_microbatches() -> None:
    with pytest.raises(CompileError, match="dualpipe-v needs as many microbatches as stages, 8 on 4 ranks; there are 7"):
        dualpipe_v(4, 7)
