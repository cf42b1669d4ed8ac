"""Measure what each node of a trace takes on the device at hand, and write measured seconds onto traces.

The graph runs with the user's own parameters and batch, twice in each repetition: once with a clock after each operation, once
with three clocks alone.

    clocked   | embedding | addmm | tanh | ... | loss | d_tanh | d_mm | ... |       medians of each operation
    whole     | forward                               | backward            |       medians of the two, to which the above scale

The first repetitions are thrown away (memory is not yet there, libraries choose their kernels). What lies between two clocks
counts for the operation before the second: its launch, its own time, the release of what it read last. Nothing of the user's is
changed: parameters are read alone, buffers and the batch are copies, random state is put back, no gradient is stored, no hook
runs.
Not here: what a measured profile is (`core/profile.py`).
"""

from __future__ import annotations

import itertools
import operator
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from pdcompiler.core.batch import Batch
from pdcompiler.core.cost import Cost, CostTable, is_free
from pdcompiler.core.errors import CompileError
from pdcompiler.core.flops import kind_of
from pdcompiler.core.ir import Trace, cost_of, is_backward, type_of
from pdcompiler.core.loss import LossFunction, Whole
from pdcompiler.core.machine import Device
from pdcompiler.core.profile import Key, Measured, Profile, dtype_of, measured_nodes
from pdcompiler.core.values import is_view

WARM_UP, REPETITIONS = 2, 10


def profile_trace(
    trace: Trace,
    model: nn.Module,
    batch: Batch,
    *,
    rows: int,
    fingerprint: str,
    loss_fn: LossFunction | None = None,
    repetitions: int = REPETITIONS,
    progress: Callable[[int, int], None] | None = None,
) -> Profile:
    """Measure a microbatch of `rows` rows of the user's batch. fingerprint: of the model.   progress: told after each
    repetition how many of how many are done.   Raises CompileError where there is nothing to run: a model on the meta device,
    rows that the trace is not for."""
    if not trace.admits(rows):
        raise CompileError(f"the trace is not for microbatches of {rows} rows", ways_out=("trace the model at these rows",))
    inputs = real_inputs(trace, model, batch, rows, loss_fn)
    device = next((tensor.device for tensor in inputs.values() if isinstance(tensor, Tensor)), torch.device("cpu"))
    keys = measured_nodes(trace)
    forward = [node for node in keys if not is_backward(node)]
    backward = [node for node in keys if is_backward(node)]
    order = [*forward, *backward]
    clocked = _with_clocks(trace, set(order))
    whole = _with_clocks(trace, {*forward[-1:], *backward[-1:]})
    clock = _gpu_clock if device.type == "cuda" else _clock
    of_nodes, of_whole = [], []
    generators = [device] if device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices=generators):
        for repetition in range(WARM_UP + repetitions):
            of_nodes.append(clock(clocked, inputs))
            of_whole.append(clock(whole, inputs))
            if progress is not None:
                progress(repetition + 1, WARM_UP + repetitions)
    medians = dict(zip(order, map(statistics.median, zip(*of_nodes[WARM_UP:], strict=True)), strict=True))
    sides = [statistics.median(side) for side in zip(*of_whole[WARM_UP:], strict=True)]
    forward_seconds = sides[0] if forward else 0.0
    backward_seconds = sides[-1] if backward else 0.0
    seconds = _scaled(medians, forward, forward_seconds) | _scaled(medians, backward, backward_seconds)
    return Profile(
        fingerprint, device_name(device), rows, dtype_of(trace), forward_seconds, backward_seconds, sum(medians.values()),
        tuple(_measured(keys, seconds, rows)),
    )  # fmt: skip


def apply_profile(trace: Trace, *, profile: Profile, device: Device, fingerprint: str) -> Trace:
    """Write measured seconds into the costs of a trace of the same model, as expressions in the rows: at the profile's rows they
    are the measured ones, at others they change as the device's roofline does. What was not measured takes as much longer than
    its roofline as the measured operations of its kind (or all) do, with a note. Raises CompileError for another model's profile.
    """
    profile.check(fingerprint, trace)
    measured = {operation.key: operation for operation in profile.operations}
    keys = measured_nodes(trace)
    if measured.keys().isdisjoint(keys.values()):
        raise CompileError("the profile has none of the trace's operations", ways_out=("measure this model, in this mode",))
    ratios = _ratios(profile, device)
    for node in trace.graph.nodes:
        cost = replace(cost_of(node), seconds=None)
        roofline = device.compute_seconds(cost)
        if (found := measured.get(keys[node]) if node in keys else None) is not None:
            at_rows = _roofline(found, device)
            cost = replace(cost, seconds=found.seconds / at_rows * roofline if at_rows else found.seconds)
        elif node in keys and not is_free(cost):
            notes = (*cost.notes, f"{node.target}: {keys[node][0] or 'the model'} has one that the profile has not")
            cost = replace(cost, seconds=ratios.get(kind_of(node), ratios[""]) * roofline, notes=notes)
        else:
            cost = replace(cost, seconds=0.0)
        node.meta["cost"] = cost
    return trace


def _roofline(operation: Measured, device: Device) -> float:
    """Seconds by the device's constants, at the profile's rows."""
    return float(device.compute_seconds(Cost(operation.flops, operation.bytes, operations=operation.operations)))


