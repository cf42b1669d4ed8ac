"""The command `pdcompiler`: plans on a laptop for machines that are elsewhere. Its arguments, progress and printing; no planning.

    pdcompiler plan models:llama --world-size 64 --machine h100-servers --microbatches 32 --json plan.json
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from torch import nn

from pdcompiler.compiler import Request, plan_partition, trace_model
from pdcompiler.core.batch import read_batch
from pdcompiler.core.errors import CompileError
from pdcompiler.core.machine import Machine
from pdcompiler.core.machine_file import parse_bytes
from pdcompiler.core.partition import Partition
from pdcompiler.core.plan import Training
from pdcompiler.traces import Traces

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False, rich_markup_mode=None)


@app.callback()
def main() -> None:
    """Pipeline-parallel training programs, compiled from PyTorch models."""


@app.command()
def plan(
    model: Annotated[str, typer.Argument(help="module:function; the function returns (model, example keyword arguments)")],
    world_size: Annotated[int, typer.Option(help="ranks, one device each")],
    machine: Annotated[str, typer.Option(help="a ready machine's name, or a TOML file")] = "laptop",
    memory: Annotated[str | None, typer.Option(help="of each device, instead of the machine's: 16GiB")] = None,
    microbatches: Annotated[int | None, typer.Option(help="of a step; left out, the planner chooses")] = None,
    schedule: Annotated[str, typer.Option(help="1f1b, gpipe, pipedream or pipedream-2bw")] = "1f1b",
    optimizer_bytes: Annotated[float, typer.Option(help="bytes of optimizer state per byte of parameters: Adam 2")] = 2.0,
    recompute: Annotated[bool, typer.Option(help="let stages recompute their forward, where memory binds")] = False,
    json: Annotated[Path | None, typer.Option(help="write the partition here; compile(partition=) reads it")] = None,
) -> None:
    """Find the best partition of a model for a machine, and say why it is the best.

    The model may live on the meta device, so this runs on a laptop: pdcompiler plan models:llama --world-size 64 --machine
    h100-servers
    """
    try:
        training = Training(schedule, microbatches or 1, optimizer_bytes, recompute=recompute)
        found = _plan(model, world_size, _machine(machine, memory), training, microbatches)
    except CompileError as error:
        Console(stderr=True, highlight=False).print(f"CompileError: {error}", markup=False, soft_wrap=True)
        raise typer.Exit(1) from error
    print(found)
    if json is not None:
        found.save(json)


def _plan(name: str, world_size: int, machine: Machine, training: Training, microbatches: int | None) -> Partition:
    machine.take(world_size)  # refuses what it has not, before the model is made
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("making the model")
        module, kwargs = load(name)
        batch = read_batch(module, (), {name: off_meta(value) for name, value in kwargs.items()}, None, None)
        request = Request(module, world_size, None, machine, None, False, torch.device("cpu"), None, training)
        rows = sorted({-(-batch.rows // count) for count in microbatch_counts(batch.rows, microbatches)})
        progress.update(task, description="tracing")
        if len(rows) == 1:  # a trace for one number of rows is made in a third of the time
            trace = trace_model(request, batch, rows=rows[0], symbolic=False, gradients=True)
        else:
            trace = Traces(request).trace(batch, rows[-1], gradients=True)
        progress.update(task, description="planning")
        return plan_partition(request, trace, [n for n in rows if trace.admits(n)] or rows[-1:], batch.rows)


def microbatch_counts(rows: int, asked: int | None) -> list[int]:
    """The numbers of microbatches that are tried: the one asked for, or powers of two up to the rows."""
    if asked is None:
        return [1 << k for k in range(rows.bit_length()) if 1 << k <= rows]
    if not 1 <= asked <= rows:
        raise CompileError(f"microbatches is {asked}, the example batch has {rows} rows", ways_out=(f"1 to {rows}",))
    return [asked]


def load(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """The model and the example batch that the user's function returns."""
    path, _, function = name.partition(":")
    sys.path.insert(0, "")
    try:
        made = getattr(importlib.import_module(path), function)()
        model, kwargs = made
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise CompileError(
            f"{name!r} gives no model: {type(error).__name__}: {error}",
            ways_out=("module:function, where function() returns (model, {argument: tensor})",),
        ) from error
    finally:
        sys.path.pop(0)
    if not isinstance(model, nn.Module) or not isinstance(kwargs, dict):
        raise CompileError(f"{name!r} returns {type(model).__name__} and {type(kwargs).__name__}, expected a model and a dict")
    return model, kwargs


def off_meta(value: Any) -> Any:
    """A tensor on the meta device as zeros on the CPU, where the model is traced as if it were."""
    is_meta = isinstance(value, torch.Tensor) and value.is_meta
    return torch.zeros(value.shape, dtype=value.dtype) if is_meta else value


def _machine(name: str, memory: str | None) -> Machine:
    machine = Machine.load(name)
    if memory is None:
        return machine
    nbytes = parse_bytes(memory, "--memory")
    return replace(machine, devices=tuple((replace(device, memory_bytes=nbytes), n) for device, n in machine.devices))
