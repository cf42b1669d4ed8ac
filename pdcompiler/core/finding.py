"""What is found wrong with a schedule file, and where each of its actions stands. Not here: what is wrong (`lint.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from pdcompiler.core.schedule import Action
from pdcompiler.core.schedule_csv import Cell, Op, Rows


@dataclass(frozen=True)
class Finding:
    """What is wrong or, where it is no error, worth knowing; at which cell or rank, if at one."""

    what: str
    cell: Cell | None = None
    rank: int | None = None
    is_error: bool = True

    def __str__(self) -> str:
        if self.cell is not None:
            return f"{self.cell.place}: {self.what}"
        return self.what if self.rank is None else f"rank {self.rank}: {self.what}"


@dataclass(frozen=True)
class Use:
    """Where an op stands.   order: counted over the ops of its rank."""

    cell: Cell
    op: Op
    order: int

    @property
    def rank(self) -> int:
        return self.cell.rank

    def __str__(self) -> str:
        """As in the file; of a fused cell its part."""
        return self.cell.text if len(self.cell.ops) == 1 else str(self.op)

    def is_before(self, other: Use) -> bool:
        """On the same rank, earlier."""
        return self.rank == other.rank and self.order < other.order


Key: TypeAlias = Action | Op
"""What may stand once: a computation, whether its backward is whole or a part; anything else as it stands."""


def key_of(op: Op) -> Key:
    return op.action or op


def all_uses(rows: Rows) -> Iterator[Use]:
    """In the order of each rank."""
    for row in rows:
        yield from (Use(cell, op, k) for k, (cell, op) in enumerate((cell, op) for cell in row for op in cell.ops))


def first_uses(rows: Rows) -> dict[Key, Use]:
    """Where each action stands first."""
    found: dict[Key, Use] = {}
    for use in all_uses(rows):
        found.setdefault(key_of(use.op), use)
    return found
