"""The command `pdcompiler`: plans on a laptop for machines that are elsewhere. Its arguments and printing; no planning.

    pdcompiler plan models:llama --world-size 64 --machine h100-servers --microbatches 32 --json plan.json

Here stand `plan` and `break-even`; `profile` and `fit` in `commands/costs.py`, `lint` in `commands/lint.py`.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Annotated, TypeAlias

import torch
import typer

from pdcompiler.break_even import as_text, break_even_of_machine, check_bandwidths
from pdcompiler.commands.costs import FIT_EXAMPLE, PROFILE_EXAMPLE, fit_device, profile_model
from pdcompiler.commands.lint import LINT_EXAMPLE, lint_schedule
from pdcompiler.commands.model import MODEL, load, read_example
from pdcompiler.commands.terminal import Say, check_outputs, told, waiting
from pdcompiler.compiler import Request, fingerprint
from pdcompiler.core.errors import CompileError
from pdcompiler.core.graph_txt import Graph
from pdcompiler.core.ir import Trace
from pdcompiler.core.machine import Device, Machine
from pdcompiler.core.machine_file import parse_bandwidth, parse_bytes
from pdcompiler.core.partition import Partition
from pdcompiler.core.plan import Training
from pdcompiler.core.profile import Profile
from pdcompiler.core.workload import Workload
from pdcompiler.microbatches import microbatch_counts
from pdcompiler.passes.partition.problem import make_problem
from pdcompiler.passes.tracing.fit import fit
from pdcompiler.passes.tracing.profile import apply_profile
from pdcompiler.plan_partition import plan_partition
from pdcompiler.planner import plan_in_order
from pdcompiler.planning_trace import planning_trace

PLAN_EXAMPLE = "Example: pdcompiler plan models:llama --world-size 64 --machine h100-servers --microbatches 32 --json plan.json"
BREAK_EVEN_EXAMPLE = "Example: pdcompiler break-even vgg16/graph.txt --world-size 16 --low 1e8 --high 100GB/s --reduce-factor 4"
WORTH = 0.01
"""In a table of bandwidths, a plan is kept until another is faster by this part."""

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False, rich_markup_mode=None)

WorldSize: TypeAlias = Annotated[int, typer.Option(help="ranks, one device each")]
Memory: TypeAlias = Annotated[str | None, typer.Option(help="of each device, instead of the machine's: 16GiB")]
OptimizerBytes: TypeAlias = Annotated[float, typer.Option(help="bytes of optimizer state per byte of parameters: Adam 2")]
Schedule: TypeAlias = Annotated[str, typer.Option(help="1f1b, gpipe, pipedream or pipedream-2bw")]
Bandwidths: TypeAlias = tuple[float, float]


@app.callback()
def main() -> None:
    """Pipeline-parallel training programs, compiled from PyTorch models."""


@app.command(epilog=PLAN_EXAMPLE)
def plan(
    model: Annotated[str, typer.Argument(help=MODEL)],
    world_size: WorldSize,
    machine: Annotated[str, typer.Option(help="a ready machine's name, or a TOML file")] = "laptop",
    memory: Memory = None,
    microbatches: Annotated[int | None, typer.Option(help="of a step; left out, the planner chooses")] = None,
    schedule: Schedule = "1f1b",
    optimizer_bytes: OptimizerBytes = 2.0,
    recompute: Annotated[bool, typer.Option(help="let stages recompute their forward, where memory binds")] = False,
    profile: Annotated[Path | None, typer.Option(help="measured costs of this model, from pdcompiler profile")] = None,
    break_even: Annotated[
        tuple[str, str] | None, typer.Option(help="also a table of the best plans between two bandwidths: 1e9 100GB/s")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="write the partition here; compile(partition=) reads it")] = None,
) -> None:
    """Find the best partition of a model for a machine, and say why it is the best.

    The model may live on the meta device, so this runs on a laptop. Bandwidths are bytes per second, of the outermost level
    that joins the ranks.
    """
    with told():
        check_outputs(json)
        bandwidths = None if break_even is None else _bandwidths("--break-even", *break_even)
        training = Training(schedule, microbatches or 1, optimizer_bytes, recompute=recompute)
        measured = None if profile is None else Profile.load(profile)
        found, table = _plan(model, world_size, _machine(machine, memory), training, microbatches, measured, bandwidths)
    print(found)
    if measured is not None:
        print(f"costs: measured on {measured.device} with microbatches of {measured.rows} rows")
    if table:
        print(f"\n{table}")
    if json is not None:
        found.save(json)


@app.command("break-even", epilog=BREAK_EVEN_EXAMPLE)
def break_even_table(
    source: Annotated[str, typer.Argument(help=f"a PipeDream profile (graph.txt), or {MODEL}")],
    world_size: WorldSize,
    low: Annotated[str, typer.Option(help="the least bandwidth, in bytes per second: 1e8 or 100MB/s")],
    high: Annotated[str, typer.Option(help="the largest")],
    machine: Annotated[str | None, typer.Option(help="left out, a graph.txt's devices are linked alike, without latency")] = None,
    memory: Memory = None,
    microbatches: Annotated[int | None, typer.Option(help="of a step; left out, 8, or a model's best")] = None,
    schedule: Schedule = "pipedream",
    optimizer_bytes: OptimizerBytes = 2.0,
    reduce_factor: Annotated[float, typer.Option(help="what an all-reduce moves: a ring 2, PipeDream counts 4")] = 2.0,
) -> None:
    """Between which bandwidths which plan is the best: where it begins to pay to replicate more, or less.

    The bandwidth of the machine's outermost level is varied. A plan is kept until another is 1 % faster.
    """
    with told():
        bandwidths = _bandwidths("--low and --high", low, high)
        if source.endswith(".txt"):
            counted = Training().microbatches if microbatches is None else microbatches
            training = Training(schedule, counted, optimizer_bytes, reduce_factor=reduce_factor)
            chosen = _linked_alike() if machine is None else Machine.load(machine)
            chosen = _one_kind(_with_memory(chosen, memory).take(world_size), source)
            with waiting("planning") as say:
                table = _table(Graph.load(source).to_workload(), chosen, training, bandwidths, say)
        else:
            training = Training(schedule, microbatches or 1, optimizer_bytes, reduce_factor=reduce_factor)
            _, table = _plan(source, world_size, _machine(machine or "laptop", memory), training, microbatches, None, bandwidths)
    print(table)


app.command("profile", epilog=PROFILE_EXAMPLE)(profile_model)
app.command("fit", epilog=FIT_EXAMPLE)(fit_device)
app.command("lint", epilog=LINT_EXAMPLE)(lint_schedule)


def _plan(
    name: str, world_size: int, machine: Machine, training: Training, microbatches: int | None,
    profile: Profile | None = None, bandwidths: Bandwidths | None = None,
) -> tuple[Partition, str]:  # fmt: skip
    """The partition; and the table of bandwidths, where two are given."""
    taken = machine.take(world_size)  # refuses what it has not, before the model is made
    if profile is not None:
        _one_kind(taken, "the profile")
    with waiting("making the model") as say:
        module, kwargs = load(name)
        if profile is not None:
            profile.check_model(fingerprint(module))
        batch = read_example(module, kwargs, None)
        request = Request(module, world_size, None, machine, None, False, torch.device("cpu"), None, training)
        rows = sorted({-(-batch.rows // count) for count in microbatch_counts(batch.rows, microbatches)})
        say("tracing")
        trace = planning_trace(request, batch, rows)
        if profile is not None:
            apply_profile(trace, profile=profile, device=fit([profile]).device(), fingerprint=fingerprint(module))
        say("planning")
        found = plan_partition(request, trace, [n for n in rows if trace.admits(n)] or rows[-1:], batch.rows)
        return found, "" if bandwidths is None else _table_of_trace(trace, found, taken, training, bandwidths, say)


def _table_of_trace(
    trace: Trace, found: Partition, machine: Machine, training: Training, bandwidths: Bandwidths, say: Say
) -> str:  # fmt: skip
    """At the rows and microbatches of a found partition."""
    why = found.explanation
    assert why is not None
    training = replace(training, microbatches=why.microbatches)
    problem, _ = plan_in_order(make_problem(trace, machine, why.rows), machine, training)
    return _table(problem.workload, machine, training, bandwidths, say, in_order=True)


def _table(
    workload: Workload, machine: Machine, training: Training, bandwidths: Bandwidths, say: Say, *, in_order: bool = False
) -> str:  # fmt: skip
    ranges = break_even_of_machine(
        workload, machine, training, *bandwidths, in_order=in_order, worth=WORTH,
        watch=lambda bandwidth: say(f"planning for {bandwidth:.3g} bytes per second"),
    )  # fmt: skip
    head = f"best plans by the bandwidth of level {machine.levels[-1].name!r} of machine {machine.name!r}, in bytes per second"
    return f"{head}\n{as_text(ranges)}"


def _bandwidths(where: str, low: str, high: str) -> Bandwidths:
    both = parse_bandwidth(low, where), parse_bandwidth(high, where)
    check_bandwidths(*both)
    return both


def _linked_alike() -> Machine:
    """Devices of which nothing is known: all their times stand in a profile."""
    return Machine.flat(latency_seconds=0.0, device=Device("device", inf, inf, inf), overlap=True)


def _one_kind(machine: Machine, what: str) -> Machine:
    if len(machine.devices) > 1:
        raise CompileError(
            f"{what} has the costs of one kind of device, machine {machine.name!r} has {len(machine.devices)} kinds",
            ways_out=("a machine with one kind of device",),
        )
    return machine


def _machine(name: str, memory: str | None) -> Machine:
    return _with_memory(Machine.load(name), memory)


def _with_memory(machine: Machine, memory: str | None) -> Machine:
    if memory is None:
        return machine
    nbytes = parse_bytes(memory, "--memory")
    return replace(machine, devices=tuple((replace(device, memory_bytes=nbytes), n) for device, n in machine.devices))
