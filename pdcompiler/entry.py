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
from pdcompiler.core.batch import BatchDims, read_batch
from pdcompiler.core.errors import CompileError
from pdcompiler.core.loss import LossFunction
from pdcompiler.core.machine import Machine
from pdcompiler.core.partition import Partition
from pdcompiler.core.pass_manager import Watch
from pdcompiler.core.plan import SCHEDULE_KINDS, Training
from pdcompiler.core.schedule import Schedule
from pdcompiler.given_partition import read_partition, read_replicas
from pdcompiler.holdings import Initialize
from pdcompiler.microbatches import best_microbatches
from pdcompiler.outputs import LossWeight
from pdcompiler.passes.schedules.named import SCHEDULES, replicated
from pdcompiler.pipeline import Options, Pipeline


def compile(
    model: nn.Module,
    world_size: int,
    *,
    example_args: Sequence[Any] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    example_target: Any = None,
    loss_fn: LossFunction | None = None,
    schedule: str | Schedule = "1f1b",
    microbatches: int | Literal["auto"] | None = None,
    machine: Machine | str | Path | None = None,
    partition: Partition | str | Path | Sequence[str] | None = None,
    replicas: Sequence[int] | None = None,
    loss_weight: LossWeight = "rows",
    batch_dims: BatchDims | None = None,
    device: torch.device | str | None = None,
    init: Initialize | None = None,
    timeout: float = 300.0,
    watch: Watch | None = None,
) -> Pipeline:
    """Compile a model for `world_size` ranks.

    Args:
        model: any nn.Module that can be traced; nothing of it is changed. Its parameters are trained in place by whatever
            optimizer the user makes of `pipe.parameters()`. On the meta device, ranks get memory for their own stages only.
        world_size: the number of ranks: one for each stage, or for each replica of a stage. Under torchrun it must be the
            launched number.
        example_args, example_kwargs, example_target: one batch. Left out, the model is compiled at the first step.
        loss_fn: (outputs, target) -> scalar. None: the model's own loss (outputs.loss, outputs["loss"], a scalar output).
        schedule: "1f1b" or "gpipe", or a Schedule.
        microbatches: how many a batch is cut into; "auto": as many as make a step of the example batch the fastest, by the
            planner's costs for the machine; None: twice the number of ranks.
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
        timeout: seconds after which a rank gives up waiting for another.
        watch: called with (name, value) after each pass.

    Raises:
        CompileError: what cannot be compiled, with the place and the ways out, before any process group is made.
    """
    running = _check(model, world_size)
    _check_loss(loss_fn)
    automatic = _is_automatic(microbatches, schedule, bool(example_args or example_kwargs))
    given = read_partition(partition, model)
    placed = read_replicas(given, replicas, world_size)
    schedule = _schedule(schedule, placed, None if automatic else microbatches)
    held_on = _device(model, device)
    on_cuda = (held_on or next(iter(model.parameters()), torch.empty(0)).device).type == "cuda"
    chosen = _machine(machine, world_size)
    request = Request(model, world_size, loss_fn, chosen, given, not on_cuda, held_on, watch, _training(schedule), placed[0])
    if automatic:
        batch = read_batch(model, example_args, example_kwargs or {}, example_target, batch_dims)
        schedule = _schedule(schedule.name, placed, best_microbatches(request, batch))
        request = replace(request, training=_training(schedule))
    options = Options(schedule, loss_weight, batch_dims, timeout, init)
    pipe = Pipeline(request, options, None if running is None else running[0])
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


def _is_automatic(microbatches: Any, schedule: str | Schedule, has_example: bool) -> bool:
    if microbatches != "auto":
        return False
    if isinstance(schedule, Schedule):
        raise CompileError('microbatches is "auto", but the schedule has its own number', ways_out=("leave it out",))
    if not has_example:
        ways_out = ("example_args or example_kwargs",)
        raise CompileError('microbatches is "auto", but there is no batch to plan for', ways_out=ways_out)
    return True


def _schedule(schedule: str | Schedule, placed: tuple[tuple[int, ...], int], microbatches: Any) -> Schedule:
    """placed: replicas of each stage, and whole pipelines."""
    replicas, pipelines = placed
    stages, world_size = len(replicas), sum(replicas) * pipelines
    if isinstance(schedule, Schedule):
        schedule.check()
        if microbatches not in (None, schedule.microbatches):
            raise CompileError(f"the schedule is for {schedule.microbatches} microbatches, microbatches is {microbatches}")
        if len(schedule.ranks) != world_size or schedule.stages != stages:
            has, are = f"{len(schedule.ranks)} ranks and {schedule.stages} stages", f" with {stages} stages"
            is_other = f"world_size is {world_size}{'' if stages == world_size else are}"
            raise CompileError(f"the schedule is for {has}, {is_other}")
        _check_ranks(schedule, replicas, pipelines)
        return schedule
    if schedule not in SCHEDULES:
        raise CompileError(f"there is no schedule {schedule!r}", ways_out=(f"one of {sorted(SCHEDULES)}", "a Schedule"))
    count = 2 * world_size if microbatches is None else microbatches
    if not isinstance(count, int) or count < 1:
        raise CompileError(f"microbatches is {count!r}, expected 1 or more")
    most = max(replicas) * pipelines
    if count < most:
        raise CompileError(
            f"microbatches is {count}, but a stage has {most} replicas: some would have nothing to do",
            ways_out=(f"microbatches={most} or more", "fewer replicas"),
        )
    return replicated(schedule, replicas, count, pipelines)


def _check_ranks(schedule: Schedule, replicas: Sequence[int], pipelines: int) -> None:
    """Of the user's own schedule: each stage on as many ranks as it has replicas."""
    for stage, ranks in schedule.replicas.items():
        if len(ranks) != (wanted := replicas[stage] * pipelines):
            raise CompileError(f"the schedule has {len(ranks)} ranks for stage {stage}, the partition has {wanted} replicas")


def _machine(machine: Machine | str | Path | None, world_size: int) -> Machine:
    """The devices that the ranks run on."""
    if not isinstance(machine, Machine):
        machine = Machine() if machine is None else Machine.load(machine)
    return machine.take(world_size)


def _training(schedule: Schedule) -> Training:
    """What the planner plans for: a schedule that it does not know counts as 1f1b."""
    return Training(schedule.name if schedule.name in SCHEDULE_KINDS else "1f1b", schedule.microbatches)


def _device(model: nn.Module, device: torch.device | str | None) -> torch.device | None:
    """Where a model on the meta device will live; None for all others, which stay where they are."""
    is_meta = any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    return torch.device(device or "cpu") if is_meta else None
