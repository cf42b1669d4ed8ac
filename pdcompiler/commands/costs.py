"""`pdcompiler profile` and `pdcompiler fit`: what a model's operations take on this device, and the device's constants.

Not here: measuring (`passes/tracing/profile.py`), fitting (`passes/tracing/fit.py`), using a profile (`pdcompiler plan`).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import nn

from pdcompiler.commands.model import MODEL, is_on_meta, load, parse_device, read_example, to_device
from pdcompiler.commands.terminal import Say, check_outputs, told, waiting
from pdcompiler.compiler import Request, fingerprint, trace_model
from pdcompiler.core.batch import Batch
from pdcompiler.core.errors import CompileError
from pdcompiler.core.explanation import amount
from pdcompiler.core.graph_txt import Graph
from pdcompiler.core.ir import Trace
from pdcompiler.core.machine import Machine
from pdcompiler.core.machine_file import parse_bytes
from pdcompiler.core.profile import Profile
from pdcompiler.passes.partition.problem import make_problem
from pdcompiler.passes.tracing.fit import fit
from pdcompiler.passes.tracing.profile import REPETITIONS, apply_profile, profile_trace

PROFILE_EXAMPLE = "Example: pdcompiler profile models:gpt --rows 4 --output profile.json"
FIT_EXAMPLE = 'Example: pdcompiler fit profile.json --name "my GPU" --memory 80GB --machine h100-servers --toml mine.toml'


def profile_model(
    model: Annotated[str, typer.Argument(help=MODEL)],
    output: Annotated[Path, typer.Option("--output", "-o", help="the file that plan --profile and fit read")],
    rows: Annotated[int | None, typer.Option(help="of the microbatch that is measured; left out, the example's")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; left out, where the model is")] = None,
    graph: Annotated[Path | None, typer.Option(help="write the layers here too, as PipeDream's graph.txt")] = None,
    repetitions: Annotated[int, typer.Option(help="of which the median counts")] = REPETITIONS,
) -> None:
    """Measure what each operation of a model takes on this device, forward and backward.

    The loss is the model's own. Nothing of the model changes. A model on the meta device is measured with random weights. On a
    CPU, torch's threads are used: with OMP_NUM_THREADS=1 it is what one rank of one core takes.
    """
    with told():
        check_outputs(output, graph)
        for name, count in (("--rows", rows), ("--repetitions", repetitions)):
            if count is not None and count < 1:
                raise CompileError(f"{name} is {count}, expected 1 or more")
        chosen = None if device is None else parse_device(device)
        with waiting("making the model") as say:
            module, kwargs = load(model)
            on_meta = is_on_meta(module)
            batch = read_example(module, kwargs, to_device(module, chosen))
            say("tracing")
            trace = _trace(module, batch, rows or batch.rows)
            found = _measure(trace, module, batch, rows or batch.rows, repetitions, say)
            layers = None if graph is None else _layers(trace, found)
        found.save(output)
        if graph is not None and layers is not None:
            layers.save(graph)
    print(found)
    if on_meta:
        print("the model is on the meta device: measured with random weights")
    print(f"written to {output}" + (f" and {graph}" if graph else ""))


def _trace(model: nn.Module, batch: Batch, rows: int) -> Trace:
    request = Request(model, 1, None, Machine(), None, False, None, None)
    return trace_model(request, batch, rows=rows, symbolic=False, gradients=True)


def _measure(trace: Trace, model: nn.Module, batch: Batch, rows: int, repetitions: int, say: Say) -> Profile:
    def told_of(done: int, of: int) -> None:
        say("measuring", done, of)

    return profile_trace(
        trace, model, batch, rows=rows, fingerprint=fingerprint(model), repetitions=repetitions, progress=told_of
    )  # fmt: skip


def _layers(trace: Trace, profile: Profile) -> Graph:
    """The layers at which a stage may begin, with what was measured."""
    device = fit([profile]).device()
    apply_profile(trace, profile=profile, device=device, fingerprint=profile.model)
    return Graph.from_workload(make_problem(trace, Machine.flat(1, device=device), profile.rows).workload)


def fit_device(
    profiles: Annotated[list[Path], typer.Argument(help="of one device, in one dtype")],
    name: Annotated[str | None, typer.Option(help="of the device; left out, what it calls itself")] = None,
    toml: Annotated[Path | None, typer.Option(help="write a machine here, for plan --machine")] = None,
    machine: Annotated[str, typer.Option(help="whose links that machine has: a name, or a file")] = "laptop",
    memory: Annotated[str | None, typer.Option(help="of each device, instead of the machine's: 16GiB")] = None,
) -> None:
    """Find a device's constants from profiles: operations and bytes per second, and the least that an operation takes.

    For each kind of operation, the residual says how far the constants are from what was measured.
    """
    with told():
        check_outputs(toml)
        if memory is not None and toml is None:
            raise CompileError("--memory is for the machine that --toml writes", ways_out=("--toml machine.toml",))
        base = Machine.load(machine)
        if len(base.devices) > 1:
            kinds = len(base.devices)
            raise CompileError(f"machine {base.name!r} has {kinds} kinds of devices", ways_out=("a machine with one kind",))
        (own, count), *_ = base.devices
        nbytes = own.memory_bytes if memory is None else parse_bytes(memory, "--memory")
        measured = [Profile.load(path) for path in profiles]
        dtypes = sorted({profile.dtype for profile in measured})
        if len(dtypes) > 1:
            raise CompileError(f"the profiles are of different dtypes: {', '.join(dtypes)}", ways_out=("fit each by itself",))
        found = fit(measured)
        found = replace(found, name=name or found.name)
        if toml is not None:
            replace(base, name=found.name, devices=((found.device(nbytes), count),)).save(toml)
    print(found)
    if toml is not None:
        has = "no known limit of memory" if nbytes == torch.inf else f"{amount(nbytes)}B of memory"
        print(f"written to {toml}: this device with {has}, and the links of machine {base.name!r}")
