"""dnn-partitioning's workloads (Tarnawski et al., NeurIPS 2020): k accelerators, with and without one CPU beside them.

The objective is theirs: the largest over devices of compute and transfers, where a value is charged to each device that it
touches without lying on it whole; the CPU pays no transfers. Nodes of one colour stand on one device. Only forward nodes are in
an order; backward nodes go where the forward nodes of their colour are. A colour that has backward nodes only is ordered by the
mirror image of the edges between them. Nodes of one colour are one layer here.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
from quality import Row

from pdcompiler.branching import plan_straight
from pdcompiler.core.straight import StraightProblem
from pdcompiler.core.workload import Floats

MOST_SECONDS = 8.0


def suite(data: Path) -> Iterator[Row]:
    """Every workload twice: with the CPU and without. Missed where it is not proven, not their optimum, or too slow."""
    plan_straight(StraightProblem(((0, 1),), (((0, 1), 1.0),), numpy.ones(2), 2))  # compiles the native loops
    answers = json.loads((data / "known_answers.json").read_text())["dnn-partitioning"]
    for name, answer in answers.items():
        problem = read(data / "dnn-partitioning" / f"{name}.json")
        yield _row(name, replace(problem, spare=None), answer["optimum_no_cpu"])
        yield _row(f"{name} + CPU", problem, answer["optimum_contiguous_as_shipped"])


def _row(name: str, problem: StraightProblem, reference: float) -> Row:
    start = time.perf_counter()
    found = plan_straight(problem)
    seconds = time.perf_counter() - start
    missed = []
    if not found.proven:
        missed.append("not proven")
    if abs(found.seconds / reference - 1) > 1e-6:
        missed.append("not the known optimum")
    if seconds > MOST_SECONDS:
        missed.append(f"over {MOST_SECONDS:g} s")
    return Row(name, found.seconds, reference, found.bound, found.proven, seconds, ", ".join(missed))


def read(path: Path) -> StraightProblem:
    """One of their JSON files."""
    data: dict[str, Any] = json.loads(path.read_text())
    nodes = {node["id"]: node for node in data["nodes"]}
    colours: dict[Any, int] = {}
    colour = {i: colours.setdefault(node.get("colorClass", f"node {i}"), len(colours)) for i, node in nodes.items()}
    backward = {i for i, node in nodes.items() if node["isBackwardNode"]}
    forward_colours = {colour[i] for i in nodes if i not in backward}
    readers: dict[int, set[int]] = defaultdict(set)
    cost: dict[int, float] = {}
    edges = set()
    for edge in data["edges"]:
        maker, reader = edge["sourceId"], edge["destId"]
        readers[maker].add(reader)
        cost[maker] = edge["cost"]
        first, second = colour[maker], colour[reader]
        if not {maker, reader} & backward:
            edges.add((first, second))
        elif {maker, reader} <= backward and not {first, second} <= forward_colours:
            edges.add((second, first))
    values = [(tuple({colour[i]: None for i in (maker, *found)}), cost[maker]) for maker, found in readers.items()]

    def sums(field: str) -> Floats:
        total = numpy.zeros(len(colours))
        for i, node in nodes.items():
            total[colour[i]] += node[field]
        return total

    return StraightProblem(
        tuple(sorted(edge for edge in edges if edge[0] != edge[1])), tuple(value for value in values if len(value[0]) > 1),
        sums("fpgaLatency"), data["maxFPGAs"], sums("cpuLatency"), sums("size"), data["maxSizePerFPGA"],
    )  # fmt: skip
