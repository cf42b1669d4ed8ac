"""How well is the time of a step predicted from the costs of its stages?

GPT, ResNet and LSTM models on two ranks, gloo, one thread pinned to one core each, 1f1b with 8 microbatches, several cuts. Costs
are measured in the same run: the link and the memory by `Machine.measure`, the operations by `passes/tracing/profile.py` on both
ranks at once, by turns with the timed steps, each of which is compared with the profiles right before and after it (or, with
--costs functions, each stage's functions in steps of their own, between those that are timed). `core/timing.py` walks the
schedule with them; a backward also adds up its gradients, which moves three times its parameters' bytes; and a step takes what
one of a model with two tiny layers takes beyond its messages.

    python benchmarks/prediction.py [--steps 30] [--machine FILE] [--costs functions] [--check]

The residual is predicted / measured - 1. With --check it exits 1 where the median of its size over models and cuts is above 15 %.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from ranks import begin, is_rank, measure_and_run, seconds_of
from rich.table import Table
from small_models import CASES, MICROBATCHES, Case
from torch import Tensor

import pdcompiler
from pdcompiler.compiler import trace_model
from pdcompiler.core import ops
from pdcompiler.core.batch import read_batch
from pdcompiler.core.ir import cost_of, evaluate, is_backward, stage_of, type_of
from pdcompiler.core.machine import Device, Machine
from pdcompiler.core.timing import Timing, timing
from pdcompiler.core.value_type import estimate
from pdcompiler.passes.stages.assign_stages import assign_stages
from pdcompiler.passes.tracing.profile import apply_profile, profile_trace

RANKS, WARM_UP, BAR = 2, 3, 0.15
ROUNDS, REPETITIONS = 5, 4
"""How often profiles and timed steps take turns; runs of each profile."""
HOOKED_EVERY = 3
"""One in so many steps is for the costs, the others are timed."""


class Clock:
    """For each of a rank's stage functions, by name: the mean seconds of its calls in each step."""

    def __init__(self, pipe: pdcompiler.Pipeline) -> None:
        self.functions = dict(pipe.ranks[dist.get_rank()].named_children())
        self.seconds: dict[str, list[float]] = {name: [] for name in self.functions}
        self.begun = 0.0
        self.calls: dict[str, list[float]] = {}

    def run(self, step: Callable[[], Any]) -> None:
        """One step with the clock on."""
        hooks = []
        self.calls = {name: [] for name in self.functions}
        for name, function in self.functions.items():
            hooks.append(function.register_forward_pre_hook(self.begin))
            hooks.append(function.register_forward_hook(lambda *_, name=name: self.end(name)))
        step()
        for hook in hooks:
            hook.remove()
        for name, calls in self.calls.items():
            self.seconds[name].append(statistics.fmean(calls))

    def begin(self, *_: Any) -> None:
        self.begun = time.perf_counter()

    def end(self, name: str) -> None:
        self.calls[name].append(time.perf_counter() - self.begun)


def function_costs(clock: Clock) -> tuple[float, float]:
    """Seconds of one microbatch's forward and backward on this rank's stage, from the steps with a clock."""
    forward, backward = (statistics.median(clock.seconds[f"stage{dist.get_rank()}_{phase}"]) for phase in ("forward", "backward"))
    return forward, backward


class Profiler:
    """The same from profiles of the model's operations, summed over those of this rank's stage."""

    def __init__(self, pipe: pdcompiler.Pipeline, data: Tensor, target: Tensor, device: Device) -> None:
        self.pipe, self.device, self.rows = pipe, device, len(data) // MICROBATCHES
        self.batch = read_batch(pipe.request.model, (data,), {}, target, None)
        self.trace = trace_model(pipe.request, self.batch, rows=self.rows, symbolic=False, gradients=True)
        assign_stages(self.trace, self.pipe.partition)

    def costs(self) -> tuple[float, float]:
        """Of one more profile."""
        request, trace = self.pipe.request, self.trace
        dist.barrier()
        profile = profile_trace(
            trace, request.model, self.batch, loss_fn=request.loss_fn, rows=self.rows, fingerprint="", repetitions=REPETITIONS
        )
        apply_profile(trace, profile=profile, device=self.device, fingerprint="")
        own = [node for node in trace.graph.nodes if node.op == "call_function" and stage_of(node) == dist.get_rank()]
        sides = ([node for node in own if is_backward(node) == side] for side in (False, True))
        forward, backward = (sum(estimate(cost_of(node).seconds or 0.0, self.rows) for node in side) for side in sides)
        return forward, backward


