"""Random ScheduleProblems, with the named schedules for the same stages on the same ranks. `testing.py` offers them to users.

    stages      one a rank; or two, round the ranks or in a V
    seconds     equal stages, or each up to twice as slow as another, with other parts of forward and of weights' gradients
    messages    nothing, or up to three quarters of the fastest forward
    room        what the leanest of the named schedules needs, up to twice that, or no end of it

Not here: how a schedule is found.
"""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import strategies as st

from pdcompiler.core.schedule import Schedule
from pdcompiler.core.schedule_problem import ScheduleProblem
from pdcompiler.given_schedule import ONE_STAGE_A_RANK, read_schedule

Numbers = tuple[float, ...]


def random_problem(
    seed: int, uneven: bool = True, most_ranks: int = 8, sizes: tuple[int, int] | None = None
) -> tuple[ScheduleProblem, list[Schedule]]:
    """A problem, and the named schedules that fit its room: at least one. sizes: ranks and microbatches."""
    chance = random.Random(seed)
    ranks = sizes[0] if sizes else chance.randint(2, most_ranks)
    microbatches = sizes[1] if sizes else chance.randint(2, 4 * ranks)
    kind = chance.choice(("one", "one", "one", "round", "v"))
    named = _named(kind, ranks, microbatches)
    slow = [1 + uneven * chance.random() for _ in range(named[0].stages)]

    def times(low: float, high: float) -> Numbers:
        return tuple(s * chance.uniform(low, high if uneven else low) for s in slow)

    forward, backward, saved = times(1.0, 1.2), times(2.0, 2.5), times(0.7, 1.3)
    weight = tuple(seconds * chance.uniform(0.4, 0.55) for seconds in backward)
    kept = tuple(nbytes * chance.uniform(0.3, 0.8) for nbytes in saved)
    message = chance.choice((0.0, 0.1, 0.3, 0.5))
    transfer = tuple(message * chance.uniform(0.5, 1.5) for _ in slow[1:])
    rank_of = tuple(named[0].replicas.values())
    problem = ScheduleProblem(rank_of, microbatches, forward, backward, weight, transfer, transfer, saved=saved, kept=kept)
    leanest = min(max(problem.peaks(schedule)) for schedule in named)
    room = chance.choice((1.0, 1.25, 1.5, 2.0, float("inf"))) * leanest
    problem = replace(problem, room=(room,) * ranks)
    return problem, [schedule for schedule in named if problem.fits(schedule)]


def _named(kind: str, ranks: int, microbatches: int) -> list[Schedule]:
    names = {"one": list(ONE_STAGE_A_RANK), "round": ["interleaved"], "v": ["zb-v", "dualpipe-v"]}[kind]
    if microbatches < 2 * ranks:
        names = [name for name in names if name != "dualpipe-v"]
    stages = ranks if kind == "one" else 2 * ranks
    return [read_schedule(name, ((1,) * stages, 1), microbatches, ranks) for name in names]


def schedule_problems(most_ranks: int = 3) -> st.SearchStrategy[tuple[ScheduleProblem, list[Schedule]]]:
    """Small ones."""
    return st.builds(random_problem, st.integers(0, 2**32), st.booleans(), st.just(most_ranks))
