"""A schedule from a file: the CSV of torch.distributed.pipelining, or the text form of a Schedule.

Not here: what is wrong with one (`lint.py`).
"""

from __future__ import annotations

import csv
from pathlib import Path

from pdcompiler.core.errors import CompileError
from pdcompiler.core.lint import lint
from pdcompiler.core.schedule import Schedule
from pdcompiler.core.schedule_csv import Rows, read_cells, schedule_of

SHOWN = 3
"""So many errors are told at once; `pdcompiler lint` tells all."""


def read_rows(path: str | Path) -> Rows:
    """The cells of a file, whatever they say."""
    try:
        return read_cells(Path(path).read_text("utf-8"))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise CompileError(f"the schedule {path} can't be read: {why}") from error


def read_schedule_file(path: str | Path) -> Schedule:
    """What a file computes; its communication is checked and left out. Raises CompileError, with the places, if it is wrong."""
    rows = read_rows(path)
    errors = [finding for finding in lint(rows) if finding.is_error]
    if not errors:
        return schedule_of(rows, Path(path).name).check()
    more = f"\n  and {len(errors) - SHOWN} more" if len(errors) > SHOWN else ""
    first = "\n".join(f"  {finding}".replace("\n", "\n  ") for finding in errors[:SHOWN])
    count = "1 error" if len(errors) == 1 else f"{len(errors)} errors"
    raise CompileError(f"the schedule {path} has {count}:\n{first}{more}", ways_out=(f"pdcompiler lint {path}",))
