"""Add in place where nobody else reads the total.

    before                                   after
    t1 = accumulate(g0, g1)                  t1 = accumulate(g0, g1)
    t2 = accumulate(t1, g2)                  t2 = accumulate_in_place(t1, g2)

The first sum makes new memory: a stage's own results may share storage among each other or with saved values, so they are never
added to.
"""

from __future__ import annotations

from torch import fx

from pdcompiler.core import ops
from pdcompiler.core.ir import RankProgram

SUMS = (ops.accumulate, ops.accumulate_in_place)


def reuse_memory(program: RankProgram) -> RankProgram:
    """See the module's docstring."""
    for node in program.graph.nodes:
        if node.target is ops.accumulate:
            total = node.args[0]
            if isinstance(total, fx.Node) and total.target in SUMS and len(total.users) == 1:
                node.target = ops.accumulate_in_place
    return program
