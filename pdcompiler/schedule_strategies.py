"""Random schedules for hypothesis: any order of any stages on any ranks that waits for nothing, backwards whole or in two parts;
and schedules with a few faults in them.

Each of the first is the projection of one total order, drawn action by action, so it is free of deadlock. Not here: the models
that schedules run (`strategies.py`).
"""

from __future__ import annotations

from hypothesis import strategies as st

from pdcompiler.core.schedule import PHASES, Action, Schedule
from pdcompiler.given_schedule import ONE_STAGE_A_RANK, SEVERAL, read_schedule

MUTATIONS = ("swap", "swap neighbours", "drop", "double", "shift", "move", "change", "move stage")


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


@st.composite
def named_schedules(draw: st.DrawFn, stages: int, microbatches: int) -> Schedule:
    """One that `compile` knows by name, of so many stages: on as many ranks, or where its ranks run two, on half as many."""
    fits = [name for name in SEVERAL if stages % 2 == 0 and (name != "dualpipe-v" or microbatches >= stages)]
    name = draw(st.sampled_from([*ONE_STAGE_A_RANK, *fits]))
    return read_schedule(name, ((1,) * stages, 1), microbatches, stages // 2 if name in SEVERAL else stages)


@st.composite
def mutated_schedules(draw: st.DrawFn, stages: int, microbatches: int) -> Schedule:
    """A schedule of so many stages and microbatches, named or any, with one to three mutations: two actions of a rank swapped;
    one dropped, doubled, shifted on its rank, moved to another, or made into one of another phase, stage or microbatch, also one
    that does not exist; all actions of a stage moved. Many are no schedules any more; it has as many ranks as before."""
    schedule = draw(st.one_of(named_schedules(stages, microbatches), any_schedules(stages, microbatches)))
    ranks = [list(actions) for actions in schedule.ranks]
    for _ in range(draw(st.integers(1, 3))):
        _mutate(draw, ranks, schedule)
    return Schedule(tuple(map(tuple, ranks)), f"mutated {schedule.name}")


def _mutate(draw: st.DrawFn, ranks: list[list[Action]], before: Schedule) -> None:
    kind = draw(st.sampled_from(MUTATIONS))
    if not (own := draw(st.sampled_from(ranks))):
        return
    place, to = (draw(st.integers(0, len(own) - 1)) for _ in range(2))
    if kind.startswith("swap"):
        to = to if kind == "swap" else place - 1
        own[place], own[to] = own[to], own[place]
    elif kind == "change":
        own[place] = draw(_changed(own[place], before))
    elif kind == "move stage":
        _move_stage(draw, ranks, own[place].stage)
    else:
        action = own[place] if kind == "double" else own.pop(place)
        target = draw(st.sampled_from(ranks)) if kind == "move" else own
        if kind != "drop":
            target.insert(draw(st.integers(0, len(target))), action)


def _changed(action: Action, before: Schedule) -> st.SearchStrategy[Action]:
    """An action that differs in one thing."""
    microbatches, stages = st.integers(-1, before.microbatches), st.integers(-1, before.stages)
    return st.one_of(
        st.builds(Action, st.sampled_from(PHASES), st.just(action.stage), st.just(action.microbatch)),
        st.builds(Action, st.just(action.phase), stages, st.just(action.microbatch)),
        st.builds(Action, st.just(action.phase), st.just(action.stage), microbatches),
    )


def _move_stage(draw: st.DrawFn, ranks: list[list[Action]], stage: int) -> None:
    """To the front of one rank, which then waits for the others, or is waited for by them."""
    moved = [action for actions in ranks for action in actions if action.stage == stage]
    for actions in ranks:
        actions[:] = [action for action in actions if action.stage != stage]
    target = draw(st.sampled_from(ranks))
    target[:] = draw(st.sampled_from([moved + target, target + moved]))
