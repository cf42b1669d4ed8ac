"""Schedules of two stages a rank that go down the ranks and up again: the stages r and 2 ranks - 1 - r stand on rank r.

    rank 0   stage 0   stage 5
    rank 1   stage 1   stage 4
    rank 2   stage 2   stage 3

So the last stage stands beside the first: the first rank has its first backward early, and all ranks keep equally much. Where F,
B and W take equally long, a rank waits for ranks - 1 of them in a step, from 2 ranks microbatches on.

A rank's order is written as phases of its `near` stage (the first) and its `far` one, each in the order of the microbatches. Not
here: one stage a rank, and those that go round (`named.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pdcompiler.core.errors import CompileError
from pdcompiler.core.list_schedule import Task, list_schedule
from pdcompiler.core.schedule import Action, Schedule
from pdcompiler.core.timing import unit_timing

Steps = Sequence[tuple[int, str]]
"""How often, and what."""


def zb_v(ranks: int, microbatches: int) -> Schedule:
    """Each rank keeps at most 2 ranks microbatches of its stages, which are half as large as 1f1b's, until their weights'
    gradients are made (Qi et al., Pipeline Parallelism with Controllable Memory, 2024, V-ZB). With fewer than 2 ranks - 1
    microbatches the others are left out, or, where that is shorter, an order is found by walking. 2 ranks, 4 microbatches:

    F0@0 F1@0 F2@0 F0@3 B0@3 W0@3 F1@3 B1@3 W1@3 F3@0 B0@0 W0@0 F2@3 B2@3 W2@3 B1@0 W1@0 F3@3 B3@3 W3@3 B2@0 W2@0 B3@0 W3@0
    F0@1 F0@2 F1@1 F1@2 B0@2 W0@2 F2@1 B0@1 W0@1 F2@2 B1@2 W1@2 F3@1 B1@1 W1@1 F3@2 B2@2 W2@2 B2@1 B3@2 B3@1 W2@1 W3@1 W3@2
    """
    most = max(microbatches, 2 * ranks - 1)
    steps = [_zb_v_steps(rank, ranks, most) for rank in range(ranks)]
    full = Schedule(tuple(_emit(own, rank, ranks, most) for rank, own in enumerate(steps)), "zb-v")
    if microbatches == most:
        return full
    own = full.without(action for action in full if action.microbatch >= microbatches)
    rank_of = (*range(ranks), *reversed(range(ranks)))
    walked = list_schedule(Task(rank_of, microbatches, (2 * ranks,) * ranks), "zb-v")
    return min(own, walked, key=lambda schedule: unit_timing(schedule).finish)


def _zb_v_steps(rank: int, ranks: int, microbatches: int) -> Steps:
    after = ranks - rank
    return (
        (2 * after - 1, "F near"),
        (rank, "F far, F near"),
        (after, "F far, B far, W far"),
        (microbatches - ranks, "F near, B near, W near, F far, B far, W far"),
        (rank, "B near, B far"),
        (after, "B near, W near"),
        (microbatches, "B near, B far"),
        (microbatches, "W near, W far"),
    )


def dualpipe_v(ranks: int, microbatches: int) -> Schedule:
    """DualPipe's order on one half of its ranks (DeepSeek-V3, 2024, and Qi et al., "DualPipe could be better without the dual"):
    as `zb_v`, but most backwards are whole, each beside a forward of the other stage, so that a message may travel under either.
    Each rank keeps at most 2 ranks + 1. Raises CompileError for fewer microbatches than stages. 2 ranks, 4 microbatches:

    F0@0 F1@0 F2@0 F0@3 B0@3 W0@3 F1@3 F3@0 B1@3 F2@3 B0@0 B2@3 F3@3 B1@0 B3@3 B2@0 W2@0 B3@0 W3@0
    F0@1 F0@2 F1@1 F1@2 F2@1 B0@2 F2@2 B0@1 F3@1 B1@2 F3@2 B1@1 B2@2 B2@1 B3@2 B3@1 W3@2 W3@1
    """
    if microbatches < 2 * ranks:
        raise CompileError(
            f"dualpipe-v needs as many microbatches as stages, {2 * ranks} on {ranks} ranks; there are {microbatches}",
            ways_out=(f"microbatches={2 * ranks} or more", "zb-v, for any number"),
        )
    steps = [_dualpipe_v_steps(rank, ranks, microbatches) for rank in range(ranks)]
    return Schedule(tuple(_emit(own, rank, ranks, microbatches) for rank, own in enumerate(steps)), "dualpipe-v")


def _dualpipe_v_steps(rank: int, ranks: int, microbatches: int) -> Steps:
    after, steady = ranks - rank - 1, microbatches - 2 * ranks + rank + 1
    last = rank + 1
    return (
        (2 * after, "F near"),
        (last, "F near, F far"),
        (after, "B far, W far, F far"),
        (steady, "F near, V far, F far, V near"),
        (after, "V far, F far, V near"),
        (last // 2, "V far, V near"),
        (last % 2, "V far, B near"),
        (last // 2, "B far, B near"),
        (after, "W any, B near"),
        (2 * microbatches, "W any"),
    )


def _emit(steps: Steps, rank: int, ranks: int, microbatches: int) -> tuple[Action, ...]:
    """A rank's actions: each word is the next microbatch of its phase and stage, none where that is not there yet or no more. V
    is a whole backward, "W any" the weights' gradient that waits the longest."""
    stages = {"near": rank, "far": 2 * ranks - 1 - rank}
    done: Counter[tuple[str, int]] = Counter()
    actions, late = list[Action](), list[Action]()
    for word in [word for count, words in steps for word in words.split(", ") * max(count, 0)]:
        phase, which = word.split()
        if phase == "W":
            found = [action for action in late if which == "any" or action.stage == stages[which]][:1]
            late = [action for action in late if action not in found]
            actions += found
            continue
        stage, kind = stages[which], "F" if phase == "F" else "B"
        number = done[kind, stage]
        if number < (microbatches if kind == "F" else done["F", stage]):
            done[kind, stage] += 1
            actions.append(Action("F" if kind == "F" else "B", stage, number))
            late += [Action("W", stage, number)] if phase == "B" else []
    return tuple(actions)
