"""What was predicted of schedules, against what is measured, and both against torch.distributed.pipelining's of the same name.

Three models on two ranks, one pinned thread each, gloo, 8 microbatches; cut equally, and not. In one run, for each model and cut:

    costs       of the stages' functions, recorded in steps by turns with those timed; of messages by Machine.measure() before
    simulated   `pipe.simulate(costs)`: a step's time, bubble, peak bytes
    measured    steps of all schedules, ours and torch's, by turns; bubble and peak bytes of recorded steps (storage sizes)

    python benchmarks/schedules.py [--rounds 9] [--models 0 1 2] [--check]

`bubble` is the mean share of a step's time in which a rank waits for the other: measured, simulated, and at unit costs (F = B =
W).   `error` of a step's time is that of simulated against measured, the median of the rounds, each by its own costs.
With --check it exits 1 where the step times' median error is over 10 %, or a peak's error over 5 %.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from ranks import begin, by_turns, is_rank, measure_and_run, paired_ratio, spread
from rich.table import Table
from small_models import CASES, MICROBATCHES, Case
from torch import Tensor
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B, SplitPoint, pipeline

import pdcompiler
from pdcompiler import Machine, Pipeline, Schedule
from pdcompiler.core.timing import unit_timing
from pdcompiler.timeline import Timeline

RANKS = 2
SEVERAL = ("interleaved", "zb-v")
"""Of two stages a rank, cut as equally as they are."""
SCHEDULES = ("gpipe", "1f1b", "zb-h1", "interleaved", "zb-v")
PEERS: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}
"""Torch's zb-v does not start on gloo: it sends to itself."""
WITHOUT_PEER = ("LSTM 128,16,4",)
"""Torch stops: it sends a value that is not contiguous."""
MODELS = tuple(case for case in CASES if case.name in ("GPT 128,64,2", "ResNet 16,64,4", "LSTM 128,16,4"))
STEP_BAR, PEAK_BAR = 0.10, 0.05


@dataclass
class Row:
    """What is known of one schedule of one model. error: of simulated step times, in the median of the rounds.   ratio: torch's
    steps by ours, None where torch has no such schedule."""

    model: str
    schedule: str
    measured: float
    error: float
    simulated: Timeline
    recorded: Timeline
    unit_bubble: float
    ratio: tuple[float, float, float] | None

    @property
    def peak_error(self) -> float:
        """Of the simulated peak bytes, on the rank where it is largest."""
        pairs = zip(self.simulated.memory, self.recorded.memory, strict=True)
        return max((one.peak / other.peak - 1 for one, other in pairs), key=abs)

    def cells(self) -> list[str]:
        """Of the table."""
        peak = max(memory.peak for memory in self.recorded.memory)
        bubbles = [f"{100 * share:.0f}" for share in (bubble_of(self.recorded), bubble_of(self.simulated), self.unit_bubble)]
        return [
            self.model, self.schedule, f"{self.measured * 1e3:.1f} ms", f"{100 * self.error:+.1f} %", " / ".join(bubbles) + " %",
            f"{peak / 1e6:.2f} MB", f"{100 * self.peak_error:+.2f} %", spread(self.ratio) if self.ratio else "",
        ]  # fmt: skip


def bubble_of(timeline: Timeline) -> float:
    """Mean share of the time."""
    return statistics.fmean(timeline.bubble) / timeline.finish


def compiled(case: Case, schedule: str, cuts: Sequence[str], batch: tuple[Tensor, Tensor], machine: Machine) -> Pipeline:
    """Ours."""
    return pdcompiler.compile(
        case.make(), RANKS, example_args=(batch[0],), example_target=batch[1], loss_fn=case.loss_fn, schedule=schedule,
        microbatches=MICROBATCHES, partition=list(cuts), machine=machine,
    )  # fmt: skip


