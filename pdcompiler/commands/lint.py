"""`pdcompiler lint`: what is wrong with a schedule file, printed. Not here: what is (`core/lint.py`)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from pdcompiler.commands.terminal import told
from pdcompiler.core.errors import CompileError
from pdcompiler.core.finding import Finding
from pdcompiler.core.lint import lint
from pdcompiler.core.schedule import Schedule
from pdcompiler.core.schedule_csv import schedule_of
from pdcompiler.core.schedule_file import read_rows
from pdcompiler.core.timing import unit_timing

LINT_EXAMPLE = "Example: pdcompiler lint schedule.csv --ranks 4 --stages 8 --buffers 1"


def lint_schedule(
    path: Annotated[Path, typer.Argument(help="a CSV as torch.distributed.pipelining writes it, or a Schedule's text form")],
    ranks: Annotated[int | None, typer.Option(help="that it should have")] = None,
    stages: Annotated[int | None, typer.Option(help="that it should have, each on rank i mod ranks, or forth and back")] = None,
    buffers: Annotated[
        int | None, typer.Option(help="messages of a channel that may wait for their receive; 0: none; left out, any number")
    ] = None,
) -> None:
    """Say everything that is wrong with a schedule file, by rank (row) and cell, both from 0. Exit code 1 if something is.

    Errors are what no rank can run, or what torch would run wrongly; remarks are worth knowing: what its memory grows with, and
    under which communication its ranks would wait for each other.
    """
    with told():
        for name, value, least in (("--ranks", ranks, 1), ("--stages", stages, 1), ("--buffers", buffers, 0)):
            if value is not None and value < least:
                raise CompileError(f"{name} is {value}, expected {least} or more")
        rows = read_rows(path)
        findings = lint(rows, ranks, stages, buffers)
    console = Console(highlight=False, soft_wrap=True)
    for finding in findings:
        _print(console, finding)
    errors = sum(finding.is_error for finding in findings)
    if errors:
        console.print(f"{errors} error{'' if errors == 1 else 's'}", style="bold red")
        raise typer.Exit(1)
    console.print(summary(schedule_of(rows)), markup=False)


def _print(console: Console, finding: Finding) -> None:
    word, style = ("error", "red") if finding.is_error else ("remark", "yellow")
    console.print(f"[{style}]{word}:[/{style}] ", end="")
    console.print(str(finding), markup=False)


def summary(schedule: Schedule) -> str:
    """Of a schedule without errors."""
    found = unit_timing(schedule)
    idle = sum(found.bubble) / (found.finish * len(schedule.ranks))
    held = ", ".join(str(schedule.in_flight(rank)) for rank in range(len(schedule.ranks)))
    sizes = f"{len(schedule.ranks)} ranks, {schedule.stages} stages, {schedule.microbatches} microbatches"
    return f"no errors: {sizes}\nin flight, by rank: {held}\nbubble: {idle:.1%} (forward 1, backward 1 + 1, messages 0)"
