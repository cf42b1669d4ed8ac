"""Cut the row of operations so that the slowest stage is as fast as possible.

The time of a stage is the sum of its operations' seconds plus what its two borders cost, both ways: the bytes that cross by
the link's bandwidth, and the link's latency for each value that crosses beyond the first (every border has one). The
recurrence over (stages, position) finds the optimum over all legal cuts:

    best[k][j] = min over i < j of max(best[k-1][i], time of the stage [i, j))

Not here: replication, memory, and stages that are not neighbours in the model's own order.
"""

from __future__ import annotations

import numpy

from pdcompiler.core.errors import CompileError
from pdcompiler.core.partition import Floats, Problem


def search_cuts(problem: Problem, stages: int) -> list[int]:
    """The positions at which stages 1, 2, ... begin. Raises CompileError where the model has too few legal cuts."""
    places = numpy.flatnonzero(problem.legal & problem.anchored)
    if len(places) < stages - 1:
        raise CompileError(
            f"{stages} ranks asked for, but the model can be cut in at most {len(places) + 1} stages",
            ways_out=(f"world_size={len(places) + 1} or less",),
        )
    border = _border_seconds(problem)
    edges = numpy.array([0, *places, len(problem.nodes)])
    work = numpy.concatenate([[0.0], numpy.cumsum(problem.seconds)])[edges]
    best = work + border[edges]
    best[0] = numpy.inf
    choices: list[numpy.ndarray] = []
    for _ in range(stages - 1):
        best, choice = _one_more_stage(best, work, border[edges])
        choices.append(choice)
    cuts, at = [], len(edges) - 1
    for choice in reversed(choices):
        at = int(choice[at])
        cuts.append(int(edges[at]))
    return cuts[::-1]


def _one_more_stage(best: Floats, work: Floats, border: Floats) -> tuple[Floats, numpy.ndarray]:
    """best and the last cut for one stage more. Among equally slow plans, the one that sends least over this cut."""
    longer, choice = numpy.full(len(best), numpy.inf), numpy.zeros(len(best), dtype=int)
    for j in range(1, len(best)):
        slowest = numpy.maximum(best[:j], work[j] - work[:j] + border[:j] + border[j])
        equal = numpy.flatnonzero(slowest <= slowest.min() * (1 + 1e-9))
        choice[j] = equal[numpy.argmin(border[equal])]
        longer[j] = slowest[choice[j]]
    return longer, choice


def _border_seconds(problem: Problem) -> Floats:
    """What a cut costs each of its two stages, both ways; nothing at the two ends."""
    machine = problem.machine
    more = numpy.maximum(problem.messages - 1, 0) * machine.link_latency_seconds
    seconds: Floats = 2 * (problem.sent / machine.link_bytes_per_second + more)
    seconds[0] = 0.0
    return numpy.append(seconds, 0.0)