def of_all_ranks(costs: tuple[float, float]) -> tuple[list[float], list[float]]:
    """Forward and backward of each stage."""
    gathered: list[Any] = [None] * RANKS
    dist.all_gather_object(gathered, costs)
    return [forward for forward, _ in gathered], [backward for _, backward in gathered]


def transfer_seconds(pipe: pdcompiler.Pipeline, machine: Machine, phase: str) -> float:
    """All messages of one microbatch over the border, one way."""
    messages = [
        node for node in pipe.program.graph.nodes
        if node.target is ops.transfer and node.meta["microbatch"] == 0 and node.meta["phase"] == phase
    ]  # fmt: skip
    sizes = [evaluate(type_of(node).nbytes(), 1) for node in messages]
    return sum(float(machine.transfer_seconds(size)) for size in sizes)


def predict(pipe: pdcompiler.Pipeline, machine: Machine, forward: list[float], backward: list[float]) -> Timing:
    """The timing model's answer."""
    held: list[Any] = [None] * RANKS
    dist.all_gather_object(held, sum(parameter.nbytes for parameter in pipe.parameters()))
    speed = machine.device_of(0).memory_bytes_per_second
    with_sums = [seconds + 3 * nbytes / speed for seconds, nbytes in zip(backward, held, strict=True)]
    there, back = ([transfer_seconds(pipe, machine, phase)] for phase in ("forward", "backward"))
    return timing(
        pipe.schedule, forward=forward, backward=with_sums, forward_transfer=there, backward_transfer=back,
        overlap=machine.overlap,
    )  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One line of the table, in seconds."""

    case: str
    cut: str
    forward: list[float]
    backward: list[float]
    bubble: float
    predicted: float
    measured: float
    residual: float


def stepper(pipe: pdcompiler.Pipeline, data: Tensor, target: Tensor) -> Callable[[], None]:
    """A training step, warmed up."""

    def step() -> None:
        pipe.zero_grad()
        pipe.step(data, target=target)

    for _ in range(WARM_UP):
        step()
    return step


def empty_step(machine: Machine, steps: int) -> float:
    """What a step takes whose stages compute nothing, beyond its messages."""
    data, target = torch.randn(2, MICROBATCHES, 4)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    pipe = pdcompiler.compile(
        model, RANKS, example_args=(data,), example_target=target, loss_fn=torch.nn.functional.mse_loss, schedule="1f1b",
        microbatches=MICROBATCHES, partition=["1"], machine=machine,
    )  # fmt: skip
    step = stepper(pipe, data, target)
    measured = statistics.median(seconds_of(step) for _ in range(steps))
    return max(0.0, measured - predict(pipe, machine, [0.0] * RANKS, [0.0] * RANKS).finish)


def rows_of(case: Case, machine: Machine, steps: int, costs: str, empty: float) -> Iterator[Row]:
    """Measure and predict each cut of a model."""
    for cut in case.cuts:
        torch.manual_seed(0)
        data, target = case.batch()
        pipe = pdcompiler.compile(
            case.make(), RANKS, example_args=(data,), example_target=target, loss_fn=case.loss_fn, schedule="1f1b",
            microbatches=MICROBATCHES, partition=[cut], machine=machine,
        )  # fmt: skip
        step = stepper(pipe, data, target)
        by_turns = by_profiles if costs == "profile" else by_functions
        rounds = []
        for forward, backward, measured in by_turns(pipe, step, steps, data, target, machine):
            expected = predict(pipe, machine, forward, backward)
            rounds.append((forward, backward, max(expected.bubble), expected.finish + empty, measured))
        residual = statistics.median(predicted / measured - 1 for *_, predicted, measured in rounds)
        forward, backward, *_ = rounds[len(rounds) // 2]
        bubble, predicted, measured = (statistics.median(values) for values in list(zip(*rounds, strict=True))[2:])
        yield Row(case.name, cut, forward, backward, bubble, predicted, measured, residual)


Turns: TypeAlias = Iterator[tuple[list[float], list[float], float]]
"""Of each round: forward and backward seconds of each stage, and the measured seconds of a step."""


def by_profiles(
    pipe: pdcompiler.Pipeline, step: Callable[[], None], steps: int, data: Tensor, target: Tensor, machine: Machine
) -> Turns:
    """Each round of steps between two profiles, whose mean is its costs."""
    profiler = Profiler(pipe, data, target, machine.device_of(0))
    before = profiler.costs()
    for _ in range(ROUNDS):
        measured = statistics.median(seconds_of(step) for _ in range(max(1, steps // ROUNDS)))
        after = profiler.costs()
        forward, backward = (statistics.fmean(pair) for pair in zip(before, after, strict=True))
        yield *of_all_ranks((forward, backward)), measured
        before = after


def by_functions(
    pipe: pdcompiler.Pipeline, step: Callable[[], None], steps: int, data: Tensor, target: Tensor, machine: Machine
) -> Turns:
    """One round, in which some steps have a clock and the others are timed."""
    clock, measured = Clock(pipe), []
    for number in range(steps):
        if number % HOOKED_EVERY:
            measured.append(seconds_of(step))
        else:
            dist.barrier()
            clock.run(step)
    yield *of_all_ranks(function_costs(clock)), statistics.median(measured)


def main(machine: Machine, steps: int, costs: str, check: bool) -> int:
    """Measure each model and cut, print the table, and judge. Only rank 0 prints."""
    console = begin(width=130)
    link = f"{machine.link_latency_seconds * 1e6:.0f} us and {machine.link_bytes_per_second / 1e9:.2f} GB/s"
    columns = ("model", "cut", "stage 0", "stage 1", "bubble", "predicted", "measured", "residual")
    empty = empty_step(machine, steps)
    title = f"{RANKS} ranks, {MICROBATCHES} microbatches; a message takes {link}, an empty step {empty * 1e3:.1f} ms more"
    table, residuals = Table(*columns, title=title, title_justify="left"), []
    for case in CASES:
        for row in rows_of(case, machine, steps, costs, empty):
            stages = [f"{f * 1e3:.2f} + {b * 1e3:.2f} ms" for f, b in zip(row.forward, row.backward, strict=True)]
            times = [f"{seconds * 1e3:.1f} ms" for seconds in (row.bubble, row.predicted, row.measured)]
            table.add_row(row.case, row.cut.removeprefix("whole.resnet."), *stages, *times, f"{row.residual:+.1%}")
            residuals.append(abs(row.residual))
    middle = statistics.median(residuals)
    missed = middle > BAR
    console.print(table)
    verdict = "MISSED" if missed else "met"
    console.print(f"size of the residual: median {middle:.1%}, largest {max(residuals):.1%} (bar {BAR:.0%}) {verdict}")
    dist.destroy_process_group()
    return int(check and missed)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--machine", help="a ready machine or a TOML file; left out: measured now")
    parser.add_argument("--costs", choices=("profile", "functions"), default="profile")
    parser.add_argument("--check", action="store_true")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    given = parse(sys.argv[1:])
    if is_rank():
        sys.exit(main(Machine.load(given.machine), given.steps, given.costs, given.check))
    sys.exit(measure_and_run(__file__, RANKS, sys.argv[1:], given.machine))
