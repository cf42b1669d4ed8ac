"""The fewest devices within a time are those that the recurrence over devices finds, whatever numbers of replicas are allowed."""

from __future__ import annotations

from dataclasses import replace

import numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from pdcompiler.core.machine import Machine
from pdcompiler.core.plan import Training
from pdcompiler.core.spans import Spans
from pdcompiler.core.stage_time import terms_of
from pdcompiler.core.workload import Workload
from pdcompiler.passes.partition.by_devices import ByDevices
from pdcompiler.passes.partition.probe import fewest_devices, stages_of
from pdcompiler.passes.partition.spans import chain_spans
from pdcompiler.testing import machines, trainings, workloads

DEGREES = st.sets(st.integers(1, 8), min_size=1).map(lambda few: numpy.array(sorted(few)))


@settings(max_examples=150)
@given(workloads(chain=True, most_layers=6), machines(), trainings(("pipedream", "pipedream-2bw")), DEGREES | st.none())
def test_as_the_recurrence_over_devices(workload: Workload, machine: Machine, training: Training, degrees: object) -> None:
    spans, devices = chain_spans(workload), machine.world_size
    terms = terms_of(machine, training, 1, devices)
    allowed = numpy.arange(1, devices + 1) if degrees is None else degrees[degrees <= devices]  # type: ignore[index, operator]
    stages = stages_of(spans, terms, recompute=training.recompute)

    def probe(seconds: float) -> list[int] | None:
        found = fewest_devices(stages, terms, devices, seconds, degrees=degrees)  # type: ignore[arg-type]
        return None if found is None else [choice.replicas for choice in found]

    if not len(allowed):
        assert probe(1e30) is None
        return
    best = ByDevices(spans, terms, devices, allowed, recompute=training.recompute).solve().best[0]
    least, more = best.min(), max(best.min() * (1 + 1e-9), 1e-9)
    found = probe(more)
    if least == numpy.inf:
        assert found is None
        return
    assert found is not None and set(found) <= set(allowed.tolist())
    assert sum(found) == numpy.flatnonzero(best <= more)[0]
    assert least == 0 or probe(least * (1 - 1e-9)) is None


@settings(max_examples=50)
@given(workloads(chain=True, most_layers=6), machines(), trainings(("pipedream", "pipedream-2bw")))
def test_two_states_may_have_several_stages(workload: Workload, machine: Machine, training: Training) -> None:
    spans, devices = chain_spans(workload), machine.world_size
    terms = terms_of(machine, training, 1, devices)
    least = ByDevices(spans, terms, devices, numpy.arange(1, devices + 1)).solve().best[0].min()
    for seconds in (1.0, least * (1 + 1e-9) if 0 < least < numpy.inf else 1.0):
        alone, among = (fewest_devices(stages_of(own, terms), terms, devices, seconds) for own in (spans, with_slower(spans)))
        assert (alone is None) == (among is None)
        if alone is not None and among is not None:
            assert sum(choice.replicas for choice in alone) == sum(choice.replicas for choice in among)


def with_slower(spans: Spans) -> Spans:
    """Behind each stage, the same once more, slower."""
    names = ("end", "backward", "parameters", "saved", "working", "entering", "leaving", "messages")
    columns = {name: numpy.repeat(getattr(spans, name), 2, axis=-1) for name in names}
    forward = numpy.repeat(spans.forward, 2, axis=-1)
    forward[:, 1::2] += 100.0
    return replace(spans, start=2 * spans.start, forward=forward, **columns)
