"""PipeDream's profiles (Narayanan et al., SOSP 2019), in the cost model of its optimizer, with its answers as reference.

A state is a downset of the graph without its inputs and without outputs that are one item of a tuple. Milliseconds of a minibatch
in the slowest stage, and a stage from state i to state j on r devices takes the longest of

    (time of its layers + 4 (r-1)/r * parameters / B) / r      their sum, nothing overlaps
    2 * out(i) / (B r)                                         unless i is the first
    2 * out(j) / (B r)                                         unless j is the last, or i the first

out(i): bytes of all layers of the state whose output crosses its border, read behind it or not, and of those that nobody reads.
B is the bandwidth of the innermost level of which one unit holds both ends; theirs plans level by level, servers all alike, so
two levels have no one formula for both. With R pipelines side by side: R-th part, and once more 4 (R-1)/R * parameters / B in
the reduction. Memory, where it is limited, is counted as theirs: ceil(devices of later stages / r) * (activations + parameters).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy
from quality import CLOSE, Row

from pdcompiler.bisection import fastest
from pdcompiler.core.graph_txt import Graph
from pdcompiler.core.lattice import graph_of
from pdcompiler.core.machine import Device, Level, Machine
from pdcompiler.core.plan import Plan, PlannedStage, Training
from pdcompiler.core.spans import Spans
from pdcompiler.core.stage_time import terms_of
from pdcompiler.core.workload import Floats, Workload, in_order
from pdcompiler.in_step import pipeline_counts
from pdcompiler.passes.partition.fold import Parts, fold_workload
from pdcompiler.passes.partition.ideals import ideals
from pdcompiler.passes.partition.lattice_spans import lattice_spans
from pdcompiler.passes.partition.orders import depth_first_orders
from pdcompiler.passes.partition.probe import fewest_devices, stages_of
from pdcompiler.passes.partition.spans import chain_spans

MOST_STATES = 2000
MOST_PAIRS = 7_000_000
"""Of all orders together, where there are more states."""
MOST_ORDERS = 12
TRAINING = Training("pipedream", optimizer_bytes=0.0, gradient_bytes=0.0, reduce_factor=4.0)
MOST_SECONDS = {"gnmt_large": 3.0, "densenet121": 3.0, "inception_v3": 10.0, "nasnetamobile": 10.0, "nasnetalarge": 10.0}
"""1, where none is said."""
NO_REFERENCE = (
    ("A_4x4", "gnmt_large"), ("readme_1x4", "inception_v3"), ("readme_1x4", "nasnetamobile"), ("readme_1x4", "nasnetalarge"),
    ("Bflat_16", "inception_v3"), ("Bflat_16", "nasnetamobile"), ("Bflat_16", "nasnetalarge"),
)  # fmt: skip
"""Topologies and profiles for which theirs found nothing within minutes, or was not tried."""


@dataclass(frozen=True)
class Case:
    """machine: levels, and memory where it is limited.   sends: whether activations take time.   straight: no replication."""

    machine: Machine
    sends: bool = True
    straight: bool = False


def suite(data: Path) -> Iterator[Row]:
    """Every run of theirs whose partition is valid; then graphs for which there is none. Missed where theirs is better, or where
    planning took too long."""
    runs = json.loads((data / "pipedream_reference.json").read_text())["runs"]
    solve(profile(data, "vgg16"), case_of(runs[0]))  # compiles the native loops
    for run in runs:
        if run["partition_valid"]:
            yield _row(run["tag"], data, run["model"], case_of(run), run["pipeline_ms"])
    by_tag = {run["tag"]: run for run in runs}
    for tag, model in NO_REFERENCE:
        yield _row(tag, data, model, case_of(by_tag[tag]), None)


def _row(tag: str, data: Path, model: str, case: Case, reference: float | None) -> Row:
    workload = profile(data, model)
    start = time.perf_counter()
    (found, plan), bound = solve(workload, case)
    seconds = time.perf_counter() - start
    missed = []
    if reference is not None and found * 1e3 > reference * (1 + 1e-9):
        missed.append("theirs is better")
    if seconds > (most := MOST_SECONDS.get(model, 1.0)):
        missed.append(f"over {most:g} s")
    proven = found <= bound * (1 + 2 * CLOSE)
    return Row(f"{tag} {model}: {plan}", found * 1e3, reference, bound * 1e3, proven, seconds, ", ".join(missed))


def case_of(run: dict[str, Any]) -> Case:
    """What one of their runs was asked."""
    memory = run["memory_size"] if run["use_memory_constraint"] else numpy.inf
    device = Device("V100", 1.0, 1.0, memory)
    counts, bandwidths = run["machines_per_level"], run["bandwidth_per_level_Bps"]
    levels = tuple(Level(f"level {k}", n, b, 0.0) for k, (n, b) in enumerate(zip(counts, bandwidths, strict=True)))
    machine = Machine(run["tag"], levels, ((device, None),), overlap=True)
    return Case(machine, run["activation_compression_ratio"] is not None, run["straight_pipeline"])


@cache
def profile(data: Path, model: str) -> Workload:
    """One of their files, without inputs and items of tuples. saved: bytes of each layer's output."""
    graph = Graph.load(data / "pipedream_profiles" / f"{model}.txt")
    readers, makers = {a for a, _ in graph.edges}, {b for _, b in graph.edges}
    left = {
        node.name for node in graph.nodes
        if not (node.is_input and node.name not in makers)
        and not (node.description.startswith("__getitem__") and node.name not in readers)
    }  # fmt: skip
    edges = tuple((a, b) for a, b in graph.edges if {a, b} <= left)
    return Graph(tuple(node for node in graph.nodes if node.name in left), edges).to_workload()


