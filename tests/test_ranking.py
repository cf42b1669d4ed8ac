"""Plans walked: closed forms, small cases by hand, both walks alike, memory of deeper orders, and which plan is the best."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcompiler import CompileError
from pdcompiler import ranking as module
from pdcompiler.core.machine import Device, Machine
from pdcompiler.core.plan import FLUSHING, SCHEDULE_KINDS, Evaluation, Plan, PlannedStage, Training
from pdcompiler.core.workload import Value, Workload
from pdcompiler.found import Found
from pdcompiler.passes.partition.evaluate import evaluate
from pdcompiler.passes.schedules.named import SCHEDULES
from pdcompiler.ranking import Walked, best_of, schedule_of, seconds_of, step_seconds, walked

DEVICE = Device("device", 1.0, 1.0, 1e9)
MACHINE = Machine.flat(64, bytes_per_second=1.0, latency_seconds=0.0, device=DEVICE, overlap=True)
eighths = st.integers(1, 24).map(lambda n: n / 8)


def chain(
    forward: Sequence[float], backward: Sequence[float], *, sent: float = 0.0, parameters: float = 0.0, saved: float = 0.0
) -> Workload:
    """One layer for each stage."""
    count = len(forward)
    values = tuple(Value(i, (i + 1,), sent) for i in range(count - 1)) if sent else ()
    return Workload(
        tuple(f"layer{i}" for i in range(count)), numpy.array([forward]), numpy.array([backward]),
        numpy.full(count, parameters), numpy.full(count, saved), numpy.zeros(count), values,
    )  # fmt: skip


def plan_of(*replicas: int, pipelines: int = 1) -> Plan:
    return Plan(tuple(PlannedStage((i,), count) for i, count in enumerate(replicas)), pipelines)


def walk(plan: Plan, workload: Workload, training: Training, machine: Machine = MACHINE) -> tuple[Walked, Evaluation]:
    evaluation = evaluate(plan, workload, machine, training)
    return walked(plan, evaluation, machine, training), evaluation


# A step with a flush


@pytest.mark.parametrize("schedule", FLUSHING)
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (1, 5), (2, 1), (4, 3), (4, 9), (16, 64)])
def test_equal_stages_take_what_the_formula_says(schedule: str, stages: int, microbatches: int) -> None:
    own, evaluation = walk(plan_of(*[1] * stages), chain([1.0] * stages, [2.0] * stages), Training(schedule, microbatches))
    assert own.seconds == (microbatches - 1) * 3 + stages * 3 == evaluation.seconds
    assert own.depths is None and own.fits and own.memory == tuple(cost.memory for cost in evaluation.stages)


@given(st.lists(st.tuples(eighths, eighths), min_size=1, max_size=4), st.integers(1, 9))
def test_gpipe_takes_the_slowest_forward_and_the_slowest_backward(stages: list[tuple[float, float]], microbatches: int) -> None:
    """So never less than the formula, which takes the slowest stage."""
    forward, backward = zip(*stages, strict=True)
    own, evaluation = walk(plan_of(*[1] * len(stages)), chain(forward, backward), Training("gpipe", microbatches))
    assert own.seconds == (microbatches - 1) * (max(forward) + max(backward)) + sum(forward) + sum(backward)
    assert own.seconds >= evaluation.seconds


@given(st.lists(st.tuples(eighths, eighths), min_size=1, max_size=4), st.integers(1, 9))
def test_1f1b_takes_at_least_what_each_stage_and_those_before_it_do(stages: list[tuple[float, float]], microbatches: int) -> None:
    forward, backward = zip(*stages, strict=True)
    own, _ = walk(plan_of(*[1] * len(stages)), chain(forward, backward), Training("1f1b", microbatches))
    before = 0.0
    for there, back in stages:
        assert own.seconds >= microbatches * (there + back) + before
        before += there + back


@given(st.lists(eighths, min_size=1, max_size=4), st.integers(1, 9))
def test_1f1b_takes_at_most_the_formula_where_backwards_are_twice_the_forwards(forward: list[float], microbatches: int) -> None:
    backward = [2 * value for value in forward]
    own, evaluation = walk(plan_of(*[1] * len(forward)), chain(forward, backward), Training("1f1b", microbatches))
    assert own.seconds <= evaluation.seconds


UNEVEN = [
    ([2.0, 1.0], [4.0, 2.0], 4, 25.0, 27.0, "the second stage's work is hidden behind the first's, but for 1 s"),
    ([1.0, 2.0], [2.0, 4.0], 4, 27.0, 27.0, "nothing hides the first stage's first forward and last backward"),
    ([4.0, 3.0, 1.0, 1.0], [1.0, 2.0, 4.0, 1.0], 5, 38.0, 37.0, "slow forwards and slow backwards wait for each other"),
]


@pytest.mark.parametrize(("forward", "backward", "microbatches", "expected", "formula", "why"), UNEVEN)
def test_the_formula_bounds_1f1b_from_neither_side(
    forward: list[float], backward: list[float], microbatches: int, expected: float, formula: float, why: str
) -> None:
    own, evaluation = walk(plan_of(*[1] * len(forward)), chain(forward, backward), Training("1f1b", microbatches))
    assert (own.seconds, evaluation.seconds) == (expected, formula), why


def test_two_replicas_and_one_by_hand() -> None:
    """F = 2, B = 2 and F = B = 1, four microbatches: the drawing in tests/core/test_timing.py."""
    workload, plan = chain([2.0, 1.0], [2.0, 1.0]), plan_of(2, 1)
    assert walk(plan, workload, Training("1f1b", 4))[0].seconds == 12
    assert str(schedule_of(plan, Training("1f1b", 4))) == "\n".join(
        ("F0@0 F2@0 B0@0 B2@0", "F1@0 F3@0 B1@0 B3@0", "F0@1 B0@1 F1@1 B1@1 F2@1 B2@1 F3@1 B3@1")
    )
    summed = replace(workload, parameters=numpy.array([1.5, 0.0]))  # 2 * 1/2 * 1.5 bytes at 1 a second, behind the last backward
    assert walk(plan, summed, Training("1f1b", 4))[0].seconds == 13.5


def test_a_border_that_is_busy_all_the_time_bounds_a_step() -> None:
    """Four messages of 5 s each way over one link, whatever the 10 s that the pipeline needs to fill and drain."""
    own, _ = walk(plan_of(1, 1), chain([1.0, 1.0], [1.0, 1.0], sent=5.0), Training("gpipe", 4))
    assert own.seconds == 4 * 2 * 5


@pytest.mark.parametrize("schedule", FLUSHING)
@given(stages=st.integers(1, 5), microbatches=st.integers(1, 9))
def test_straight_schedules_are_the_named_ones(schedule: str, stages: int, microbatches: int) -> None:
    made = schedule_of(plan_of(*[1] * stages), Training(schedule, microbatches))
    assert made == SCHEDULES[schedule](stages, microbatches) and made.name == schedule


@st.composite
def plans(draw: st.DrawFn) -> tuple[Plan, Workload, Machine]:
    """Up to four stages with messages and parameters, on a machine that overlaps or not."""
    count = draw(st.integers(1, 4))
    forward, backward = (draw(st.lists(eighths, min_size=count, max_size=count)) for _ in range(2))
    replicas = draw(st.lists(st.integers(1, 3), min_size=count, max_size=count))
    workload = chain(forward, backward, sent=draw(st.sampled_from([0.0, 0.5])), parameters=draw(st.sampled_from([0.0, 0.25])))
    return plan_of(*replicas), workload, replace(MACHINE, overlap=draw(st.booleans()))


@pytest.mark.parametrize("schedule", FLUSHING)
@given(problem=plans(), microbatches=st.integers(3, 9))
def test_long_schedules_are_walked_alike(schedule: str, problem: tuple[Plan, Workload, Machine], microbatches: int) -> None:
    plan, workload, machine = problem
    training = Training(schedule, microbatches)
    seconds = seconds_of(evaluate(plan, workload, machine, training), machine)
    with pytest.MonkeyPatch.context() as patch:
        short = step_seconds(plan, training, seconds)
        patch.setattr(module, "MOST_ACTIONS", 0)
        assert step_seconds(plan, training, seconds) == pytest.approx(short, rel=1e-12)


@given(plans(), st.integers(3, 9))
def test_no_replica_has_more_in_flight_than_its_memory_is_for(problem: tuple[Plan, Workload, Machine], microbatches: int) -> None:
    plan, _, _ = problem
    for schedule in FLUSHING:
        training = Training(schedule, microbatches)
        made, rank = schedule_of(plan, training), 0
        for index, stage in enumerate(plan.stages):
            flights = [made.in_flight(rank + replica) for replica in range(stage.replicas)]
            assert max(flights) == training.in_flight(stage.replicas, plan.downstream(index))
            rank += stage.replicas


# Without flushes


def test_deeper_where_that_is_faster() -> None:
    """1-2 starves at PipeDream's depths: 3.75 for 3. One round more needs one more version and one more microbatch's values."""
    workload, plan, training = chain([1.0, 2.0], [2.0, 4.0], parameters=0.0, saved=10.0), plan_of(1, 2), Training("pipedream")
    own, evaluation = walk(plan, workload, training)
    assert own == Walked(3.0, (3, 0), (40.0, 10.0), True) and evaluation.seconds == 3.0
    small = replace(MACHINE, devices=((replace(DEVICE, memory_bytes=39.0), 64),))
    assert walk(plan, workload, training, small)[0] == Walked(3.75, (2, 0), (30.0, 10.0), True)
    tiny = replace(MACHINE, devices=((replace(DEVICE, memory_bytes=29.0), 64),))
    assert walk(plan, workload, training, tiny)[0] == Walked(3.75, (2, 0), (30.0, 10.0), False)


def test_memory_of_versions() -> None:
    """Of 4 bytes of parameters and 10 of saved values: one more of each for PipeDream, no more weights for two buffers."""
    workload, plan = chain([1.0, 1.0], [2.0, 2.0], parameters=4.0, saved=10.0, sent=1.5), plan_of(1, 1)
    free = replace(MACHINE, levels=(replace(MACHINE.levels[0], bytes_per_second=1.5),))  # a round trip of 4 s beside 3 s of work
    plain = Training("pipedream", optimizer_bytes=0.0)
    own, evaluation = walk(plan, workload, plain, free)
    assert own.depths == (2, 0) and own.seconds == 3.0
    assert own.memory[0] == evaluation.stages[0].memory + 4 + 10 and own.memory[1] == evaluation.stages[1].memory
    two, evaluation = walk(plan, workload, replace(plain, schedule="pipedream-2bw", microbatches=6), free)
    assert two.depths == (2, 0) and two.memory[0] == evaluation.stages[0].memory + 10


def test_each_stage_has_its_own_devices_memory() -> None:
    """The first stage stands on the small devices."""
    workload, plan = chain([1.0, 2.0], [2.0, 4.0], saved=10.0), plan_of(1, 2)
    for first, depth in ((35.0, 2), (45.0, 3)):
        kinds = ((replace(DEVICE, name="first", memory_bytes=first), 1), (DEVICE, 2))
        machine = Machine("kinds", (replace(MACHINE.levels[0], count=3),), kinds, overlap=True)
        kinds_of_layers = replace(workload, forward=workload.forward.repeat(2, 0), backward=workload.backward.repeat(2, 0))
        assert walk(plan, kinds_of_layers, Training("pipedream"), machine)[0].depths == (depth, 0)


@pytest.mark.parametrize("schedule", SCHEDULE_KINDS)
def test_pipelines_share_the_microbatches(schedule: str) -> None:
    workload = chain([1.0, 1.0], [2.0, 2.0])
    one, two = plan_of(1, 1), plan_of(1, 1, pipelines=2)
    own = walk(two, workload, Training(schedule, 8))[0].seconds
    half = walk(one, workload, Training(schedule, 4))[0].seconds
    assert own == (half if schedule in FLUSHING else half / 2)


def test_two_buffers_need_as_many_microbatches_as_the_first_stage_is_deep() -> None:
    own, evaluation = walk(plan_of(1, 1, 1, 1), chain([1.0] * 4, [2.0] * 4), Training("pipedream-2bw", 2))
    assert evaluation.fits and not own.fits and own.seconds == math.inf


@given(plans())
def test_a_walk_takes_at_least_the_work(problem: tuple[Plan, Workload, Machine]) -> None:
    plan, workload, machine = problem
    for schedule in SCHEDULE_KINDS:
        training = Training(schedule, 12)
        own, evaluation = walk(plan, workload, training, machine)
        shared = max(cost.compute / stage.replicas for cost, stage in zip(evaluation.stages, plan.stages, strict=True))
        assert own.seconds >= shared * (training.microbatches if training.flushes else 1) * (1 - 1e-12)
        assert len(own.memory) == len(plan.stages)


# The best of several


def founds_of(*plans: Plan, workload: Workload, training: Training, machine: Machine = MACHINE) -> list[Found]:
    return [Found(plan, evaluate(plan, workload, machine, training), 0.0, str(index)) for index, plan in enumerate(plans)]


def one_layer_each(*layers: int) -> Plan:
    first, stages = 0, []
    for count in layers:
        stages.append(PlannedStage(tuple(range(first, first + count))))
        first += count
    return Plan(tuple(stages))


def test_the_best_is_the_fastest_as_walked() -> None:
    """Both cuts have a slowest stage of 6 s; the walk hides the light stage behind the heavy one before it."""
    training = Training("1f1b", 4)
    workload = chain([1.0, 1.0, 1.0], [2.0, 2.0, 2.0])
    founds = founds_of(one_layer_each(1, 2), one_layer_each(2, 1), workload=workload, training=training)
    assert founds[0].evaluation.seconds == founds[1].evaluation.seconds
    best, own = best_of(founds, MACHINE, training)
    assert best is founds[1] and own.seconds == 25 and best_of(founds[::-1], MACHINE, training)[0] is founds[1]


def test_of_equal_ones_the_first_stays_and_the_formula_decides() -> None:
    training = Training("1f1b", 4)
    workload = chain([1.0, 1.0], [2.0, 2.0])
    founds = founds_of(one_layer_each(1, 1), one_layer_each(1, 1), workload=workload, training=training)
    assert best_of(founds, MACHINE, training)[0] is founds[0]
    lower = replace(founds[1], evaluation=replace(founds[1].evaluation, seconds=1.0))
    assert best_of([founds[0], lower], MACHINE, training)[0] is lower


def test_what_does_not_fit_is_only_chosen_where_nothing_does() -> None:
    training = Training("pipedream-2bw", 2)
    workload = chain([1.0] * 4, [2.0] * 4)
    deep, shallow = founds = founds_of(one_layer_each(1, 1, 1, 1), one_layer_each(4), workload=workload, training=training)
    assert best_of(founds, MACHINE, training)[0] is shallow
    best, own = best_of([deep], MACHINE, training)
    assert best is deep and not own.fits


def test_nothing_to_choose_from() -> None:
    with pytest.raises(CompileError, match="there is no plan to choose from"):
        best_of([], MACHINE, Training())
