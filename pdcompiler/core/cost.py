"""What a node or a stage costs, apart from any device: operations and bytes as expressions in the microbatch's rows.

Seconds come from a Machine (`machine.py`) that divides by its speeds. Not here: how costs are found (`annotate_costs`).
"""

from __future__ import annotations

from dataclasses import dataclass

import sympy


@dataclass(frozen=True)
class Cost:
    """flops: floating-point operations (a multiply-add counts two).   bytes: read and written, together."""

    flops: sympy.Expr | int = 0
    bytes: sympy.Expr | int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.bytes + other.bytes)
