"""The named schedules of one stage a rank, and of stages that go round the ranks; each a short function that draws itself (3
stages, or 2 ranks with 2 stages each, 4 microbatches; the tests parse the drawings).

Backwards stand in the order of the microbatches, so that gradients are summed in that order under every schedule. Not here:
how long a schedule takes; stages in a V (`v_shaped.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import zip_longest

from pdcompiler.core.schedule import Action, Phase, Schedule


def gpipe(stages: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards (Huang et al., GPipe, 2019). Keeps every microbatch's activations.

    F0 F1 F2 F3 B0 B1 B2 B3
    F0 F1 F2 F3 B0 B1 B2 B3
    F0 F1 F2 F3 B0 B1 B2 B3
    """
    return Schedule(tuple((*_all("F", s, microbatches), *_all("B", s, microbatches)) for s in range(stages)), "gpipe")


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """As few forwards first as fill the pipeline, then one backward after each forward (PipeDream-Flush, Narayanan et al.,
    2021). Keeps at most as many microbatches' activations as there are stages from here on.

    F0 F1 F2 B0 F3 B1 B2 B3
    F0 F1 B0 F2 B1 F3 B2 B3
    F0 B0 F1 B1 F2 B2 F3 B3
    """
    ranks = [_alternate(_all("F", s, microbatches), _all("B", s, microbatches), stages - 1 - s) for s in range(stages)]
    return Schedule(tuple(ranks), "1f1b")


def zb_h1(stages: int, microbatches: int) -> Schedule:
    """1f1b with backwards in two parts: the weights' gradients fill the bubble at the end, so that in place of (stages - 1)
    (F + B + W) a rank waits (stages - 1) (F + B - W) (Qi et al., Zero Bubble Pipeline Parallelism, 2023, ZB-H1). Stage s is s
    weights' gradients behind, so every rank keeps at most as many microbatches as there are stages, as 1f1b's first rank does.

    F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3
    F0 F1 B0 F2 B1 W0 F3 B2 W1 B3 W2 W3
    F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3
    """
    return _one_f_one_b_with_late_weights(stages, microbatches, 1, "zb-h1")


def zb_h2(stages: int, microbatches: int) -> Schedule:
    """Twice as many forwards first, so that no rank waits between its first forward and its last gradient, where F, B and W take
    equally long and there are 2 stages - 1 microbatches or more (Qi et al., 2023, ZB-H2). Stage s is 2 s weights' gradients
    behind; each rank keeps at most 2 stages - 1.

    F0 F1 F2 F3 B0 W0 B1 W1 B2 W2 B3 W3
    F0 F1 F2 B0 F3 B1 B2 W0 B3 W1 W2 W3
    F0 B0 F1 B1 F2 B2 F3 B3 W0 W1 W2 W3
    """
    return _one_f_one_b_with_late_weights(stages, microbatches, 2, "zb-h2")


def _one_f_one_b_with_late_weights(stages: int, microbatches: int, depth: int, name: str) -> Schedule:
    """1f1b with `depth` forwards first for each later stage, and as many weights' gradients late for each earlier one; one
    after each backward once no forward is left. A stage is always equally far ahead of its backwards: the orders of stages of
    different pipelines fit together (`replicated`), where those found by walking may wait for each other."""
    ranks = []
    for s in range(stages):
        ahead, weights, actions = depth * (stages - 1 - s), _all("W", s, microbatches), list[Action]()
        for action in _alternate(_all("F", s, microbatches), _all("B", s, microbatches), ahead):
            actions.append(action)
            if action.phase == "B" and (action.microbatch >= depth * s or ahead + action.microbatch >= microbatches):
                actions.append(weights.pop(0))
        ranks.append((*actions, *weights))
    return Schedule(tuple(ranks), name)


def interleaved(ranks: int, microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """1f1b over stages that go round the ranks, stage s on rank s mod ranks: a rank's bubble is that of 1f1b by its number of
    stages (Narayanan et al., Efficient Large-Scale Language Model Training, 2021). Microbatches go in groups, of as many as there
    are ranks or somewhat more. Two stages a rank:

    F0@0 F1@0 F0@2 F1@2 F2@0 B0@2 F3@0 B1@2 F2@2 B0@0 F3@2 B1@0 B2@2 B3@2 B2@0 B3@0
    F0@1 F1@1 F0@3 B0@3 F1@3 B1@3 F2@1 B0@1 F3@1 B1@1 F2@3 B2@3 F3@3 B3@3 B2@1 B3@1
    """
    stages = ranks * stages_per_rank
    count = max(1, microbatches // ranks)
    ends = [-(-microbatches * (k + 1) // count) for k in range(count)]
    groups = [range(first, end) for first, end in zip([0, *ends], ends, strict=False)]
    result = []
    for rank in range(ranks):
        own = range(rank, stages, ranks)
        forwards = [Action("F", s, m) for group in groups for s in own for m in group]
        backwards = [Action("B", s, m) for group in groups for s in reversed(own) for m in group]
        warm_up = 2 * (ranks - 1 - rank) + (stages_per_rank - 1) * len(groups[0])
        result.append(_alternate(forwards, backwards, warm_up))
    return Schedule(tuple(result), "interleaved")


def _all(phase: Phase, stage: int, microbatches: int) -> list[Action]:
    return [Action(phase, stage, m) for m in range(microbatches)]


def _alternate(forwards: list[Action], backwards: list[Action], warm_up: int) -> tuple[Action, ...]:
    """Some forwards, then one backward after each forward, then the backwards that are left."""
    pairs = zip_longest(forwards[warm_up:], backwards)
    return (*forwards[:warm_up], *(action for pair in pairs for action in pair if action is not None))


SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {"gpipe": gpipe, "1f1b": one_f_one_b, "zb-h1": zb_h1, "zb-h2": zb_h2}
"""One stage a rank."""


def replicated(name: str, replicas: Sequence[int], microbatches: int, pipelines: int = 1) -> Schedule:
    """A named schedule for replicated stages: each replica runs its share of the microbatches in the order that it would have
    with as few earlier and later stages as have that many ranks for each replica. Microbatch i runs on replica i mod replicas; of
    several whole pipelines, each over its own ranks, on pipeline i mod pipelines. 1f1b with replicas 2 and 1:

    F0@0 F2@0 B0@0 B2@0
    F1@0 F3@0 B1@0 B3@0
    F0@1 B0@1 F1@1 B1@1 F2@1 B2@1 F3@1 B3@1
    """
    ranks: list[tuple[Action, ...]] = []
    for pipeline in range(pipelines):
        for stage, count in enumerate(replicas):
            earlier, later = -(-sum(replicas[:stage]) // count), -(-sum(replicas[stage + 1 :]) // count)
            for replica in range(count):
                own = range(replica * pipelines + pipeline, microbatches, count * pipelines)
                order = _plain(name, earlier + 1 + later, len(own)).ranks[earlier] if own else ()
                ranks.append(tuple(Action(action.phase, stage, own[action.microbatch]) for action in order))
    return Schedule(tuple(ranks), name)


@lru_cache(maxsize=64)
def _plain(name: str, stages: int, microbatches: int) -> Schedule:
    """Without replicas; each of its ranks is asked for in turn."""
    return SCHEDULES[name](stages, microbatches)
