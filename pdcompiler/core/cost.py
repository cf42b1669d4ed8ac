"""What a node or a stage costs, apart from any device: operations and bytes as expressions in the microbatch's rows.

    add = x + y     Cost(flops=20*rows, bytes_read=160*rows, bytes_written=80*rows, ...)
    stage           the sum of its nodes' costs;   .at(4): the numbers for microbatches of 4 rows

A node belongs to the forward or to the backward (`ir.is_backward`), so forward and backward are sums over different nodes.
Seconds come from a Machine (`machine.py`) that divides by its speeds, or from a profile. Not here: how costs are found
(`annotate_costs`, `profile`), nor what an operator costs (`flops.py`).
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy
import numpy.typing
import sympy

from pdcompiler.core.value_type import ROWS

Floats: TypeAlias = numpy.typing.NDArray[numpy.float64]
Expression: TypeAlias = sympy.Expr | int | float

FIELDS = ("flops", "bytes_read", "bytes_written", "output_bytes", "saved_bytes", "parameter_bytes", "operations")
"""Of a Cost, those that always have a value; the columns of a CostTable."""
UNKNOWN = math.nan


@dataclass(frozen=True)
class Cost:
    """flops: floating-point operations (a multiply-add counts two).   bytes_read, bytes_written: to and from memory.
    output_bytes: of the values that are made, views too: what a border behind the node would have to send.   saved_bytes: what
    of the memory that it fills waits for the backward.   parameter_bytes: of the parameters that no earlier node reads, so that
    a sum counts each once.   operations: how many are launched (views are not).   seconds: measured, None where it was not.
    notes: what is not known well."""

    flops: Expression = 0
    bytes_read: Expression = 0
    bytes_written: Expression = 0
    output_bytes: Expression = 0
    saved_bytes: Expression = 0
    parameter_bytes: Expression = 0
    operations: Expression = 0
    seconds: Expression | None = None
    notes: tuple[str, ...] = ()

    @property
    def bytes(self) -> Expression:
        """Read and written, together."""
        return self.bytes_read + self.bytes_written

    def __add__(self, other: Cost) -> Cost:
        return total_cost((self, other))

    def at(self, rows: int) -> Cost:
        """The same with numbers, for microbatches of `rows` rows. A size that depends on data counts as `rows`."""
        known = [name for name in (*FIELDS, "seconds") if getattr(self, name) is not None]
        values = _compiled(tuple(getattr(self, name) for name in known))(rows).tolist()
        return Cost(**dict(zip(known, values, strict=True)), notes=self.notes)


def total_cost(costs: Iterable[Cost]) -> Cost:
    """The cost of several nodes: of a stage, of its forward. Its seconds are known where those of all that cost anything are."""
    counts = Counter(costs)
    sums = {name: _sum((getattr(cost, name), count) for cost, count in counts.items()) for name in FIELDS}
    measured = all(cost.seconds is not None or is_free(cost) for cost in counts)
    seconds = _sum((cost.seconds or 0, count) for cost, count in counts.items())
    is_known = measured and any(cost.seconds is not None for cost in counts)
    notes = dict.fromkeys(note for cost in counts for note in cost.notes)
    return Cost(**sums, seconds=seconds if is_known else None, notes=tuple(notes))


def is_free(cost: Cost) -> bool:
    """Whether nothing is computed and nothing moved."""
    return cost.flops == 0 and cost.bytes_read == 0 and cost.bytes_written == 0 and cost.operations == 0


class CostTable:
    """The costs of many nodes, as numbers for any number of rows: one row per node, columns as in FIELDS.

    The expressions are compiled once; afterwards another number of rows takes microseconds.
    """

    def __init__(self, costs: Sequence[Cost]) -> None:
        places: dict[Expression, int] = {}
        for cost in costs:
            for name in (*FIELDS, "seconds"):
                places.setdefault(_known(cost, name), len(places))
        self._places = numpy.array([[places[_known(cost, name)] for name in FIELDS] for cost in costs], dtype=int)
        self._seconds = numpy.array([places[_known(cost, "seconds")] for cost in costs], dtype=int)
        self._compiled = compile_expressions(tuple(places))

    def at(self, rows: int) -> Floats:
        """(nodes, FIELDS)"""
        values: Floats = self._compiled(rows)[self._places].reshape(-1, len(FIELDS))
        return values

    def seconds_at(self, rows: int) -> Floats:
        """The measured seconds of each node; NaN where they were not measured."""
        seconds: Floats = self._compiled(rows)[self._seconds]
        return seconds


def compile_expressions(expressions: tuple[Expression, ...]) -> Callable[[int], Floats]:
    """A function from a number of rows to the values of many expressions."""
    symbols = {symbol for each in expressions if isinstance(each, sympy.Basic) for symbol in each.free_symbols}
    dependent = dict.fromkeys(symbols - {ROWS}, ROWS)
    if dependent:
        expressions = tuple(each.xreplace(dependent) if isinstance(each, sympy.Basic) else each for each in expressions)
    varying = [k for k, each in enumerate(expressions) if isinstance(each, sympy.Basic) and each.free_symbols]
    fixed = numpy.array([0.0 if k in set(varying) else float(each) for k, each in enumerate(expressions)])
    formulas = [expressions[k] for k in varying]
    evaluate: Any = sympy.lambdify(ROWS, formulas, modules=[_functions(formulas), "math"])

    def at(rows: int) -> Floats:
        values = fixed.copy()
        values[varying] = [float(value) for value in evaluate(rows)]
        return values

    return at


@functools.lru_cache(maxsize=1024)
def _compiled(expressions: tuple[Expression, ...]) -> Callable[[int], Floats]:
    return compile_expressions(expressions)


def _functions(formulas: Iterable[sympy.Expr]) -> dict[str, Any]:
    """Torch's own integer functions (FloorDiv, Mod, ...) by the names under which they are printed: they evaluate themselves."""
    found = {function for formula in formulas for function in formula.atoms(sympy.Function)}
    return {type(function).__name__: type(function) for function in found}


def _known(cost: Cost, name: str) -> Expression:
    value: Expression | None = getattr(cost, name)
    return UNKNOWN if value is None else value


def _sum(terms: Iterable[tuple[Expression, int]]) -> Expression:
    products = [count * value for value, count in terms]
    plain: float = sum(value for value in products if not isinstance(value, sympy.Basic))
    symbolic = [value for value in products if isinstance(value, sympy.Basic)]
    return sympy.Add(plain, *symbolic) if symbolic else plain
