"""The whole compiler: from a model and a batch to one program per rank. Read top to bottom.

    nn.Module --trace--> Trace --partition--> Partition --stage--> Staged --lower--> Program --split--> tuple[RankProgram]

A change of level is a typed function; a pass rewrites within one level; after each, the level's rules are checked. What is
remembered from call to call (traces, the partition, programs) is the Pipeline's business.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from pdcompiler.core.batch import Batch
from pdcompiler.core.errors import CompileError
from pdcompiler.core.ir import Microbatch, Program, RankProgram, Staged, Step, Trace
from pdcompiler.core.loss import LossFunction
from pdcompiler.core.machine import Machine
from pdcompiler.core.partition import Partition, Problem
from pdcompiler.core.pass_manager import Watch, run_passes
from pdcompiler.core.plan import Training
from pdcompiler.core.program_writer import bucket_bytes
from pdcompiler.core.schedule import Schedule
from pdcompiler.core.tick_text import TickText
from pdcompiler.core.ticks import Ticks
from pdcompiler.core.verify import verify_program, verify_staged, verify_trace
from pdcompiler.core.verify_ranks import verify_ranks
from pdcompiler.found import Found
from pdcompiler.own_plan import check_memory, knows_memory
from pdcompiler.passes.partition.check_partition import check_partition, plan_of_stages
from pdcompiler.passes.partition.evaluate import evaluate
from pdcompiler.passes.partition.make_partition import cuts_at_modules, cuts_of, make_partition, plan_of_cuts, with_costs
from pdcompiler.passes.partition.problem import make_problem
from pdcompiler.passes.program.forward_stashes import forward_stashes
from pdcompiler.passes.program.insert_reductions import insert_reductions
from pdcompiler.passes.program.insert_transfers import insert_transfers
from pdcompiler.passes.program.lower_schedule import lower_schedule
from pdcompiler.passes.program.lower_tick import lower_tick
from pdcompiler.passes.program.merge_transfers import merge_transfers
from pdcompiler.passes.program.split_backward import split_backward
from pdcompiler.passes.program.split_ranks import split_ranks
from pdcompiler.passes.ranks.overlap_reductions import overlap_reductions
from pdcompiler.passes.ranks.overlap_transfers import overlap_transfers
from pdcompiler.passes.ranks.reuse_memory import reuse_memory
from pdcompiler.passes.stages.assign_stages import assign_stages
from pdcompiler.passes.stages.cut_stages import cut_stages
from pdcompiler.passes.stages.keep_layouts import keep_layouts
from pdcompiler.passes.stages.localize_cheap_values import localize_cheap_values
from pdcompiler.passes.stages.place_gradients import place_gradients
from pdcompiler.passes.stages.seed_random_ops import seed_random_ops
from pdcompiler.passes.stages.split_shared_gradients import split_shared_gradients
from pdcompiler.passes.stages.split_weight_gradients import split_weight_gradients
from pdcompiler.passes.tracing.annotate_costs import annotate_costs
from pdcompiler.passes.tracing.read_trace import read_trace
from pdcompiler.passes.tracing.trace import capture_joint
from pdcompiler.planner import explain, judge, ranked, straight_plan
from pdcompiler.ranking import at_depths, evaluation_at


@dataclass(frozen=True)
class Request:
    """What the user asked of `compile`, checked."""

    model: nn.Module
    world_size: int
    loss_fn: LossFunction | None
    machine: Machine
    partition: Partition | tuple[str, ...] | None
    overlap: bool
    device: torch.device | None
    watch: Watch | None
    training: Training = field(default_factory=Training)
    replicas: tuple[int, ...] | None = None
    """Of each stage; None: one each."""
    ticks: Ticks | None = None
    """Of a schedule without flushes."""
    ranks: tuple[int, ...] = ()
    """Of each stage, where ranks run several; empty: a stage or a replica of one a rank."""
    splits: bool = False
    """Whether the schedule runs backwards in two parts."""


def trace_model(request: Request, batch: Batch, *, rows: int, symbolic: bool, gradients: bool) -> Trace:
    """Loss, outputs and gradients of one microbatch of `rows` rows, with costs."""
    captured = capture_joint(
        request.model, batch, rows=rows, symbolic=symbolic, gradients=gradients, loss_fn=request.loss_fn, device=request.device
    )
    return run_passes(read_trace(captured), [annotate_costs], verify_trace, request.watch)


def choose_partition(request: Request, trace: Trace, rows: int) -> Partition:
    """The stages: those that the user gave, or the best cut of this trace. Made once; all traces share it. They have room for an
    optimizer with Adam's state; where no stages have, for parameters and gradients alone, with a warning: `compile` is not told
    the optimizer."""
    try:
        return _partition(request, trace, rows)
    except CompileError as error:
        if not (request.training.optimizer_bytes and knows_memory(request.machine)):
            raise
        refusal = error
    partition = _partition(replace(request, training=replace(request.training, optimizer_bytes=0.0)), trace, rows)
    told = "only an optimizer without state fits; with two values for each parameter (Adam)"
    warnings.warn(f"{told} {refusal}", stacklevel=2)
    return partition


def _partition(request: Request, trace: Trace, rows: int) -> Partition:
    machine = request.machine.take(request.world_size).parted(len(request.ranks) or request.world_size)
    if isinstance(request.partition, Partition):
        check_given(request, request.partition, trace, machine, rows)
        return replace(request.partition, ranks=request.ranks)
    problem = make_problem(trace, machine, rows)
    if request.partition is None and (request.replicas is None or set(request.replicas) == {1}):
        found = straight_plan(problem.workload, machine, request.training)
    else:
        chosen = plan_of_cuts(problem, cuts_at_modules(problem, request.partition or ()))
        if request.replicas is not None:
            pairs = zip(chosen.stages, request.replicas, strict=True)
            chosen = replace(chosen, stages=tuple(replace(stage, replicas=count) for stage, count in pairs))
        found = judge(chosen, problem.workload, machine, request.training)
        check_memory(found.evaluation, problem.workload, machine, request.training)
    found = ranked(found, machine, request.training)
    if request.ticks is not None:
        found = at_depths(found, request.ticks, machine)
        check_memory(found.evaluation, problem.workload, machine, request.training)
    return replace(explained(request.model, trace, problem, found, machine, request.training), ranks=request.ranks)


def check_given(request: Request, partition: Partition, trace: Trace, machine: Machine, rows: int) -> None:
    """Raise CompileError where a partition that the user gave can't be the stages of this trace, or where memory is too small."""
    stage_of = check_partition(trace, partition)
    if knows_memory(machine):
        problem = make_problem(trace, machine, rows)
        given = plan_of_stages(problem, stage_of)
        if given is not None:
            evaluation = evaluate(given, problem.workload, machine, request.training)
            if request.ticks is not None:
                evaluation = evaluation_at(evaluation, request.ticks)
            check_memory(evaluation, problem.workload, machine, request.training)


