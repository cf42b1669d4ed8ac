"""`schedule="auto"`: what the stages of a model cost, as a ScheduleProblem, and the schedule that is found for it.

    seconds     of each stage's functions, by the machine's figures, for the microbatch with the most rows
    messages    the latency and bytes of what one stage gives the next; what skips over stages is left out
    saved       what waits from a forward for its backward, messages too; kept: what W needs of it
    room        a device's memory without weights, gradients, the optimizer's state, the batch, what functions need on their way,
                and the messages of one microbatch more than are in flight

Not here: the search (`passes/schedules/automatic.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from torch import fx

from pdcompiler.compiler import Request
from pdcompiler.core import ops
from pdcompiler.core.batch import Batch
from pdcompiler.core.cost import Cost
from pdcompiler.core.errors import CompileError
from pdcompiler.core.function_memory import Value, needs_of
from pdcompiler.core.ir import Function, Stage, Staged, ValueType, evaluate
from pdcompiler.core.machine import Machine
from pdcompiler.core.schedule import Schedule
from pdcompiler.core.schedule_problem import ScheduleProblem
from pdcompiler.given_schedule import ONE_STAGE_A_RANK, read_schedule
from pdcompiler.passes.schedules.automatic import automatic
from pdcompiler.simulation import MOVES, cost_of_function, message_seconds, reduce_seconds
from pdcompiler.traces import Traces


def choose_schedule(request: Request, traces: Traces, batch: Batch, like: Schedule) -> Schedule:
    """The fastest schedule for a batch. like: a named one, with the microbatches, stages and ranks that it is to have. The
    partition is chosen as for any other schedule. Raises CompileError where no schedule has room."""
    rows = _most_rows(batch, like)
    staged = traces.staged(batch, [rows], gradients=True)[rows]
    named, found, refusals = _named(request, like), list[tuple[float, bool, Schedule]](), list[CompileError]()
    for whole in (True, False):
        try:
            problem = problem_of(staged, request, like, batch, whole=whole)
        except CompileError as error:
            refusals.append(error)
            continue
        schedule = automatic(problem, [schedule for schedule in named if whole is not bool(schedule.split)])
        found.append((problem.timing(schedule).finish, whole, schedule))
    if not found:
        raise refusals[-1]
    return min(found, key=lambda one: one[:2])[2]


def problem_of(staged: Staged, request: Request, like: Schedule, batch: Batch, *, whole: bool) -> ScheduleProblem:
    """See the module's docstring. whole: backwards are; else in two parts where they fall apart, which together take longer."""
    staged = replace(staged, stages=tuple(replace(stage, parts=None) for stage in staged.stages)) if whole else staged
    rows = _most_rows(batch, like)
    ranks, machine = tuple(like.replicas.values()), request.machine
    seconds = [_Seconds(stage, machine, on, rows) for stage, on in zip(staged.stages, ranks, strict=True)]
    pairs = list(zip(staged.stages, staged.stages[1:], ranks, ranks[1:], strict=False))
    parameters = {name: tensor.numel() * tensor.element_size() for name, tensor in request.model.named_parameters()}
    gradients = [sum(parameters[name] for name in stage.gradients) for stage in staged.stages]
    return ScheduleProblem(
        ranks, like.microbatches,
        tuple(s.forward for s in seconds), tuple(s.backward for s in seconds), tuple(s.weight for s in seconds),
        tuple(_message(machine, one, other, first.forward, second.forward, second, rows) for first, second, one, other in pairs),
        tuple(_message(machine, other, one, second.backward, first.backward, first, rows) for first, second, one, other in pairs),
        tuple(reduce_seconds(machine, on, n) if len(on) > 1 else 0.0 for on, n in zip(ranks, gradients, strict=True)),
        machine.overlap,
        tuple(saved_bytes(stage, rows) for stage in staged.stages),
        tuple(stage.parts.kept_bytes if stage.parts else 0.0 for stage in staged.stages),
        tuple(_room(request, staged, ranks, rank, batch, rows, parameters) for rank in range(len(like.ranks))),
    )  # fmt: skip


def saved_bytes(stage: Stage, rows: int) -> float:
    """What one microbatch holds between a stage's forward and its backward: its inputs, what is saved, and the memory into which
    its gradient will come. Where W needs more, so much from the beginning."""
    needs = needs_of(stage.forward.module.graph, rows)
    saved = [value for name, value in zip(stage.forward.gives, needs.gives, strict=True) if name == "saved"]
    pieces = {piece for value in saved for piece in _pieces(value)}
    made = sum(needs.sizes[piece] for piece in pieces) + taken_bytes(stage, stage.forward, rows)
    return max(made, stage.parts.kept_bytes if stage.parts else 0.0) + taken_bytes(stage, stage.backward, rows)


