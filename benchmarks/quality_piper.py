"""Piper's BERT-32 (Tarnawski, Narayanan, Phanishayee, NeurIPS 2021): k devices, 1 to 80 GiB each, no tensor parallelism.

The objective is theirs, seconds per sample of the slowest stage. A stage on d devices, d a divisor of the batch N, takes

    (time of its layers + 2 * bytes of every edge that it cuts / B) / d + 4 (d-1)/d * parameters / (B N)
    A * y + B bytes on each device, y = ceil((d + devices of all later stages) / d), A and B sums over its layers

and at most N devices, since no more samples are in flight. Each layer runs plainly or recomputes its forward: as few as fit,
first those that save most bytes for their seconds. In our terms that is pipedream-2bw with N microbatches of one sample: an
update is one reduction, d divides N, and nothing overlaps. A stage with its first 0, 1, 2, ... layers recomputed is so many
candidates of one table. Not theirs: the search, which is the planner's own.
"""

from __future__ import annotations

import heapq
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy
from quality import CLOSE, Row

from pdcompiler.bisection import fastest
from pdcompiler.core.machine import Device, Machine
from pdcompiler.core.plan import Training
from pdcompiler.core.spans import Spans
from pdcompiler.core.stage_time import terms_of
from pdcompiler.core.workload import Floats, Value, Workload
from pdcompiler.passes.partition.probe import fewest_devices, stages_of
from pdcompiler.passes.partition.spans import chain_spans

MOST_SECONDS = 0.5
GIB = 2.0**30


@dataclass(frozen=True)
class Problem:
    """Layers in a topological order. plain, again: seconds of each, without and with recompute.   each, once: bytes A and B, two
    rows: without and with.   edges: (from, to, bytes)."""

    plain: Floats
    again: Floats
    parameters: Floats
    each: Floats
    once: Floats
    edges: tuple[tuple[int, int, float], ...]

    @property
    def layers(self) -> int:
        """How many."""
        return len(self.plain)


@dataclass(frozen=True)
class Case:
    """devices, memory_bytes of each, batch: samples; bytes_per_second."""

    devices: int
    memory_bytes: float
    batch: int
    bytes_per_second: float

    @property
    def usable(self) -> int:
        """Devices that have a sample in flight."""
        return min(self.devices, self.batch)


@dataclass(frozen=True)
class Stage:
    """recomputed: those of its layers that are."""

    layers: tuple[int, ...]
    replicas: int
    recomputed: tuple[int, ...]


def suite(data: Path) -> Iterator[Row]:
    """Every case without tensor parallelism. Missed where it is not their optimum, not proven, or too slow."""
    problem = read(data / "piper" / "bert32a100.json")
    answers = json.loads((data / "known_answers.json").read_text())["piper"]
    for number, (name, answer) in enumerate(answers.items()):
        case = case_of(name, answer)
        if number == 0:
            solve(problem, case)  # compiles the native loops
        yield _row(name, problem, case, answer["seconds_per_sample"])


def case_of(name: str, answer: dict[str, Any]) -> Case:
    """Such as "bert32 k=8 memGB=8 N=1920"."""
    numbers = dict(part.split("=") for part in name.split()[1:])
    return Case(int(numbers["k"]), float(numbers["memGB"]) * GIB, int(numbers["N"]), answer["bandwidth_bytes_per_s"])


def _row(name: str, problem: Problem, case: Case, reference: float | None) -> Row:
    start = time.perf_counter()
    found, bound = solve(problem, case)
    seconds = time.perf_counter() - start
    ours = None if found is None else found[0]
    proven = ours is None or ours <= bound * (1 + 2 * CLOSE)
    missed = []
    if (ours is None) != (reference is None) or (ours and reference and abs(ours / reference - 1) > 1e-6):
        missed.append("not the known optimum")
    if not proven:
        missed.append("not proven")
    if seconds > MOST_SECONDS:
        missed.append(f"over {MOST_SECONDS:g} s")
    return Row(name, ours, reference, None if ours is None else min(bound, ours), proven, seconds, ", ".join(missed))


def solve(problem: Problem, case: Case) -> tuple[tuple[float, list[Stage]] | None, float]:
    """The seconds and stages of the best plan, None where none fits; and a bound of all."""
    device = Device("device", 1.0, 1.0, case.memory_bytes)
    machine = Machine.flat(case.usable, bytes_per_second=case.bytes_per_second, latency_seconds=0.0, device=device)
    training = Training("pipedream-2bw", case.batch, 0.0, 0.0, reduce_factor=4.0)
    terms = terms_of(machine, training, 1, case.usable)._replace(weight_factor=0.0)  # A and B hold the weights
    divisors = numpy.array([d for d in range(1, case.batch + 1) if case.batch % d == 0])
    spans, recomputed = candidates(problem)
    table = stages_of(spans, terms)

    def probe(seconds: float) -> tuple[float, list[Stage]] | None:
        found = fewest_devices(table, terms, case.usable, seconds, degrees=divisors)
        if found is None:
            return None
        stages = [Stage(spans.layers(choice.pair), choice.replicas, recomputed[choice.pair]) for choice in found]
        return judge(problem, case, stages), stages

    return fastest(probe, float(problem.plain.sum()) / case.usable, close=CLOSE, equal=CLOSE)


