"""The time and the memory of one candidate stage, as native functions for the planner's loops; those on an `Amount` or a
`Place` also for whole arrays of stages (`native.plain`).

The same definitions as `passes/partition/evaluate.py`, which is written apart from these and judges what they find; a property
test holds the two together. Devices are counted from the machine's end, where the last stage stands.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import numpy

from pdcompiler.core.machine import Machine
from pdcompiler.core.native import native
from pdcompiler.core.plan import SCHEDULE_KINDS, Training
from pdcompiler.core.spans import Integers
from pdcompiler.core.workload import Floats

GPIPE, ONE_F_ONE_B, PIPEDREAM, TWO_BUFFERED = (SCHEDULE_KINDS[name] for name in ("gpipe", "1f1b", "pipedream", "pipedream-2bw"))


Amount = TypeVar("Amount", float, Floats)
Place = TypeVar("Place", int, Integers)


class Terms(NamedTuple):
    """What is equal for all stages, as numbers. size: devices of the machine.   units: devices of one unit of each level,
    innermost first.   bandwidth, latency: by level.   memory: by kind, kinds counted from the machine's end; ends: the device
    after each kind's last."""

    kind: int
    microbatches: int
    pipelines: int
    overlap: bool
    reduce_factor: float
    weight_factor: float
    outer_level: int
    size: int
    units: numpy.ndarray
    bandwidth: Floats
    latency: Floats
    memory: Floats
    ends: numpy.ndarray


def terms_of(machine: Machine, training: Training, pipelines: int, devices: int) -> Terms:
    """For plans of `pipelines` pipelines of at most `devices` devices each; training's microbatches are all pipelines'."""
    levels, kinds = machine.levels, machine.devices[::-1]
    end = machine.world_size - 1
    outer = machine.level_of(end - pipelines * devices + 1, end)
    two_versions = training.schedule == "pipedream-2bw"
    return Terms(
        SCHEDULE_KINDS[training.schedule], training.of_one(pipelines).microbatches, pipelines, machine.overlap,
        training.reduce_factor, 1.0 + training.gradient_bytes + training.optimizer_bytes + two_versions, outer,
        machine.world_size, numpy.array(machine.unit_sizes, dtype=numpy.int64),
        numpy.array([level.bytes_per_second for level in levels], dtype=numpy.float64),
        numpy.array([level.latency_seconds for level in levels], dtype=numpy.float64),
        numpy.array([device.memory_bytes for device, _ in kinds], dtype=numpy.float64),
        numpy.cumsum([count for _, count in kinds]).astype(numpy.int64),
    )  # fmt: skip


@native
def level_of(terms: Terms, first: Place, last: Place) -> Place:
    """The innermost level of which one unit holds both devices: so many levels within it have none that does."""
    level = 0 * first
    for unit in terms.units[:-1]:
        level = level + ((terms.size - 1 - first) // unit != (terms.size - 1 - last) // unit)
    return level


@native
def reduce_seconds(terms: Terms, parameters: float, replicas: int, level: int) -> float:
    """All-reduce over a stage's replicas, and over whole pipelines."""
    if parameters <= 0.0:
        return 0.0
    own: float = terms.reduce_factor * (replicas - 1) / replicas * parameters / terms.bandwidth[level]
    own += 2.0 * (replicas - 1) * terms.latency[level]
    copies = terms.pipelines
    own += terms.reduce_factor * (copies - 1) / copies * parameters / terms.bandwidth[terms.outer_level]
    own += 2.0 * (copies - 1) * terms.latency[terms.outer_level]
    return own


@native
def border_seconds(terms: Terms, nbytes: Amount, level: int) -> Amount:
    """There and back."""
    seconds: Amount = (nbytes > 0.0) * 2.0 * (nbytes / terms.bandwidth[level] + terms.latency[level])
    return seconds


@native
def stage_seconds(terms: Terms, compute: Amount, entering: Amount, leaving: Amount, reduce: float, replicas: int) -> Amount:
    """The stage's time per microbatch of its pipeline."""
    if terms.kind == PIPEDREAM:
        share, reductions = 1.0 / replicas, float(replicas)
    else:
        share = ((terms.microbatches + replicas - 1) // replicas) / terms.microbatches
        reductions = float(terms.microbatches)
    if terms.overlap:
        slowest: Amount = numpy.maximum(compute * share + reduce / reductions, numpy.maximum(entering, leaving) * share)
        return slowest
    return (compute + entering + leaving) * share + reduce / reductions


@native
def stage_memory(terms: Terms, parameters: Amount, saved: Amount, working: Amount, replicas: int, downstream: int) -> Amount:
    """Bytes per device. working: with what crosses the borders."""
    warm = (downstream + replicas - 1) // replicas + 1
    own = (terms.microbatches + replicas - 1) // replicas
    flights = warm
    if terms.kind == GPIPE:
        flights = own
    elif terms.kind == ONE_F_ONE_B:
        flights = min(warm, own)
    versions = float(warm - 1) if terms.kind == PIPEDREAM else 0.0
    return parameters * (terms.weight_factor + versions) + saved * flights + working
