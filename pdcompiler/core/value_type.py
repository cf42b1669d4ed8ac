"""The type of a value: shape, element type and device, with shapes that may contain the number of rows as a symbol.

Not here: which node has which type (`ir.type_of`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import sympy
import torch

Integer: TypeAlias = int | sympy.Expr
ROWS = sympy.Symbol("rows", integer=True, positive=True)
"""The number of rows of a microbatch: the one symbol in our shapes."""


@dataclass(frozen=True)
class ValueType:
    """Shape, element type and device of a tensor; shapes may contain the symbol ROWS."""

    shape: tuple[Integer, ...]
    dtype: torch.dtype
    device: str = "cpu"

    def at(self, rows: int) -> ValueType:
        """The type for a microbatch of `rows` rows: all sizes are plain integers."""
        return ValueType(tuple(evaluate(size, rows) for size in self.shape), self.dtype, self.device)

    def elements(self) -> Integer:
        """Number of elements, an expression in ROWS."""
        return sympy.Mul(*self.shape) if self.shape else sympy.Integer(1)

    def nbytes(self) -> Integer:
        """Size in bytes, an expression in ROWS."""
        return self.elements() * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}[{', '.join(map(str, self.shape))}]"


def evaluate(size: Integer, rows: int) -> int:
    """An integer expression at a number of rows."""
    return size if isinstance(size, int) else int(size.subs(ROWS, rows))


def estimate(cost: sympy.Expr | float, rows: int) -> float:
    """A cost at a number of rows; a size that depends on data counts as `rows`."""
    return float(cost.subs(dict.fromkeys(cost.free_symbols, rows))) if isinstance(cost, sympy.Basic) else float(cost)


def has_data_dependent_shape(type: object) -> bool:
    """Whether a tensor's sizes depend on the values of others (as of `nonzero`), not on the number of rows alone."""
    return isinstance(type, ValueType) and any(getattr(size, "free_symbols", set()) - {ROWS} for size in type.shape)
