"""What every command does with its terminal and its files: errors told, progress shown, outputs checked before the work.

Results go to stdout; progress and errors to stderr. Not here: what a command prints.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from pdcompiler.core.errors import CompileError


class Say(Protocol):
    """Tells what is being done; with two numbers, how much of it."""

    def __call__(self, what: str, done: int | None = None, of: int | None = None) -> None: ...


@contextlib.contextmanager
def told() -> Iterator[None]:
    """A CompileError ends the command with exit code 1 and its text, without a traceback."""
    try:
        yield
    except CompileError as error:
        Console(stderr=True, highlight=False).print(f"CompileError: {error}", markup=False, soft_wrap=True)
        raise typer.Exit(1) from error


@contextlib.contextmanager
def waiting(what: str) -> Iterator[Say]:
    """A line that moves while something runs, gone afterwards; nothing where stderr is no terminal."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=None)

        def say(what: str, done: int | None = None, of: int | None = None) -> None:
            progress.update(task, description=what, completed=done, total=of)

        yield say


def check_outputs(*paths: Path | None) -> None:
    """Raise CompileError unless all of them can be written, each by itself. Nothing is written yet."""
    wanted = [path for path in paths if path is not None]
    for path in wanted:
        if path.is_dir():
            raise CompileError(f"{path} can't be written: it is a folder", ways_out=(f"a file in it: {path / 'name'}",))
        if not (folder := path.parent).is_dir():
            raise CompileError(f"{path} can't be written: there is no folder {folder}", ways_out=(f"mkdir -p {folder}",))
        if not os.access(path if path.exists() else folder, os.W_OK):
            raise CompileError(f"{path} can't be written: no permission", ways_out=("another place",))
    if len({path.resolve() for path in wanted}) < len(wanted):
        raise CompileError(f"two results are to be written to {wanted[0]}", ways_out=("a file of its own for each",))