def explained(model: nn.Module, trace: Trace, problem: Problem, found: Found, machine: Machine, training: Training) -> Partition:
    """A found plan as a Partition, with what it costs and why it is so."""
    partition = make_partition(trace, problem, cuts_of(problem, found.plan), fingerprint(model))
    partition = with_costs(partition, problem.workload, found.plan, found.evaluation)
    return replace(partition, explanation=explain(found, problem.workload, machine, training))


def stage_trace(request: Request, trace: Trace, partition: Partition, rows: int) -> Staged:
    """The forward and the backward of each stage."""
    passes: list[Callable[[Trace], Trace]] = [
        bind(assign_stages, partition=partition),
        split_shared_gradients,
        bind(place_gradients, partition=partition),
        bind(localize_cheap_values, machine=request.machine, rows=rows),
        keep_layouts,
        seed_random_ops,
    ]
    staged = cut_stages(run_passes(trace, passes, verify_trace, request.watch), partition)
    if request.splits:
        split_weight_gradients(staged, rows)
    verify_staged(staged)
    return staged


def compile_program(
    request: Request, step: Step, schedule: Schedule, holders: Mapping[str, tuple[int, ...]],
    replicas: Mapping[int, tuple[int, ...]] | None = None,
) -> Program:  # fmt: skip
    """One program over all ranks. holders: of each parameter that several ranks hold, these.   replicas: the ranks of each stage,
    where some have nothing to run in this step."""
    passes: list[Callable[[Program], Program]] = [
        bind(insert_reductions, holders=holders, bucket=bucket_bytes(request.machine)),
        *((split_backward,) if request.overlap else ()),
        insert_transfers,
        bind(merge_transfers, machine=request.machine),
    ]
    return run_passes(lower_schedule(step, schedule, replicas), passes, verify_program, request.watch)


