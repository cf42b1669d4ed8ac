"""What we compile for: devices and the links between them. No constant about hardware stands anywhere else.

All figures are in bytes, seconds and operations per second; a bandwidth in bits has no place here.
"""

from __future__ import annotations

from dataclasses import dataclass

import sympy

from pdcompiler.core.cost import Cost
from pdcompiler.core.errors import CompileError


@dataclass(frozen=True)
class Machine:
    """Equal devices, all pairs linked alike. The defaults are a laptop's cores talking through the loopback device."""

    flops_per_second: float = 20e9
    memory_bytes_per_second: float = 8e9
    link_bytes_per_second: float = 2e9
    link_latency_seconds: float = 60e-6

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise CompileError(f"Machine: {name} must be above 0, is {value}")

    def compute_seconds(self, cost: Cost) -> sympy.Expr:
        """Roofline: the longer of computing and of moving the bytes; an upper bound of both, so that it stays a sum."""
        return cost.flops / self.flops_per_second + cost.bytes / self.memory_bytes_per_second

    def transfer_seconds(self, nbytes: sympy.Expr | float) -> sympy.Expr:
        """One message of `nbytes` from a device to another."""
        return self.link_latency_seconds + nbytes / self.link_bytes_per_second