def taken_bytes(stage: Stage, function: Function | None, rows: int) -> int:
    """Of the values that a stage's function takes from other stages."""
    return _bytes(stage, function.takes if function else (), rows)


def given_bytes(stage: Stage, function: Function | None, rows: int) -> int:
    """Of the values that it gives to other stages."""
    return _bytes(stage, function.gives if function else (), rows)


def _bytes(stage: Stage, names: Sequence[str], rows: int) -> int:
    types = [stage.types.get(name) for name in names if name not in stage.batch]
    return sum(evaluate(type.nbytes(), rows) for type in types if isinstance(type, ValueType))


def _pieces(value: Value) -> Iterator[int]:
    """The new memory in which a value lies."""
    if isinstance(value, tuple):
        for item in value:
            yield from _pieces(item)
    elif isinstance(value, int):
        yield value


class _Seconds:
    """Of one microbatch of a stage; of its whole backward the part that makes the weights' gradients."""

    def __init__(self, stage: Stage, machine: Machine, ranks: tuple[int, ...], rows: int) -> None:
        def seconds(function: Function | None) -> float:
            if function is None:
                return 0.0
            cost = cost_of_function(function.module.graph, rows)
            return max(float(machine.device_of(rank).compute_seconds(cost)) for rank in ranks)

        nbytes = sum(evaluate(type.nbytes(), rows) for type in stage.gradient_types)
        cost = Cost(bytes_read=MOVES[ops.accumulate] * nbytes, operations=1)
        add_up = max(float(machine.device_of(rank).compute_seconds(cost)) for rank in ranks) if nbytes else 0.0
        self.forward = seconds(stage.forward)
        self.weight = seconds(stage.parts.weight) + add_up if stage.parts else 0.0
        self.backward = seconds(stage.parts.input) + self.weight if stage.parts else seconds(stage.backward) + add_up


def _message(
    machine: Machine, sender: tuple[int, ...], receiver: tuple[int, ...], gives: Function | None, takes: Function | None,
    stage: Stage, rows: int,
) -> float:  # fmt: skip
    """Seconds of what one stage's function gives another's; the slowest pair of replicas."""
    if gives is None or takes is None:
        return 0.0
    nbytes = _bytes(stage, sorted(set(gives.gives) & set(takes.takes)), rows)
    pairs = [(one, other) for one in sender for other in receiver if one != other]
    return max((sum(message_seconds(machine, *pair, nbytes)) for pair in pairs), default=0.0) if nbytes else 0.0


def _most_rows(batch: Batch, like: Schedule) -> int:
    return max(stop - start for start, stop in batch.spans(like.microbatches))


def _room(
    request: Request, staged: Staged, ranks: tuple[tuple[int, ...], ...], rank: int, batch: Batch, rows: int,
    parameters: Mapping[str, int],
) -> float:  # fmt: skip
    """Bytes of a rank's memory for what backwards need."""
    own = [stage for stage, on in zip(staged.stages, ranks, strict=True) if rank in on]
    factor = 1 + request.training.optimizer_bytes
    fixed = sum(factor * parameters[name] for name in {name for stage in own for name in stage.parameters})
    fixed += sum(request.training.gradient_bytes * parameters[name] for stage in own for name in stage.gradients)
    read = [batch.tensors[name] for name in {name for stage in own for name in stage.batch.values()}]
    fixed += sum(tensor.numel() * tensor.element_size() for tensor in read)
    working = max((needs_of(graph, rows).peak for stage in own for graph in _graphs(stage)), default=0)
    functions = [(stage, function) for stage in own for function in (stage.forward, stage.backward)]
    messages = sum(taken_bytes(*function, rows) + given_bytes(*function, rows) for function in functions)
    return float(request.machine.device_of(rank).memory_bytes - fixed - working - messages)


def _graphs(stage: Stage) -> list[fx.Graph]:
    backward = [stage.parts.input, stage.parts.weight] if stage.parts else [stage.backward] if stage.backward else []
    return [function.module.graph for function in (stage.forward, *backward)]


def _named(request: Request, like: Schedule) -> list[Schedule]:
    """The named schedules for the same stages on the same ranks."""
    if like.stages > len(like.ranks):
        return [like]
    replicas = request.replicas or (1,) * like.stages
    placed = replicas, len(like.ranks) // sum(replicas)
    return [read_schedule(name, placed, like.microbatches) for name in ONE_STAGE_A_RANK]
