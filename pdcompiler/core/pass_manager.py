"""Run passes of one level, check the level's rules after each, and let the user look.

Looking is a callback, `watch(name, value)`, called after each pass: print, time, dump or compare there. Not here: which passes
there are (`compiler.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

Level = TypeVar("Level")
Watch = Callable[[str, Any], None]


def run_passes(
    value: Level, passes: Sequence[Callable[[Level], Level]], verify: Callable[[Level], None], watch: Watch | None
) -> Level:
    """Apply the passes in order. An error of a pass or of its check carries a note that names the pass."""
    for apply in passes:
        name = getattr(apply, "__name__", "pass")
        try:
            value = apply(value)
            verify(value)
        except Exception as error:
            error.add_note(f"after pass {name}")
            raise
        if watch is not None:
            watch(name, value)
    return value
