"""Loops over numbers, compiled to machine code by numba. Not here: anything that is not a loop over arrays of numbers.

The first call of a function compiles it (seconds); the result is kept beside the source file, so the next process starts at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., Any])


def native(function: F) -> F:
    """Compile at the first call. In the function: arrays, numbers and other native functions only; `numpy.floor`, since
    `math.floor` overflows without a word."""
    return cast(F, numba.njit(cache=True)(function))


def plain(function: F) -> F:
    """A native function as Python, for whole arrays of numbers, or for a few calls that are not worth compiling it."""
    return cast(F, cast(Any, function).py_func)
