"""The named schedules, each a short function that draws itself (3 stages, 4 microbatches; the tests parse the drawings).

Backwards stand in the order of the microbatches, so that gradients are summed in that order under every schedule. Not here:
how long a schedule takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from pdcompiler.core.schedule import Action, Schedule


def gpipe(stages: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards (Huang et al., GPipe, 2019). Keeps every microbatch's activations.

    F0 F1 F2 F3 B0 B1 B2 B3
    F0 F1 F2 F3 B0 B1 B2 B3
    F0 F1 F2 F3 B0 B1 B2 B3
    """
    forwards = [[Action("F", s, m) for m in range(microbatches)] for s in range(stages)]
    backwards = [[Action("B", s, m) for m in range(microbatches)] for s in range(stages)]
    return Schedule(tuple(tuple(f + b) for f, b in zip(forwards, backwards, strict=True)), "gpipe")


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """As few forwards first as fill the pipeline, then one backward after each forward (PipeDream-Flush, Narayanan et al.,
    2021). Keeps at most as many microbatches' activations as there are stages from here on.

    F0 F1 F2 B0 F3 B1 B2 B3
    F0 F1 B0 F2 B1 F3 B2 B3
    F0 B0 F1 B1 F2 B2 F3 B3
    """
    ranks = []
    for s in range(stages):
        warm_up = min(stages - 1 - s, microbatches)
        actions = [Action("F", s, m) for m in range(warm_up)]
        for m in range(microbatches):
            if warm_up + m < microbatches:
                actions.append(Action("F", s, warm_up + m))
            actions.append(Action("B", s, m))
        ranks.append(tuple(actions))
    return Schedule(tuple(ranks), "1f1b")


SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {"gpipe": gpipe, "1f1b": one_f_one_b}


def replicated(name: str, replicas: Sequence[int], microbatches: int, pipelines: int = 1) -> Schedule:
    """A named schedule for replicated stages: each replica runs its share of the microbatches in the order that it would have
    with as few later stages as have that many ranks for each replica. Microbatch i runs on replica i mod replicas; of several
    whole pipelines, each over its own ranks, on pipeline i mod pipelines. 1f1b with replicas 2 and 1:

    F0@0 F2@0 B0@0 B2@0
    F1@0 F3@0 B1@0 B3@0
    F0@1 B0@1 F1@1 B1@1 F2@1 B2@1 F3@1 B3@1
    """
    ranks: list[tuple[Action, ...]] = []
    for pipeline in range(pipelines):
        for stage, count in enumerate(replicas):
            later = -(-sum(replicas[stage + 1 :]) // count)
            for replica in range(count):
                own = range(replica * pipelines + pipeline, microbatches, count * pipelines)
                order = _order(name, later + 1, len(own)) if own else ()
                ranks.append(tuple(Action(action.phase, stage, own[action.microbatch]) for action in order))
    return Schedule(tuple(ranks), name)


@lru_cache(maxsize=1024)
def _order(name: str, stages: int, microbatches: int) -> tuple[Action, ...]:
    """Of the first of so many stages."""
    return SCHEDULES[name](stages, microbatches).ranks[0]
