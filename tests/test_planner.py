"""The planner finds what brute force finds, for every schedule; and it keeps the laws that any planner must (PLANNER 4.9)."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdcompiler.core.errors import CompileError
from pdcompiler.core.machine import Level, Machine
from pdcompiler.core.plan import SCHEDULE_KINDS, Plan, PlannedStage, Training
from pdcompiler.core.workload import Value, Workload, in_order
from pdcompiler.found import Found
from pdcompiler.passes.partition.evaluate import evaluate
from pdcompiler.planner import plan, straight_plan
from pdcompiler.testing import machines, trainings, workloads
from tests.planning import best_by_force

SCHEDULES = tuple(SCHEDULE_KINDS)
NEAR = 1e-7
LAW = settings(max_examples=max(40, 3 * settings.default.max_examples // 10))
"""300 examples in `make test-all`."""


def found(workload: Workload, machine: Machine, training: Training) -> Found | None:
    """None where the memory is too small."""
    try:
        return plan(workload, machine, training)
    except CompileError as error:
        assert "memory" in str(error)
        return None


def seconds(workload: Workload, machine: Machine, training: Training) -> float:
    """Of the best plan; infinite where there is none."""
    best = found(workload, machine, training)
    return numpy.inf if best is None else best.evaluation.seconds


def assert_best(workload: Workload, machine: Machine, training: Training) -> None:
    best, (least, chosen) = found(workload, machine, training), best_by_force(workload, machine, training)
    assert (best is None) == (chosen is None), (best, chosen)
    if best is not None:
        assert best.evaluation.fits and best.evaluation == evaluate(best.plan, workload, machine, training)
        assert best.evaluation.seconds == pytest.approx(least, rel=NEAR, abs=1e-12), (best.plan, chosen)
        assert best.bound == pytest.approx(least, rel=1e-6, abs=1e-12) and best.proven


def problems(schedule: str, kinds: int, layers: int = 4) -> st.SearchStrategy[tuple[Workload, Machine, Training]]:
    """Small ones, branching or not."""
    either = st.one_of(workloads(kinds, most_layers=layers), workloads(kinds, most_layers=layers + 2, chain=True))
    return st.tuples(either, machines(kinds), trainings((schedule,)))


@pytest.mark.parametrize("kinds", [1, 2])
@pytest.mark.parametrize("schedule", SCHEDULES)
@settings(max_examples=15)
@given(data=st.data())
def test_case_35_it_is_as_good_as_brute_force(schedule: str, kinds: int, data: st.DataObject) -> None:
    assert_best(*data.draw(problems(schedule, kinds)))


@pytest.mark.full
@pytest.mark.parametrize("kinds", [1, 2])
@pytest.mark.parametrize("schedule", SCHEDULES)
@settings(max_examples=1500)
@given(data=st.data())
def test_it_is_as_good_as_brute_force_on_many(schedule: str, kinds: int, data: st.DataObject) -> None:
    """3,000 for each schedule: two of them flush, one has the largest stage as its objective, one that of a round."""
    assert_best(*data.draw(problems(schedule, kinds, layers=5)))


@LAW
@given(workloads(most_layers=6), machines(), trainings())
def test_one_stage_a_rank_is_as_good_as_brute_force(workload: Workload, machine: Machine, training: Training) -> None:
    """In the workload's own order, every device with a stage, as `compile` runs it."""
    devices, layers = machine.world_size, workload.layers
    if layers < devices:
        with pytest.raises(CompileError, match=rf"^{devices} stages asked for, but the model can be cut in at most {layers}"):
            straight_plan(workload, machine, training)
        return
    variants = (False, True) if training.recompute else (False,)
    least = numpy.inf
    for cuts in itertools.combinations(range(1, layers), devices - 1):
        parts = [tuple(range(a, b)) for a, b in itertools.pairwise((0, *cuts, layers))]
        for again in itertools.product(variants, repeat=devices):
            stages = tuple(PlannedStage(part, 1, recompute) for part, recompute in zip(parts, again, strict=True))
            judged = evaluate(Plan(stages), workload, machine, training)
            least = min(least, judged.seconds if judged.fits else numpy.inf)
    if least == numpy.inf:
        with pytest.raises(CompileError, match="no plan needs less"):
            straight_plan(workload, machine, training)
        return
    best = straight_plan(workload, machine, training)
    assert best.evaluation.seconds == pytest.approx(least, rel=NEAR, abs=1e-12) and best.proven
    assert [stage.replicas for stage in best.plan.stages] == [1] * devices


PROBLEMS = st.tuples(workloads(), machines(), trainings())


@LAW
@given(PROBLEMS)
def test_more_memory_or_bandwidth_never_hurts(problem: tuple[Workload, Machine, Training]) -> None:
    workload, machine, training = problem
    own = seconds(*problem)
    (device, count), *others = machine.devices
    roomy = replace(machine, devices=((replace(device, memory_bytes=2 * device.memory_bytes), count), *others))
    wide = replace(machine, levels=tuple(replace(level, bytes_per_second=2 * level.bytes_per_second) for level in machine.levels))
    assert seconds(workload, roomy, training) <= own * (1 + NEAR)
    assert seconds(workload, wide, training) <= own * (1 + NEAR)


@LAW
@given(workloads(), trainings(), st.integers(1, 4), st.sampled_from([1e9, 60.0]))
def test_one_more_device_never_hurts(workload: Workload, training: Training, count: int, memory: float) -> None:
    fewer, more = (flat(n, memory) for n in (count, count + 1))
    assert seconds(workload, more, training) <= seconds(workload, fewer, training) * (1 + NEAR)