def compile_tick(
    request: Request, text: TickText, minibatches: Mapping[int, Microbatch], staged: Staged, dims: Mapping[str, int | None],
    replicas: Mapping[int, tuple[int, ...]],
) -> Program:  # fmt: skip
    """One tick of a schedule without flushes, over all ranks: as `lower_tick` takes it."""
    program = lower_tick(text, minibatches, staged, dims, replicas, bucket_bytes(request.machine))
    passes = [forward_stashes, *((split_backward,) if request.overlap else ()), insert_transfers]
    return run_passes(program, passes, verify_program, request.watch)


def compile_ranks(request: Request, program: Program, in_flight: int = 1) -> tuple[RankProgram, ...]:
    """One program per rank, proved free of deadlock. in_flight: of a tick's program, the ticks whose messages may be open."""
    window = receive_window(program, in_flight) if request.overlap else {}
    passes = [on_each(reuse_memory), on_each(bind(overlap_transfers, window=window))]
    passes += [on_each(overlap_reductions)] if request.overlap else []
    return run_passes(split_ranks(program), passes, verify_ranks, request.watch)


def receive_window(program: Program, in_flight: int = 1) -> dict[str, int]:
    """Per channel, how many messages may be open: those of the microbatches (or ticks) that may be in flight, and of one more."""
    counts: dict[str, dict[Any, int]] = {}
    for node in program.graph.nodes:
        if getattr(node.target, "__name__", "") == "transfer":
            channel = f"{node.args[0].meta['rank']}->{node.meta['rank']}"
            per_microbatch = counts.setdefault(channel, {})
            key = (node.meta["microbatch"], node.meta["phase"])
            per_microbatch[key] = per_microbatch.get(key, 0) + 1
    if program.schedule is None:
        return {channel: sum(found.values()) * (in_flight + 1) for channel, found in counts.items()}
    flights = [program.schedule.in_flight(rank) for rank in range(program.ranks)]
    return {channel: max(found.values()) * (flights[int(channel.split("->")[1])] + 1) for channel, found in counts.items()}


def bind(apply: Callable[..., Any], **options: Any) -> Callable[[Any], Any]:
    """A pass with its options; keeps the pass's name for messages."""

    def bound(value: Any) -> Any:
        return apply(value, **options)

    bound.__name__ = getattr(apply, "__name__", "pass")
    return bound


def on_each(apply: Callable[[RankProgram], RankProgram]) -> Callable[[tuple[RankProgram, ...]], tuple[RankProgram, ...]]:
    """A pass on one rank's program as a pass on all ranks'."""

    def bound(programs: tuple[RankProgram, ...]) -> tuple[RankProgram, ...]:
        return tuple(apply(program) for program in programs)

    bound.__name__ = getattr(apply, "__name__", "pass")
    return bound


def fingerprint(model: nn.Module) -> str:
    """Names and shapes of the parameters, shortened: which model a partition is for."""
    text = json.dumps([(name, list(p.shape)) for name, p in model.named_parameters()])
    return hashlib.sha256(text.encode()).hexdigest()[:16]
