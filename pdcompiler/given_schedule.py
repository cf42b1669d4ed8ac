"""What the user says of the schedule: `schedule=` and `microbatches=` of `compile`, read and checked before anything is traced.

Not here: the schedules themselves (`passes/schedules/named.py`, `core/ticks.py`), and the stages (`given_partition.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pdcompiler.core.asynchronous import NAMES, Asynchronous
from pdcompiler.core.errors import CompileError
from pdcompiler.core.plan import SCHEDULE_KINDS, Training
from pdcompiler.core.schedule import Schedule, show
from pdcompiler.core.schedule_file import read_schedule_file
from pdcompiler.core.ticks import Ticks
from pdcompiler.passes.schedules.named import SCHEDULES, interleaved, replicated
from pdcompiler.passes.schedules.v_shaped import dualpipe_v, zb_v

Placed = tuple[tuple[int, ...], int]
"""Replicas of each stage, and whole pipelines."""

SEVERAL: dict[str, Callable[[int, int], Schedule]] = {"interleaved": interleaved, "zb-v": zb_v, "dualpipe-v": dualpipe_v}
"""Of several stages a rank: two, or of interleaved as many as the user says."""

ONE_STAGE_A_RANK = tuple(SCHEDULES)
AUTO = "auto"
"""Found for the costs of the example batch."""


def from_file(schedule: str | Path | Schedule | Asynchronous) -> str | Schedule | Asynchronous:
    """What stands in a schedule's file; the user's own, checked; a name as it is."""
    if isinstance(schedule, Path):
        return read_schedule_file(schedule)
    if isinstance(schedule, Schedule):
        return schedule.check()
    if not isinstance(schedule, str) or schedule in (*SCHEDULES, *SEVERAL, *NAMES, AUTO):
        return schedule
    return read_schedule_file(schedule) if schedule.endswith((".csv", ".txt")) or Path(schedule).is_file() else schedule


def stages_of(schedule: str | Schedule | Asynchronous, world_size: int, stages_per_rank: int | None = None) -> int | None:
    """How many stages a schedule has, where its ranks run several; else None."""
    if stages_per_rank is not None and (schedule != "interleaved" or not isinstance(stages_per_rank, int) or stages_per_rank < 1):
        raise CompileError(
            f"stages_per_rank is {stages_per_rank!r}, the schedule {schedule if isinstance(schedule, str) else schedule.name!r}",
            ways_out=('a number of at least 1, for schedule="interleaved" or "auto"; other schedules have their own',),
        )
    if isinstance(schedule, str):
        return (stages_per_rank or 2) * world_size if schedule in SEVERAL else None
    if isinstance(schedule, Schedule) and any(schedule.ranks) and schedule.stages > len(schedule.ranks):
        return schedule.stages
    return None


def placement(schedule: Schedule) -> tuple[int, ...]:
    """The rank of each stage, where ranks run several; else empty."""
    return tuple(ranks[0] for ranks in schedule.replicas.values()) if schedule.stages > len(schedule.ranks) else ()


def like_which(
    schedule: str | Schedule | Asynchronous, stages_per_rank: int | None, has_example: bool
) -> str | Schedule | Asynchronous:
    """"auto" as the named schedule that has its ranks and stages; any other as it is."""
    if not isinstance(schedule, str) or schedule != AUTO:
        return schedule
    if not has_example:
        ways_out = ("example_args or example_kwargs",)
        raise CompileError(f'schedule is "{AUTO}", but there is no batch whose costs could be known', ways_out=ways_out)
    return "1f1b" if stages_per_rank is None else "interleaved"


def is_automatic(microbatches: Any, schedule: str | Schedule | Asynchronous, has_example: bool) -> bool:
    """Whether the planner chooses the number of microbatches."""
    if microbatches != "auto":
        return False
    if not isinstance(schedule, str) or schedule in NAMES:
        its = "has its own number" if isinstance(schedule, Schedule) else "does not flush"
        raise CompileError(f'microbatches is "auto", but the schedule {its}', ways_out=("leave it out",))
    if not has_example:
        ways_out = ("example_args or example_kwargs",)
        raise CompileError('microbatches is "auto", but there is no batch to plan for', ways_out=ways_out)
    return True


def read_schedule(schedule: str | Schedule, placed: Placed, microbatches: Any, world_size: int | None = None) -> Schedule:
    """A schedule that flushes: by its name, or the user's own. world_size: of one with several stages a rank."""
    if isinstance(schedule, Schedule):
        return _checked(schedule, placed, microbatches, world_size)
    if schedule in SEVERAL and world_size is not None:
        count = _count(2 * world_size if microbatches is None else microbatches)
        if schedule == "interleaved":
            return interleaved(world_size, count, len(placed[0]) // world_size)
        return SEVERAL[schedule](world_size, count)
    if schedule not in SCHEDULES:
        names = sorted({*SCHEDULES, *SEVERAL, *NAMES, AUTO})
        raise CompileError(f"there is no schedule {schedule!r}", ways_out=(f"one of {names}", "a Schedule", "its file"))
    replicas, pipelines = placed
    count = _count(2 * sum(replicas) * pipelines if microbatches is None else microbatches)
    most = max(replicas) * pipelines
    if count < most:
        raise CompileError(
            f"microbatches is {count}, but a stage has {most} replicas: some would have nothing to do",
            ways_out=(f"microbatches={most} or more", "fewer replicas"),
        )
    return replicated(schedule, replicas, count, pipelines)


def read_ticks(schedule: Asynchronous, placed: Placed, microbatches: Any) -> Ticks:
    """A schedule without flushes. Of several whole pipelines each runs every so many minibatches: a stage's replicas are those of
    all of them."""
    replicas = tuple(count * placed[1] for count in placed[0])
    if schedule.name == "pipedream":
        if microbatches is not None:
            raise CompileError(
                f"microbatches is {microbatches!r}, but pipedream does not cut a batch: each step feeds one minibatch",
                ways_out=("leave it out", "pipedream-2bw, which updates once after so many microbatches", "smaller batches"),
            )
        return schedule.ticks(replicas, None)
    least = max(1, *schedule.depths_for(replicas), *replicas)
    count = _count(max(least, 2 * sum(replicas)) if microbatches is None else microbatches)
    if count < max(replicas):
        raise CompileError(
            f"microbatches is {count}, but a stage has {max(replicas)} replicas: some would have nothing to do in a batch",
            ways_out=(f"microbatches={least} or more", "fewer replicas"),
        )
    return schedule.ticks(replicas, count)


def evaluation_schedule(placed: Placed) -> Schedule:
    """With which a pipeline without flushes evaluates."""
    return read_schedule("gpipe", placed, None)


def training_of(schedule: Schedule | Ticks) -> Training:
    """What the planner plans for: a schedule that it does not know counts as 1f1b."""
    if isinstance(schedule, Ticks):
        return Training(schedule.name, schedule.batch or Training.microbatches)
    return Training(schedule.name if schedule.name in SCHEDULE_KINDS else "1f1b", schedule.microbatches)


def _count(microbatches: Any) -> int:
    if not isinstance(microbatches, int) or microbatches < 1:
        raise CompileError(f"microbatches is {microbatches!r}, expected 1 or more")
    return microbatches


def _checked(schedule: Schedule, placed: Placed, microbatches: Any, world_size: int | None) -> Schedule:
    replicas, pipelines = placed
    stages, world_size = len(replicas), world_size or sum(replicas) * pipelines
    if microbatches not in (None, schedule.microbatches):
        raise CompileError(f"the schedule is for {schedule.microbatches} microbatches, microbatches is {microbatches}")
    if len(schedule.ranks) != world_size or schedule.stages != stages:
        has, are = f"{len(schedule.ranks)} ranks and {schedule.stages} stages", f" with {stages} stages"
        is_other = f"world_size is {world_size}{'' if stages == world_size else are}"
        raise CompileError(f"the schedule is for {has}, {is_other}")
    _check_ranks(schedule, replicas, pipelines)
    return schedule


def _check_ranks(schedule: Schedule, replicas: Sequence[int], pipelines: int) -> None:
    """Of the user's own schedule: each stage on as many ranks as it has replicas."""
    for stage, ranks in schedule.replicas.items():
        wanted = replicas[stage] * pipelines
        if len(ranks) != wanted:
            position, first = next((i, a) for i, a in enumerate(schedule.ranks[ranks[-1]]) if a.stage == stage)
            has = f"the schedule has {len(ranks)} ranks for stage {stage}, the partition has {wanted} replicas"
            raise CompileError(f"{has}: rank {ranks[-1]}, position {position}: {show(first, True)}")
