"""Add in place where nobody else reads the total.

    before                                   after
    t1 = accumulate(g0, g1)                  t1 = accumulate(g0, g1)
    t2 = accumulate(t1, g2)                  t2 = accumulate_in_place(t1, g2)
    t3 = accumulate((t2[1],), g3)            t3 = accumulate_in_place((t2[1],), g3)

The first sum makes new memory: a stage's own results may share storage among each other or with saved values, so they are never
added to.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from pdcompiler.core import ops
from pdcompiler.core.ir import RankProgram, nodes_in

SUMS = (ops.accumulate, ops.accumulate_in_place)


def reuse_memory(program: RankProgram) -> RankProgram:
    """See the module's docstring."""
    for node in program.graph.nodes:
        if node.target is ops.accumulate and all(map(_is_own, nodes_in(node.args[0]))):
            node.target = ops.accumulate_in_place
    return program


def _is_own(total: fx.Node) -> bool:
    """Whether it is a sum, or an item of one of which only items are read, each once; and nobody else reads it."""
    if total.target is operator.getitem:
        whole: Any = total.args[0]
        items = {user.args[1] for user in whole.users if user.target is operator.getitem}
        return len(total.users) == 1 and whole.target in SUMS and len(items) == len(whole.users)
    return total.target in SUMS and len(total.users) == 1