def _ratios(profile: Profile, device: Device) -> dict[str, float]:
    """Measured seconds over those of the roofline, by kind; "": of all that have a cost."""
    sums: dict[str, list[float]] = {"": [0.0, 0.0]}
    for operation in profile.operations:
        if roofline := _roofline(operation, device):
            for kind in (operation.kind, ""):
                both = sums.setdefault(kind, [0.0, 0.0])
                both[0] += operation.seconds
                both[1] += roofline
    return {kind: seconds / roofline if roofline else 1.0 for kind, (seconds, roofline) in sums.items()}


def _measured(keys: Mapping[fx.Node, Key], seconds: Mapping[fx.Node, float], rows: int) -> list[Measured]:
    costs = [cost_of(node) for node in keys]
    numbers = CostTable([Cost(cost.flops, cost.bytes, operations=cost.operations) for cost in costs]).at(rows)
    return [
        Measured(*key, kind_of(node), seconds[node], float(row[0]), float(row[1]), int(row[-1]))
        for (node, key), row in zip(keys.items(), numbers, strict=True)
    ]


def _scaled(medians: Mapping[fx.Node, float], nodes: list[fx.Node], whole: float) -> dict[fx.Node, float]:
    total = sum(medians[node] for node in nodes)
    return {node: medians[node] * whole / total if total else 0.0 for node in nodes}


# What runs


def real_inputs(
    trace: Trace, model: nn.Module, batch: Batch, rows: int, loss_fn: LossFunction | None
) -> dict[str, Tensor | int]:
    """The trace's inputs by placeholder: the user's parameters; copies of buffers (torch's own batch norms write theirs without
    saying so) and of the first rows of the batch, over again if it has fewer."""
    whole = Whole(model, loss_fn, batch)
    held = {n.removeprefix("model."): t for n, t in (*whole.named_parameters(remove_duplicate=False),
                                                     *whole.named_buffers(remove_duplicate=False))}  # fmt: skip
    written = _written(trace)
    found: dict[str, Tensor | int] = {}
    for node in trace.graph.nodes:
        if node.op != "placeholder":
            continue
        meaning = trace.inputs[node.name]
        if meaning.kind == "rows":
            found[node.name] = rows
        elif meaning.kind == "loss_weight":
            found[node.name] = torch.ones((), dtype=type_of(node).dtype, device=type_of(node).device)
        elif meaning.kind == "batch":
            found[node.name] = first_rows(batch.tensors[meaning.name].detach(), batch.dims[meaning.name], rows)
        else:
            tensor = held[meaning.name].detach()
            found[node.name] = tensor.clone() if meaning.kind == "buffer" or node in written else tensor
        _check_real(found[node.name], meaning.name)
    return found


def _check_real(value: Tensor | int, name: str) -> None:
    if isinstance(value, Tensor) and value.is_meta:
        raise CompileError(
            f"{name} is on the meta device: there is nothing to measure with", ways_out=("give the model memory first: to_empty",)
        )


def first_rows(tensor: Tensor, dim: int | None, rows: int) -> Tensor:
    """A copy of the first rows, over again where there are fewer."""
    if dim is None:
        return tensor.clone()
    return tensor.index_select(dim, torch.arange(rows, device=tensor.device) % tensor.shape[dim])


def _written(trace: Trace) -> set[fx.Node]:
    """Inputs that an operation might write in place, through views: none in a functional graph, but users register operators."""
    found: set[fx.Node] = set()
    for node in trace.graph.nodes:
        if node.op == "call_function" and getattr(getattr(node.target, "_schema", None), "is_mutable", False):
            for source in node.all_input_nodes:
                while is_view(source):
                    source = source.all_input_nodes[0]
                found.add(source)
    return found


def _with_clocks(trace: Trace, after: set[fx.Node]) -> fx.GraphModule:
    """The trace, forward before backward, that calls its input `clock` at its beginning and after each of the given nodes."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    calls = [node for node in trace.graph.nodes if node.op not in ("placeholder", "output")]
    for node in trace.graph.nodes:
        if node.op == "placeholder":
            copies[node] = graph.placeholder(f"input_{len(copies)}")  # "0.weight" of a Sequential is no name in Python
    clock = graph.placeholder("clock")
    graph.call_function(operator.call, (clock,))
    for node in (*(n for n in calls if not is_backward(n)), *(n for n in calls if is_backward(n))):
        copies[node] = graph.node_copy(node, lambda n: copies[n])
        if node in after:
            graph.call_function(operator.call, (clock,))
    graph.output(fx.node.map_arg(trace.graph.output_node().args[0], lambda n: copies[n]))
    return fx.GraphModule(trace.constants, graph)


def _clock(module: fx.GraphModule, inputs: Mapping[str, Any]) -> list[float]:
    """Run once; the seconds between the clocks."""
    times: list[float] = []
    module.forward(*inputs.values(), lambda: times.append(time.perf_counter()))
    return [after - before for before, after in itertools.pairwise(times)]


def _gpu_clock(module: fx.GraphModule, inputs: Mapping[str, Any]) -> list[float]:
    """The same on a GPU, by the GPU's own clock: operations are only queued when they are called."""
    events: list[torch.cuda.Event] = []

    def clock() -> None:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        events.append(event)

    torch.cuda.synchronize()
    module.forward(*inputs.values(), clock)
    torch.cuda.synchronize()
    return [before.elapsed_time(after) / 1000 for before, after in itertools.pairwise(events)]


def device_name(device: torch.device) -> str:
    """What the device calls itself."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type} {platform.machine()}"
