"""Whose fault it is, what, where, and what to do.

Every error that this project raises on purpose is one of these four. An error is a plain message of a few lines: what is
wrong with the numbers, where (module path and source line where the graph knows them), and the ways out. Not here: errors
of torch itself, which pass through unchanged where they already say enough.
"""

from __future__ import annotations


class PdcompilerError(Exception):
    """Base of all errors of this project: `except pdcompiler.PdcompilerError` catches them all."""


class CompileError(PdcompilerError):
    """The input cannot be compiled or run as asked: a model, an argument, a batch, a partition, a schedule."""

    def __init__(self, what: str, *, where: str | None = None, ways_out: tuple[str, ...] = ()) -> None:
        lines = [what]
        if where:
            lines.append(f"  at: {where}")
        lines += [f"  try: {way}" for way in ways_out]
        super().__init__("\n".join(lines))


class VerifyError(PdcompilerError):
    """A pass broke a rule of its level, or a program is not equal to the model: our fault, please report it."""


class DeadlockError(VerifyError):
    """Rank programs wait for each other for ever; the message holds the shortest cycle, by rank and node."""


class WorkerError(PdcompilerError):
    """A rank failed while a step ran. The same root cause is raised on every rank.   rank: which; None where nobody knows."""

    def __init__(self, cause: str, *, rank: int | None) -> None:
        super().__init__(cause)
        self.rank = rank