def flat(count: int, memory: float = 1e9, bytes_per_second: float = 2.0) -> Machine:
    """Devices in one level."""
    from pdcompiler.core.machine import Device

    device = Device("device", 1.0, 1.0, memory)
    return Machine.flat(count, bytes_per_second=bytes_per_second, latency_seconds=0.0, device=device, overlap=True)


@LAW
@given(PROBLEMS, st.sampled_from([0.125, 8.0]))
def test_times_scale(problem: tuple[Workload, Machine, Training], factor: float) -> None:
    workload, machine, training = problem
    longer = replace(workload, forward=workload.forward * factor, backward=workload.backward * factor)
    levels = tuple(Level(v.name, v.count, v.bytes_per_second / factor, v.latency_seconds * factor) for v in machine.levels)
    slower = replace(machine, levels=levels)
    assert seconds(longer, slower, training) == pytest.approx(factor * seconds(*problem), rel=NEAR)


@LAW
@given(workloads(), trainings(), st.sampled_from([(2, 2), (2, 1), (3, 1), (1, 4)]))
def test_one_level_is_two_equal_ones(workload: Workload, training: Training, counts: tuple[int, int]) -> None:
    one = flat(counts[0] * counts[1])
    two = replace(one, levels=tuple(Level(f"level{n}", n, 2.0, 0.0) for n in counts))
    flat_plan, nested = seconds(workload, one, training), seconds(workload, two, training)
    assert nested <= flat_plan * (1 + NEAR)  # whole pipelines replicated are plans of the nested machine alone
    if training.schedule == "pipedream":
        assert nested == pytest.approx(flat_plan, rel=NEAR)


@LAW
@given(PROBLEMS, st.randoms(use_true_random=False))
def test_the_order_of_independent_layers_does_not_matter(problem: tuple[Workload, Machine, Training], random: object) -> None:
    workload, machine, training = problem
    other = in_order(workload, shuffled(workload, random))
    assert seconds(other, machine, training) == pytest.approx(seconds(*problem), rel=NEAR)


def shuffled(workload: Workload, random: object) -> list[int]:
    """Another topological order of the layers."""
    before = {layer: {a for a, b in workload.edges() if b == layer} for layer in range(workload.layers)}
    order: list[int] = []
    while len(order) < workload.layers:
        ready = [layer for layer in before if layer not in order and before[layer] <= set(order)]
        order.append(random.choice(ready))  # type: ignore[attr-defined]
    return order


@LAW
@given(PROBLEMS)
def test_case_37_never_above_one_device_nor_data_parallelism(problem: tuple[Workload, Machine, Training]) -> None:
    workload, machine, training = problem
    every = tuple(range(workload.layers))
    for replicas in (1, machine.world_size):
        other = evaluate(Plan((PlannedStage(every, replicas),)), workload, machine, training)
        assert not other.fits or seconds(*problem) <= other.seconds * (1 + NEAR)


@LAW
@given(PROBLEMS, st.data())
def test_a_layer_in_two_halves_never_hurts(problem: tuple[Workload, Machine, Training], data: st.DataObject) -> None:
    workload, machine, training = problem
    layer = data.draw(st.integers(0, workload.layers - 1))
    halves = halved(workload, layer, data.draw(st.sampled_from([0.0, 1.0, 100.0])))
    assert seconds(halves, machine, training) <= seconds(*problem) * (1 + NEAR)


def halved(workload: Workload, layer: int, nbytes: float) -> Workload:
    """One layer as two in series; the second makes what it made, the first makes `nbytes` for the second."""
    take = numpy.repeat(numpy.arange(workload.layers), [2 if k == layer else 1 for k in range(workload.layers)])
    share = numpy.where(take == layer, 0.5, 1.0)
    values = [Value(layer, (layer + 1,), nbytes)]
    for value in workload.values:
        consumers = tuple(reader + (reader > layer) for reader in value.consumers)
        values.append(Value(value.producer + (value.producer >= layer), consumers, value.bytes))
    return Workload(
        tuple(workload.names[k] for k in take), workload.forward[:, take] * share, workload.backward[:, take] * share,
        workload.parameters[take] * share, workload.saved[take] * share, workload.working[take], tuple(values),
    )  # fmt: skip


def chain(times: list[float], parameters: list[float], sent: float = 0.0) -> Workload:
    """Layers in a row; their backward takes no time."""
    zeros = numpy.zeros(len(times))
    values = tuple(Value(i, (i + 1,), sent) for i in range(len(times) - 1)) if sent else ()
    row = numpy.array([times])
    return Workload(tuple(map(str, range(len(times)))), row, 0 * row, numpy.array(parameters), zeros, zeros, values)


def test_the_counterexample_to_planning_level_by_level() -> None:
    """PLANNER 2(a): PipeDream's optimizer finds 5.5 s on 2 x 2 devices; three replicas and one take 3."""
    workload = chain([9.0, 3.0], [0.0, 40e9])
    machine = replace(flat(4), levels=(Level("inner", 2, 10e9, 0.0), Level("outer", 2, 10e9, 0.0)))
    machine = replace(machine, devices=tuple((replace(d, memory_bytes=1e15), n) for d, n in machine.devices))
    best = plan(workload, machine, Training("pipedream", reduce_factor=4.0))
    assert best.evaluation.seconds == pytest.approx(3.0) and str(best.plan) == "3-1" and best.proven


def test_memory_that_nothing_fits_says_what_would() -> None:
    workload = chain([1.0, 1.0], [30.0, 90.0])
    with pytest.raises(CompileError, match=r"stage 1 of 2 needs 360 B, the device has 100 B") as caught:
        plan(workload, flat(2, memory=100.0), Training("1f1b", 2))
    assert "weights 90 B, gradients 90 B, optimizer 180 B" in str(caught.value)