def judge(problem: Problem, case: Case, stages: list[Stage]) -> float:
    """Seconds per sample, from the definitions; infinite where a stage does not fit."""
    assert sorted(layer for stage in stages for layer in stage.layers) == list(range(problem.layers))
    assert sum(stage.replicas for stage in stages) <= case.usable
    slowest, downstream = 0.0, 0
    for stage in reversed(stages):
        own, d = set(stage.layers), stage.replicas
        assert case.batch % d == 0 and set(stage.recomputed) <= own
        again = [int(layer in stage.recomputed) for layer in stage.layers]
        compute = sum((problem.again if r else problem.plain)[layer] for layer, r in zip(stage.layers, again, strict=True))
        cut = sum(nbytes for a, b, nbytes in problem.edges if (a in own) != (b in own))
        parameters = sum(problem.parameters[layer] for layer in stage.layers)
        reduce = 4 * (d - 1) / d * parameters / (case.bytes_per_second * case.batch)
        flights = -(-(d + downstream) // d)
        memory = sum(problem.each[r, i] * flights + problem.once[r, i] for i, r in zip(stage.layers, again, strict=True))
        if memory > case.memory_bytes:
            return float(numpy.inf)
        slowest = max(slowest, float((compute + 2 * cut / case.bytes_per_second) / d + reduce))
        downstream += d
    return slowest


def _workload(problem: Problem) -> Workload:
    values = tuple(Value(a, (b,), nbytes) for a, b, nbytes in problem.edges)
    names, none = tuple(map(str, range(problem.layers))), numpy.zeros(problem.layers)
    return Workload(names, problem.plain[None], 0 * problem.plain[None], problem.parameters, problem.each[0], none, values)


def candidates(problem: Problem) -> tuple[Spans, list[tuple[int, ...]]]:
    """Every stage, once for each number of layers that it recomputes; and which these are."""
    spans = chain_spans(_workload(problem))
    slower, saves = problem.again - problem.plain, problem.each[0] - problem.each[1]
    once = problem.once[1] - problem.once[0]
    order = numpy.argsort(slower / numpy.maximum(saves, 1.0), kind="stable")
    order = order[saves[order] > 0]
    rows, recomputed, sums = [], list[tuple[int, ...]](), []
    for pair in range(len(spans.end)):
        layers = spans.layers(pair)
        first = order[(order >= layers[0]) & (order <= layers[-1])]
        rows += [pair] * (len(first) + 1)
        recomputed += [tuple(first[:count].tolist()) for count in range(len(first) + 1)]
        plainly = problem.once[0, list(layers)].sum() - spans.entering[pair] - spans.leaving[pair]
        for column, base in ((slower, 0.0), (saves, 0.0), (once, plainly)):
            sums.append(base + numpy.concatenate([[0.0], numpy.cumsum(column[first])]))
    take = numpy.array(rows)
    more, less, working = (numpy.concatenate(sums[column::3]) for column in range(3))
    begin = numpy.repeat(numpy.arange(spans.states), numpy.diff(spans.start))[take]
    start = numpy.searchsorted(begin, numpy.arange(spans.states + 1)).astype(numpy.int64)
    columns = {name: getattr(spans, name)[take] for name in ("end", "parameters", "entering", "leaving", "messages")}
    columns |= {"forward": spans.forward[:, take] + more, "backward": spans.backward[:, take], "saved": spans.saved[take] - less}
    return replace(spans, start=start, working=working, layers=lambda pair: spans.layers(rows[pair]), **columns), recomputed


def read(path: Path) -> Problem:
    """One of their JSON files, layers in topological order, the smallest number first where that leaves a choice."""
    data: dict[str, Any] = json.loads(path.read_text())
    nodes = {node["id"]: node["TMPCs"]["1"] for node in data["nodes"]}
    edges = [(edge["sourceId"], edge["destId"], float(edge["communicationCost"])) for edge in data["edges"]]
    order = _order(sorted(nodes), edges)
    place = {name: k for k, name in enumerate(order)}

    def column(field: str) -> Floats:
        return numpy.array([[nodes[name][variant][field] for name in order] for variant in (0, 1)])

    seconds = column("timePerSample")
    return Problem(
        seconds[0], seconds[1], column("parameterSize")[0], column("memoryUsageA"), column("memoryUsageB"),
        tuple(sorted((place[a], place[b], nbytes) for a, b, nbytes in edges)),
    )  # fmt: skip


def _order(names: list[int], edges: list[tuple[int, int, float]]) -> list[int]:
    unmet = dict.fromkeys(names, 0)
    for _, after, _ in edges:
        unmet[after] += 1
    ready = [name for name in names if unmet[name] == 0]
    heapq.heapify(ready)
    order = []
    while ready:
        name = heapq.heappop(ready)
        order.append(name)
        for before, after, _ in edges:
            unmet[after] -= before == name
            if before == name and unmet[after] == 0:
                heapq.heappush(ready, after)
    return order
