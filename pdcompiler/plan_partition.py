"""The best partition of a batch, where the planner may choose replicas, whole pipelines and the rows of a microbatch.

    rows     2       4               8
             57 s    none in 63 s    none in 63 s      searched in this order, for less than what is known already

Not here: how one number of rows is planned (`planner.py`), and what `compile` does with one rank a stage (`compiler.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from pdcompiler.compiler import Request, explained
from pdcompiler.core.errors import CompileError
from pdcompiler.core.ir import Trace
from pdcompiler.core.partition import Partition
from pdcompiler.passes.partition.problem import Layers
from pdcompiler.planner import faster_in_order, plan_in_order, ranked

WORTH_A_WALK = 1.1
"""How much longer by the formula than the best is as walked a plan for another number of rows may take, to be looked for."""


def plan_partition(request: Request, trace: Trace, microbatch_rows: Sequence[int], batch_rows: int) -> Partition:
    """The best partition on at most the machine's devices, replicated stages, whole pipelines and recompute included, for the
    best of some numbers of rows of a microbatch. Of a large model only the narrowest cuts are searched; then it has a gap."""
    machine, least, best = request.machine.take(request.world_size), math.inf, None
    layers, refusal = Layers(trace), None
    for rows in sorted(microbatch_rows):
        training = replace(request.training, microbatches=-(-batch_rows // rows))
        steps = 1 if training.flushes else training.microbatches  # a plan's seconds are a step's or a microbatch's
        problem, found = faster_in_order(layers.problem(machine, rows), machine, training, least / steps * WORTH_A_WALK)
        if found is None:
            continue
        try:
            found = ranked(found, machine, training)
        except CompileError as error:
            refusal = refusal or error
            continue
        assert found.walked is not None
        if found.walked * steps < least:
            least, best = found.walked * steps, (problem, found, training)
    if refusal is not None and best is None:
        raise refusal
    if best is None:  # with the fewest rows, it takes the least memory: what would fit?
        rows = min(microbatch_rows)
        training = replace(request.training, microbatches=-(-batch_rows // rows))
        best = (*plan_in_order(layers.problem(machine, rows), machine, training), training)
    return explained(request.model, trace, *best[:2], machine, best[2])
