"""`pdcompiler.compile`: the arguments, checked, before anything is traced or sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from pdcompiler.backends.distributed import launched
from pdcompiler.compiler import Request
from pdcompiler.core.asynchronous import NAMES, Asynchronous
from pdcompiler.core.batch import BatchDims, read_batch
from pdcompiler.core.errors import CompileError
from pdcompiler.core.loss import LossFunction
from pdcompiler.core.machine import Machine
from pdcompiler.core.partition import Partition
from pdcompiler.core.pass_manager import Watch
from pdcompiler.core.schedule import Schedule
from pdcompiler.core.ticks import Ticks
from pdcompiler.given_partition import read_partition, read_replicas
from pdcompiler.given_schedule import (
    AUTO,
    Placed,
    evaluation_schedule,
    from_file,
    is_automatic,
    like_which,
    placement,
    read_schedule,
    read_ticks,
    stages_of,
    training_of,
)
from pdcompiler.holdings import Initialize
from pdcompiler.microbatches import best_microbatches
from pdcompiler.optimizers import MakeOptimizer
from pdcompiler.outputs import LossWeight
from pdcompiler.pipeline import Options, Pipeline
from pdcompiler.schedule_choice import choose_schedule
from pdcompiler.traces import Traces


def compile(
    model: nn.Module,
    world_size: int,
    *,
    example_args: Sequence[Any] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    example_target: Any = None,
    loss_fn: LossFunction | None = None,
    schedule: str | Path | Schedule | Asynchronous = "1f1b",
    microbatches: int | Literal["auto"] | None = None,
    stages_per_rank: int | None = None,
    optimizer: MakeOptimizer | None = None,
    machine: Machine | str | Path | None = None,
    partition: Partition | str | Path | Sequence[str] | None = None,
    replicas: Sequence[int] | None = None,
    loss_weight: LossWeight = "rows",
    batch_dims: BatchDims | None = None,
    device: torch.device | str | None = None,
    init: Initialize | None = None,
    seed: int = 0,
    timeout: float = 300.0,
    watch: Watch | None = None,
) -> Pipeline:
    """Compile a model for `world_size` ranks.

    Args:
        model: any nn.Module that can be traced; nothing of it is changed. Its parameters are trained in place by whatever
            optimizer the user makes of `pipe.parameters()`. On the meta device, ranks get memory for their own stages only.
        world_size: the number of ranks: one for each stage, for each replica of a stage, or for several stages. Under torchrun it
            must be the launched number.
        example_args, example_kwargs, example_target: one batch. Left out, the model is compiled at the first step.
        loss_fn: (outputs, target) -> scalar. None: the model's own loss (outputs.loss, outputs["loss"], a scalar output).
        schedule: "1f1b", "gpipe", "zb-h1", "zb-h2"; of several stages a rank "interleaved", "zb-v", "dualpipe-v"; or a Schedule,
            or its file, as text or as the CSV of torch.distributed.pipelining, whose communication is checked and left out;
            "auto": the fastest that is found for the example batch's costs and the machine's memory;
            without flushes "pipedream" or "pipedream-2bw", or an Asynchronous.
        microbatches: how many a batch is cut into; "auto": as many as make a step of the example batch the fastest, by the
            planner's costs for the machine; None: twice the number of ranks. Of pipedream-2bw: those of one update; pipedream
            has none.
        stages_per_rank: of "interleaved", None: 2; of "auto", round the ranks, None: 1.
        optimizer: a function of a list of parameters that makes a torch.optim optimizer of them: `pipe.optimizer`. Without
            flushes it must be given, for the update is a part of the step: there is one optimizer for each stage.
        machine: what is compiled for: a Machine, a ready one's name ("h100-servers", ...), or its TOML file; of one with more
            devices than ranks, the first. None: a laptop's cores.
        partition: a Partition, its JSON file, or the module paths at which stages 1, 2, ... begin; None: chosen by cost.
        replicas: how many ranks hold each of the stages that the module paths begin: (2, 1, 1) for two paths. Microbatch i runs
            on replica i mod replicas; gradients are summed over the replicas. A Partition has its own. None: one each.
        loss_weight: weight of a microbatch's loss: "rows" (its share of the rows: the full batch's mean), "sum" (1), or a
            function of the microbatch's tensors by name, normalised over the batch (its valid tokens, say).
        batch_dims: which dimension of an input carries the rows, by name; None: it is not split. Left out: dimension 0 of
            every input that has the batch's number of rows there.
        device: where a model on the meta device will live.
        init: fills one tensor of a model on the meta device, by name.
        seed: of dropout and all that the model draws: (seed, place in the model, step, microbatch) give each number, whatever
            the partition, the schedule and the replicas; torch's own generators are left alone.
        timeout: seconds after which a rank gives up waiting for another.
        watch: called with (name, value) after each pass.

    Raises:
        CompileError: what cannot be compiled, with the place and the ways out, before any process group is made.
    """
    running = _check(model, world_size)
    _check_loss(loss_fn)
    has_example = bool(example_args or example_kwargs)
    asked = from_file(schedule)
    schedule = like_which(asked, stages_per_rank, has_example)
    automatic = is_automatic(microbatches, schedule, has_example)
    given = read_partition(partition, model)
    several = stages_of(schedule, world_size, stages_per_rank)
    placed = read_replicas(given, replicas, world_size, several)
    flushing, ticks, scales = _schedules(schedule, placed, None if automatic else microbatches, optimizer, world_size)
    held_on = _device(model, device)
    on_cuda = (held_on or next(iter(model.parameters()), torch.empty(0)).device).type == "cuda"
    chosen, training = _machine(machine, world_size), training_of(ticks or flushing)
    request = Request(
        model, world_size, loss_fn, chosen, given, not on_cuda, held_on, watch, training, placed[0], ticks,
        placement(flushing), bool(flushing.split),
    )  # fmt: skip
    if automatic:
        batch = read_batch(model, example_args, example_kwargs or {}, example_target, batch_dims)
        flushing = read_schedule(flushing.name, placed, best_microbatches(request, batch), world_size)
        request = replace(request, training=training_of(flushing))
    traces = Traces(request := replace(request, splits=request.splits or asked == AUTO))
    if asked == AUTO:
        batch = read_batch(model, example_args, example_kwargs or {}, example_target, batch_dims)
        flushing = choose_schedule(request, traces, batch, flushing)
    options = Options(flushing, loss_weight, batch_dims, timeout, init, optimizer, scales, seed)
    pipe = Pipeline(request, options, None if running is None else running[0], traces)
    if example_args or example_kwargs:
        pipe.prepare(*example_args, target=example_target, **(example_kwargs or {}))
    return pipe


def _check(model: nn.Module, world_size: int) -> tuple[int, int] | None:
    if not isinstance(model, nn.Module):
        raise CompileError(f"model is a {type(model).__name__}, expected an nn.Module")
    if not isinstance(world_size, int) or world_size < 1:
        raise CompileError(f"world_size is {world_size!r}, expected 1 or more")
    running = launched()
    if running is not None and running[1] != world_size:
        raise CompileError(
            f"world_size is {world_size}, but {running[1]} processes were launched",
            ways_out=(
                f"compile(model, {running[1]}, ...)",
                f"torchrun --nproc-per-node {world_size}, or without torchrun: all ranks then run in one process",
            ),
        )
    return running


def _check_loss(loss_fn: LossFunction | None) -> None:
    names = [name for name, _ in loss_fn.named_parameters()] if isinstance(loss_fn, nn.Module) else []
    if names:
        raise CompileError(f"loss_fn has parameters of its own: {', '.join(names)}", ways_out=("make it a part of the model",))


def _schedules(
    schedule: str | Schedule | Asynchronous, placed: Placed, microbatches: Any, optimizer: MakeOptimizer | None, world_size: int
) -> tuple[Schedule, Ticks | None, bool]:
    """The one that flushes; the one that does not, which then needs the other to evaluate; whether learning rates are scaled."""
    if isinstance(schedule, str) and schedule in NAMES:
        schedule = Asynchronous(schedule)
    if not isinstance(schedule, Asynchronous):
        return read_schedule(schedule, placed, microbatches, world_size), None, False
    if optimizer is None:
        raise CompileError(
            f"{schedule.name} updates the weights inside of a step, and no optimizer was given",
            ways_out=("optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1)", "a schedule that flushes: 1f1b"),
        )
    return evaluation_schedule(placed), read_ticks(schedule, placed, microbatches), schedule.scale_learning_rate


def _machine(machine: Machine | str | Path | None, world_size: int) -> Machine:
    """The devices that the ranks run on."""
    if not isinstance(machine, Machine):
        machine = Machine() if machine is None else Machine.load(machine)
    return machine.take(world_size)


def _device(model: nn.Module, device: torch.device | str | None) -> torch.device | None:
    """Where a model on the meta device will live; None for all others, which stay where they are."""
    is_meta = any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    return torch.device(device or "cpu") if is_meta else None
