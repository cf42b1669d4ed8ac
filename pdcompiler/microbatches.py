"""How many microbatches a batch is cut into, where the user leaves it to the planner.

    microbatches   bubble       messages     tried: powers of two up to the rows
    few            long         few          each is planned with the rows that its microbatches have, from one trace
    many           short        many         the fewest among equals is chosen

Not here: how a partition is planned (`planner.py`).
"""

from __future__ import annotations

from dataclasses import replace

from pdcompiler.compiler import Request, choose_partition
from pdcompiler.core.batch import Batch
from pdcompiler.core.errors import CompileError
from pdcompiler.core.partition import Partition
from pdcompiler.traces import Traces


def microbatch_counts(rows: int, asked: int | None) -> list[int]:
    """The numbers of microbatches that are tried: the one asked for, or powers of two up to the rows."""
    if asked is None:
        return [1 << k for k in range(rows.bit_length()) if 1 << k <= rows]
    if not 1 <= asked <= rows:
        raise CompileError(f"microbatches is {asked}, the example batch has {rows} rows", ways_out=(f"1 to {rows}",))
    return [asked]


def best_microbatches(request: Request, batch: Batch) -> int:
    """With which number of microbatches the best plan of one stage a rank takes the least for a step. Where a model can be traced
    for one number of rows only, the number that goes with it; with a Partition, the number that it was planned for."""
    if isinstance(request.partition, Partition):
        if request.partition.explanation is None:
            raise CompileError('microbatches is "auto", and the given partition was planned for none', ways_out=("a number",))
        return request.partition.explanation.microbatches
    least = max(request.replicas or (1,))
    rows_of = {count: -(-batch.rows // count) for count in microbatch_counts(batch.rows, None) if count >= least}
    if not rows_of:
        raise CompileError(f"the example batch has {batch.rows} rows, and a stage {least} replicas", ways_out=("a larger batch",))
    asked = min(rows_of, key=lambda count: abs(count - 2 * request.world_size))
    trace = Traces(request).trace(batch, rows_of[asked], gradients=True)
    best, refusal = (float("inf"), asked), None
    for count, rows in rows_of.items():
        if not trace.admits(rows):
            continue
        training = replace(request.training, microbatches=count)
        try:
            why = choose_partition(replace(request, training=training), trace, rows).explanation
        except CompileError as error:
            refusal = error
            continue
        if why is not None and why.seconds < best[0] * (1 - 1e-6):
            best = (why.seconds, count)
    if best[0] == float("inf") and refusal is not None:
        raise refusal
    return best[1]
