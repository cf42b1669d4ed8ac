"""Plans whose stages keep in step: chosen where replicas of the formula's best wait, never slower than what is simple."""

from __future__ import annotations

from math import inf

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdcompiler import CompileError
from pdcompiler.core.machine import Device, Machine
from pdcompiler.core.plan import FLUSHING, Plan, PlannedStage, Training
from pdcompiler.core.workload import Workload
from pdcompiler.found import Found
from pdcompiler.in_step import plans_in_step
from pdcompiler.passes.partition.evaluate import evaluate
from pdcompiler.passes.partition.spans import chain_spans
from pdcompiler.planner import plan, ranked
from pdcompiler.ranking import walked
from tests.planning import all_plans


def layers(forward: list[float], parameters: list[float]) -> Workload:
    """Every backward is twice its forward; a microbatch leaves one byte in every layer."""
    count, seconds = len(forward), numpy.array([forward])
    names = tuple(f"layer{i}" for i in range(count))
    return Workload(names, seconds, 2 * seconds, numpy.array(parameters), numpy.ones(count), numpy.zeros(count), ())


def machine(devices: int, memory_bytes: float) -> Machine:
    device = Device("device", 1.0, 1.0, memory_bytes)
    return Machine.flat(devices, bytes_per_second=inf, latency_seconds=0.0, device=device, overlap=True)


def test_two_stages_of_two_replicas_are_faster_than_one_and_three() -> None:
    """No device holds all parameters. The light layers alone, the heavy ones on three replicas: by the formula 102 s."""
    workload, own = layers([1.0, 2.0, 4.0, 3.0], [4.0, 8.0, 8.0, 0.0]), machine(4, 16.0)
    training = Training("1f1b", 12, optimizer_bytes=0.0, gradient_bytes=0.0)
    found = plan(workload, own, training)
    assert str(found.plan) == "1-3" and found.evaluation.seconds == 102 and found.proven
    assert walked(found.plan, found.evaluation, own, training).seconds == 114
    chosen = ranked(found, own, training)
    assert str(chosen.plan) == "2-2" and chosen.walked == chosen.evaluation.seconds == 105
    assert chosen.bound == found.bound and chosen.gap == pytest.approx(105 / 102 - 1)


def test_nothing_is_searched_where_the_walk_takes_what_the_formula_says() -> None:
    workload, own, training = layers([1.0, 1.0], [0.0, 0.0]), machine(2, 100.0), Training("1f1b", 4)
    straight = Plan((PlannedStage((0,)), PlannedStage((1,))))
    best = Found(straight, evaluate(straight, workload, own, training), 0.0, "")
    assert plans_in_step(best, workload, [(chain_spans(workload), "")], own, training) == []


seconds_of_layers = st.integers(1, 8).map(float)


@settings(max_examples=30)
@given(
    st.lists(st.tuples(seconds_of_layers, st.integers(0, 3).map(float)), min_size=1, max_size=3), st.integers(1, 4),
    st.integers(4, 14).map(float), st.integers(1, 7), st.sampled_from(FLUSHING),
)  # fmt: skip
def test_no_plan_of_equal_replicas_is_faster(
    drawn: list[tuple[float, float]], devices: int, memory_bytes: float, microbatches: int, schedule: str
) -> None:
    """Those of one device and of data parallelism are among them; each takes, walked, what the formula says, or less."""
    forward, parameters = map(list, zip(*drawn, strict=True))
    workload, own = layers(forward, parameters), machine(devices, memory_bytes)
    training = Training(schedule, microbatches, optimizer_bytes=0.0, gradient_bytes=0.0)
    least = inf
    for other in all_plans(workload, own, training):
        evaluation = evaluate(other, workload, own, training)
        if evaluation.fits and len({stage.replicas for stage in other.stages}) == 1:
            assert walked(other, evaluation, own, training).seconds <= evaluation.seconds * (1 + 1e-9)
            least = min(least, evaluation.seconds)
    try:
        chosen = ranked(plan(workload, own, training), own, training)
    except CompileError:
        assert least == inf
        return
    assert chosen.walked is not None and chosen.walked <= least * (1 + 1e-6)
    assert chosen.bound <= chosen.evaluation.seconds


@pytest.mark.parametrize(("replicas", "expected"), [((2, 3, 1), 51), ((2, 2), 42), ((4,), 36)])
def test_each_microbatch_passes_one_replica_of_a_stage(replicas: tuple[int, ...], expected: float) -> None:
    """One layer a stage, 3 s for each of its replicas: with 12 microbatches, gpipe takes what the formula says, walked too."""
    workload = layers([float(count) for count in replicas], [0.0] * len(replicas))
    own, training = machine(sum(replicas), inf), Training("gpipe", 12)
    one_each = Plan(tuple(PlannedStage((i,), count) for i, count in enumerate(replicas)))
    evaluation = evaluate(one_each, workload, own, training)
    assert evaluation.seconds == walked(one_each, evaluation, own, training).seconds == expected