def solve(workload: Workload, case: Case) -> tuple[tuple[float, Plan], float]:
    """The seconds of the best plan, and it; and a bound of all."""
    work = float(workload.seconds.sum()) / case.machine.world_size
    best, bounds = (numpy.inf, Plan(())), []
    classes = candidates(workload, case)
    close = CLOSE if len(classes) == 1 else 1e-4
    for spans in classes:
        for pipelines in pipeline_counts(case.machine, TRAINING):
            found, bound = fastest(_probes(workload, case, spans, pipelines), work, best[0], close, CLOSE)
            bounds.append(bound)
            best = found or best
    return best, min(bounds) if len(classes) == 1 else work


def _probes(workload: Workload, case: Case, spans: Spans, pipelines: int) -> Callable[[float], tuple[float, Plan] | None]:
    devices = case.machine.world_size // pipelines
    terms = terms_of(case.machine, TRAINING, pipelines, devices)._replace(weight_factor=0.0)
    table, degrees = stages_of(spans, terms), numpy.array([1]) if case.straight else None

    def probe(seconds: float) -> tuple[float, Plan] | None:
        found = fewest_devices(table, terms, devices, seconds * pipelines, degrees=degrees)
        if found is None:
            return None
        plan = Plan(tuple(PlannedStage(spans.layers(choice.pair), choice.replicas) for choice in found), pipelines)
        return judge(workload, case, plan), plan

    return probe


def candidates(workload: Workload, case: Case) -> list[Spans]:
    """All stages, or those along some orders where there are too many states, with what PipeDream charges for them."""
    folded, parts = fold_workload(workload)
    graph = graph_of(folded)
    part = numpy.empty(workload.layers, dtype=numpy.int64)
    for k, layers in enumerate(parts):
        part[list(layers)] = k
    lattice = ideals(graph, MOST_STATES)
    spans = None if lattice is None else lattice_spans(folded, lattice, parts)
    if lattice is not None and spans is not None:
        done = numpy.unpackbits(lattice.words.view(numpy.uint8), axis=1, bitorder="little").astype(bool)
        return [charged(spans, crossing(workload, done[:, part]), case)]
    found = []
    for order in depth_first_orders(graph, max(3, min(MOST_ORDERS, 2 * MOST_PAIRS // folded.layers**2))):
        done = numpy.argsort(order)[part] < numpy.arange(folded.layers + 1)[:, None]
        found.append(charged(along(folded, parts, order), crossing(workload, done), case))
    return found


def along(folded: Workload, parts: Parts, order: Sequence[int]) -> Spans:
    """The stages along one order of the folded layers."""
    spans = chain_spans(in_order(folded, order))

    def layers(pair: int) -> tuple[int, ...]:
        return tuple(sorted(layer for k in spans.layers(pair) for layer in parts[order[k]]))

    return replace(spans, layers=layers)


def crossing(workload: Workload, done: numpy.ndarray) -> Floats:
    """By state, whose layers are those done: bytes of the layers whose output is read behind it, or by nobody."""
    out = done.copy()
    for value in workload.values:
        out[:, value.producer] &= ~done[:, list(value.consumers)].all(axis=1)
    return out @ workload.saved


def charged(spans: Spans, out: Floats, case: Case) -> Spans:
    """out: bytes that cross each state's border."""
    begin = numpy.repeat(numpy.arange(spans.states), numpy.diff(spans.start))
    entering = numpy.where(case.sends & (begin > 0), out[begin], 0.0)
    leaving = numpy.where(case.sends & (begin > 0) & (spans.end < spans.states - 1), out[spans.end], 0.0)
    return replace(spans, entering=entering, leaving=leaving, working=-spans.saved - entering - leaving)


def judge(workload: Workload, case: Case, plan: Plan) -> float:
    """Seconds per minibatch, from the definitions; infinite where the memory is too small."""
    end, readers = case.machine.world_size - 1, {value.producer: set(value.consumers) for value in workload.values}

    def speed(first: int, last: int) -> float:
        """Devices are counted from the machine's end."""
        return case.machine.levels[case.machine.level_of(end - last, end - first)].bytes_per_second

    copies, done = plan.pipelines, set[int]()
    slowest, before = 0.0, 0.0
    for number, stage in enumerate(plan.stages):
        own, r, behind = list(stage.layers), stage.replicas, plan.downstream(number)
        assert not done & set(own)
        done |= set(own)
        assert all(v.producer in done or not done & set(v.consumers) for v in workload.values)
        out = sum(float(workload.saved[i]) for i in done if readers.get(i, {-1}) - done)
        parameters = float(workload.parameters[own].sum())
        reduce = 4 * (r - 1) / r * parameters / speed(behind, behind + r - 1)
        reduce += 4 * (copies - 1) / copies * parameters / speed(0, plan.devices - 1)
        taken = (float(workload.seconds[0, own].sum()) + reduce) / r
        if case.sends and number > 0:
            taken = max(taken, 2 * before / speed(behind + r - 1, behind + r) / r)
        if case.sends and number > 0 and behind > 0:
            taken = max(taken, 2 * out / speed(behind - 1, behind) / r)
        if -(-behind // r) * (float(workload.saved[own].sum()) + parameters) > case.machine.devices[0][0].memory_bytes:
            return float(numpy.inf)
        slowest, before = max(slowest, taken), out
    assert len(done) == workload.layers and plan.devices <= case.machine.world_size
    return slowest / copies