def peer(case: Case, schedule: Any, cuts: Sequence[str], batch: tuple[Tensor, Tensor]) -> Callable[[], None]:
    """A step of torch.distributed.pipelining."""
    inputs, target = batch
    rank = dist.get_rank()
    part = inputs[: len(inputs) // MICROBATCHES]
    cut = pipeline(case.make(), mb_args=(part,), split_spec=dict.fromkeys(cuts, SplitPoint.BEGINNING))
    own = [rank] if len(cuts) < RANKS else [rank, RANKS + rank]
    stages = [cut.build_stage(stage, torch.device("cpu")) for stage in own]
    runner = schedule(stages if len(own) > 1 else stages[0], n_microbatches=MICROBATCHES, loss_fn=case.loss_fn)
    has_last = len(cuts) in own
    parameters = [parameter for stage in stages for parameter in stage.submod.parameters()]

    def step() -> None:
        for parameter in parameters:
            parameter.grad = None
        given: dict[str, Any] = {"target": target, "losses": []} if has_last else {}
        runner.step(*((inputs,) if 0 in own else ()), **given)

    return step


class Trial:
    """A schedule of ours, timed and recorded by turns: costs drift with what else the machine does."""

    def __init__(self, pipe: Pipeline, batch: tuple[Tensor, Tensor]) -> None:
        self.pipe, self.batch = pipe, batch
        self.costs: list[dict[str, float]] = []

    def step(self) -> None:
        """What is timed."""
        self.pipe.zero_grad()
        self.pipe.step(self.batch[0], target=self.batch[1])

    def record(self) -> None:
        """Right before or after it, what the stages' functions take."""
        with self.pipe.record() as recording:
            self.step()
        self.costs.append(recording.timeline.function_seconds())

    def recorded(self) -> Timeline:
        """A step with its memory."""
        with self.pipe.record(memory=True) as recording:
            self.step()
        return recording.timeline

    def simulated(self, measured: Sequence[float]) -> tuple[float, Timeline]:
        """The median error of the rounds' steps, each by the costs of its own round; and the round with it."""
        timelines = [self.pipe.simulate(costs) for costs in self.costs[-len(measured) :]]
        errors = [found.finish / seconds - 1 for found, seconds in zip(timelines, measured, strict=True)]
        error, number = sorted(zip(errors, range(len(errors)), strict=True))[len(errors) // 2]
        return error, timelines[number]


def measure(case: Case, cut: str, machine: Machine, rounds: int) -> list[Row]:
    """All schedules of one model and cut."""
    torch.manual_seed(0)
    batch = case.batch()
    trials: dict[str, Trial] = {}
    steps: dict[str, Callable[[], Any]] = {}
    for schedule in SCHEDULES:
        cuts = case.cuts if schedule in SEVERAL else [case.cuts[1 if cut == "equal" else 0]]
        trial = trials[schedule] = Trial(compiled(case, schedule, cuts, batch, machine), batch)
        steps |= {schedule: trial.step, f"record {schedule}": trial.record}
        if schedule in PEERS and case.name not in WITHOUT_PEER:
            steps[f"torch {schedule}"] = peer(case, PEERS[schedule], cuts, batch)
    seconds = by_turns(steps, rounds)
    return [row_of(f"{case.name}, {cut}", schedule, trial, seconds) for schedule, trial in trials.items()]


def row_of(name: str, schedule: str, trial: Trial, seconds: dict[str, list[float]]) -> Row:
    """What the turns say of one schedule."""
    assert isinstance(trial.pipe.schedule, Schedule)
    unit = unit_timing(trial.pipe.schedule)
    ratio = paired_ratio(seconds[f"torch {schedule}"], seconds[schedule]) if f"torch {schedule}" in seconds else None
    share = statistics.fmean(unit.bubble) / unit.finish
    error, simulated = trial.simulated(seconds[schedule])
    return Row(name, schedule, statistics.median(seconds[schedule]), error, simulated, trial.recorded(), share, ratio)


def main(machine: Machine, models: Sequence[int], rounds: int, check: bool) -> int:
    """Measure, print the table, and judge. Only rank 0 prints."""
    console = begin(width=150)
    columns = ("model, cut", "schedule", "measured", "error", "bubble", "peak", "error", "torch / ours")
    table, rows = Table(*columns, title=f"{RANKS} ranks, {MICROBATCHES} microbatches", title_justify="left"), list[Row]()
    for case in [MODELS[number] for number in models]:
        for cut in ("equal", "uneven"):
            rows += measure(case, cut, machine, rounds)
    for row in rows:
        table.add_row(*row.cells())
    console.print(table)
    step = statistics.median(abs(row.error) for row in rows)
    peak = max(abs(row.peak_error) for row in rows)
    missed = not (step <= STEP_BAR and peak <= PEAK_BAR)
    console.print(
        f"step time: median error {100 * step:.1f} % (bar 10)   peak bytes: largest error {100 * peak:.2f} % (bar 5)   "
        f"{'MISSED' if missed else 'met'}"
    )
    dist.destroy_process_group()
    return int(check and missed)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line; the ranks are told the machine's file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--models", type=int, nargs="+", default=list(range(len(MODELS))))
    parser.add_argument("--machine", help="a measured one; left out, this computer is measured first")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    given = parse(sys.argv[1:])
    if is_rank():
        sys.exit(main(Machine.load(given.machine), given.models, given.rounds, given.check))
    sys.exit(measure_and_run(__file__, RANKS, sys.argv[1:], given.machine))
