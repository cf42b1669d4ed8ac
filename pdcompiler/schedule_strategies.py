"""Random schedules for hypothesis: any order of any stages on any ranks that waits for nothing, backwards whole or in two parts.

Each is the projection of one total order, drawn action by action, so it is free of deadlock. Not here: broken schedules, and the
models that schedules run (`strategies.py`).
"""

from __future__ import annotations

from hypothesis import strategies as st

from pdcompiler.core.schedule import PHASES, Action, Schedule


@st.composite
def any_schedules(
    draw: st.DrawFn, stages: int | None = None, microbatches: int | None = None, in_order: bool = False
) -> Schedule:
    """A schedule that flushes, on at most as many ranks as stages. Left out: one to four stages, one to four microbatches.
    in_order: each stage's forwards in the order of the microbatches, as models that update buffers need."""
    stages = stages or draw(st.integers(1, 4))
    microbatches = microbatches or draw(st.integers(1, 4))
    ranks = draw(st.integers(1, stages))
    rank_of = [draw(st.integers(0, ranks - 1)) for _ in range(stages)]
    split = [[draw(st.booleans()) for _ in range(microbatches)] for _ in range(stages)]
    every = [Action(phase, s, m) for phase in PHASES for s in range(stages) for m in range(microbatches)]
    waiting = [action for action in every if action.phase != "W" or split[action.stage][action.microbatch]]
    done: list[Action] = []
    while waiting:
        ready = [action for action in waiting if all(need in done for need in _needs(action, stages, in_order))]
        done.append(draw(st.sampled_from(ready)))
        waiting.remove(done[-1])
    on_rank = [tuple(action for action in done if rank_of[action.stage] == rank) for rank in range(ranks)]
    return Schedule(tuple(actions for actions in on_rank if actions))


def _needs(action: Action, stages: int, in_order: bool) -> tuple[Action, ...]:
    is_later = in_order and action.phase == "F" and action.microbatch > 0
    before = (Action("F", action.stage, action.microbatch - 1),) if is_later else ()
    return action.needs(stages) + before
