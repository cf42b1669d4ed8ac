"""The order by ticks: its drawing, the tables of weights, legality, and that every order can run."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcompiler import CompileError
from pdcompiler.core import ticks as module
from pdcompiler.core.ticks import Ticks, Update, Work, pipedream_depths

replicas_of_stages = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple)


@st.composite
def any_ticks(draw: st.DrawFn) -> Ticks:
    """Any legal depths, and for some a batch."""
    replicas = draw(replicas_of_stages)
    depths: list[int] = [0]
    for count in reversed(replicas[:-1]):
        depths.insert(0, (depths[0] // count + draw(st.integers(1, 3))) * count)
    batch = draw(st.none() | st.integers(max(1, depths[0]), depths[0] + 5))
    return Ticks(replicas, tuple(depths), batch)


def test_the_docstring_draws_the_first_ticks() -> None:
    drawn = [line.split() for line in (module.__doc__ or "").splitlines() if line.startswith("    ")]
    made = [[str(work) for work in Ticks((2, 1), (2, 0)).tick(number)] for number in range(4)]
    assert made == drawn and all(re.match(r"F\d@0", line[0]) for line in drawn)


def test_the_last_round_may_be_a_partial_one() -> None:
    """Three minibatches on two replicas: replica 1 has no share in the second round."""
    fill, *_, last = Ticks((2, 1), (2, 0)).until(3)
    assert fill == (Work("F", 0, 0, 0), Work("F", 1, 0, 0), Work("B", 1, 0, 0), Update(1, 1, range(1)))
    assert last == (Work("B", 0, 0, 2), Update(0, 2, range(2, 3)))


@pytest.mark.parametrize(
    ("replicas", "depths"),
    [((1,), (0,)), ((1, 1, 1), (2, 1, 0)), ((2, 1), (2, 0)), ((15, 1), (15, 0)), ((1, 2), (2, 0)), ((2, 3, 1), (4, 3, 0))],
)
def test_pipedreams_depths(replicas: tuple[int, ...], depths: tuple[int, ...]) -> None:
    assert pipedream_depths(replicas) == depths


@given(replicas_of_stages)
def test_pipedreams_depths_are_legal_and_by_its_formula(replicas: tuple[int, ...]) -> None:
    ticks = Ticks(replicas, pipedream_depths(replicas))
    before = [sum(replicas[:stage]) for stage in range(len(replicas))]
    formula = [(sum(replicas) - 1 - b) // count for b, count in zip(before, replicas, strict=True)]
    assert [ticks.in_flight(stage) - 1 for stage in range(ticks.stages)] == formula


WEIGHTS = [
    ((1, 1, 1), None, ["0 0 0 1 2 3 4 5 6", "0 0 1 2 3 4 5 6 7", "0 1 2 3 4 5 6 7 8"]),
    ((2, 1), None, ["0 0 0 0 1 1 2 2 3", "0 1 2 3 4 5 6 7 8"]),
    ((2, 3, 1), None, ["0 0 0 0 0 0 1 1 2", "0 0 0 0 0 0 1 1 1", "0 1 2 3 4 5 6 7 8"]),
    ((1, 1, 1), 3, ["0 0 0 0 0 0 1 1 1"] * 3),
]


@pytest.mark.parametrize(("replicas", "batch", "expected"), WEIGHTS)
def test_which_weights(replicas: tuple[int, ...], batch: int | None, expected: list[str]) -> None:
    ticks = Ticks(replicas, pipedream_depths(replicas), batch)
    assert [" ".join(str(ticks.weights(stage, t)) for t in range(9)) for stage in range(ticks.stages)] == expected


@given(any_ticks(), st.integers(1, 15))
def test_every_order_runs(ticks: Ticks, minibatches: int) -> None:
    """Inputs are there, each phase runs once, on one replica, with weights that exist and are kept."""
    done: set[tuple[str, int, int]] = set()
    updates = [0] * ticks.stages
    replica_of: dict[tuple[int, int], int] = {}
    open_ = [[0] * count for count in ticks.replicas]
    for tick in ticks.until(minibatches):
        for work in tick:
            if isinstance(work, Update):
                assert all(("B", work.stage, t) in done for t in work.minibatches)
                updates[work.stage] += 1
                assert work.number == updates[work.stage]
                continue
            phase, stage, t = work.phase, work.stage, work.minibatch
            assert (phase, stage, t) not in done
            assert replica_of.setdefault((stage, t), work.replica) == work.replica
            if phase == "F":
                assert stage == 0 or ("F", stage - 1, t) in done
                newest = updates[stage] - ticks.weights(stage, t)
                assert newest == 0 if ticks.batch is None else newest in (0, 1)
                open_[stage][work.replica] += 1
                assert open_[stage][work.replica] <= ticks.in_flight(stage)
            else:
                assert ("F", stage, t) in done and (stage == ticks.stages - 1 or ("B", stage + 1, t) in done)
                assert updates[stage] - ticks.weights(stage, t) < ticks.versions(stage)
                open_[stage][work.replica] -= 1
            done.add((phase, stage, t))
    assert len(done) == 2 * ticks.stages * minibatches
    assert all(updates[s] == -(-minibatches // ticks.round(s)) for s in range(ticks.stages))


@given(any_ticks(), st.integers(0, 20))
def test_the_text_of_a_tick_repeats(ticks: Ticks, number: int) -> None:
    number += max(ticks.depths[0], ticks.batch or 0)
    later = ticks.tick(number + ticks.repeat)
    for one, two in zip(ticks.tick(number), later, strict=True):
        if isinstance(one, Work):
            assert two == Work(one.phase, one.stage, one.replica, one.minibatch + ticks.repeat)
        else:
            assert two == Update(one.stage, one.number + ticks.repeat // ticks.round(one.stage), range(
                one.minibatches.start + ticks.repeat, one.minibatches.stop + ticks.repeat))  # fmt: skip


WRONG = [
    ((), (), None, "replicas is ()"),
    ((2, 0), (2, 0), None, "expected one number of at least 1"),
    ((1, 1), (0,), None, "1 depths for 2 stages"),
    ((2, 1), (3, 0), None, "depth 3 of stage 0 is no multiple of its 2 replicas"),
    ((1, 1), (2, 1), None, "depth 1 of stage 1 must be 0"),
    ((1, 1, 1), (1, 1, 0), None, "depth 1 of stage 1 must be less than that of the stage before, 1"),
    ((1, 1, 1), (2, 1, 0), 1, "a batch of 1 microbatches is less than the first stage's depth 2"),
]


@pytest.mark.parametrize(("replicas", "depths", "batch", "message"), WRONG)
def test_illegal_orders(replicas: tuple[int, ...], depths: tuple[int, ...], batch: int | None, message: str) -> None:
    with pytest.raises(CompileError, match=re.escape(message)):
        Ticks(replicas, depths, batch)
