"""How well is the time of a step predicted from the costs of its stages?

GPT, ResNet and LSTM models on two ranks, gloo, one thread pinned to one core each, 1f1b with 8 microbatches, several cuts. Costs
are measured in the same run: the link and the memory by `Machine.measure`, each stage's forward and backward in steps of their
own, between those that are timed. `core/timing.py` walks the schedule with them; a backward also adds up its gradients, which
moves three times its parameters' bytes.

    python benchmarks/prediction.py [--steps 30] [--machine FILE] [--check]

The residual is predicted / measured - 1. With --check it exits 1 where the median of its size over models and cuts is above 15 %.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpt import VOCABULARY, Gpt, token_loss
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import ResNetConfig, ResNetForImageClassification

import pdcompiler
from pdcompiler.core import ops
from pdcompiler.core.ir import evaluate, type_of
from pdcompiler.core.machine import Machine
from pdcompiler.core.timing import Timing, timing

RANKS, MICROBATCHES, WARM_UP, BAR = 2, 8, 3, 0.15
HOOKED_EVERY = 3
"""One in so many steps is for the costs, the others are timed."""


class Lstm(nn.Module):
    """A language model of four LSTM layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(4))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = layer(hidden)[0]
        result: Tensor = self.head(hidden)
        return result


class ResNet(nn.Module):
    """Hugging Face's, of four stages."""

    def __init__(self, width: int) -> None:
        super().__init__()
        sizes = [width, 2 * width, 4 * width, 8 * width]
        config = ResNetConfig(embedding_size=width, hidden_sizes=sizes, depths=[2, 2, 2, 2], layer_type="basic", num_labels=10)
        self.whole = ResNetForImageClassification(config)

    def forward(self, image: Tensor) -> Tensor:
        logits: Tensor = self.whole(image).logits
        return logits


@dataclass(frozen=True)
class Case:
    """A model with one batch, and where it is cut, one cut a pipeline."""

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    loss_fn: Callable[[Tensor, Tensor], Tensor]
    cuts: tuple[str, ...]


def sentences(rows: int, length: int) -> tuple[Tensor, Tensor]:
    """Token ids and targets for all microbatches."""
    ids, target = torch.randint(VOCABULARY, (2, rows * MICROBATCHES, length))
    return ids, target


def images(rows: int, size: int) -> tuple[Tensor, Tensor]:
    """Images and classes for all microbatches."""
    return torch.randn(rows * MICROBATCHES, 3, size, size), torch.randint(10, (rows * MICROBATCHES,))


GPT_CUTS, STAGES = ("layers.2", "layers.4", "layers.6"), "whole.resnet.encoder.stages"
CASES = (
    Case("GPT 64,32,2", lambda: Gpt(64), lambda: sentences(2, 32), token_loss, GPT_CUTS),
    Case("GPT 128,64,2", lambda: Gpt(128), lambda: sentences(2, 64), token_loss, GPT_CUTS),
    Case("ResNet 16,64,4", lambda: ResNet(16), lambda: images(4, 64), F.cross_entropy, tuple(f"{STAGES}.{i}" for i in (1, 2, 3))),
    Case("LSTM 128,16,4", lambda: Lstm(128), lambda: sentences(4, 16), token_loss, ("layers.1", "layers.2", "layers.3")),
)


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


def stage_costs(clock: Clock) -> tuple[list[float], list[float]]:
    """Seconds of one microbatch's forward and backward on each stage, known to all ranks."""
    gathered: list[Any] = [None] * RANKS
    dist.all_gather_object(gathered, {name: statistics.median(values) for name, values in clock.seconds.items()})
    medians = {name: value for one in gathered for name, value in one.items()}
    phases = ([medians[f"stage{stage}_{phase}"] for stage in range(RANKS)] for phase in ("forward", "backward"))
    forward, backward = phases
    return forward, backward


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


def seconds_of(step: Callable[[], Any]) -> float:
    """From a common start until the slowest rank is done."""
    dist.barrier()
    start = time.perf_counter()
    step()
    taken = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return taken.item()


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

    @property
    def residual(self) -> float:
        return self.predicted / self.measured - 1


def rows_of(case: Case, machine: Machine, steps: int) -> Iterator[Row]:
    """Measure and predict each cut of a model."""
    for cut in case.cuts:
        torch.manual_seed(0)
        data, target = case.batch()
        pipe = pdcompiler.compile(
            case.make(), RANKS, example_args=(data,), example_target=target, loss_fn=case.loss_fn, schedule="1f1b",
            microbatches=MICROBATCHES, partition=[cut], machine=machine,
        )  # fmt: skip
        clock, measured = Clock(pipe), []

        def step(pipe: pdcompiler.Pipeline = pipe, data: Tensor = data, target: Tensor = target) -> None:
            pipe.zero_grad()
            pipe.step(data, target=target)

        for _ in range(WARM_UP):
            step()
        for number in range(steps):
            if number % HOOKED_EVERY:
                measured.append(seconds_of(step))
            else:
                dist.barrier()
                clock.run(step)
        forward, backward = stage_costs(clock)
        expected = predict(pipe, machine, forward, backward)
        yield Row(case.name, cut, forward, backward, max(expected.bubble), expected.finish, statistics.median(measured))


def main(machine: Machine, steps: int, check: bool) -> int:
    """Measure each model and cut, print the table, and judge. Only rank 0 prints."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    console = Console(quiet=rank != 0, width=130, highlight=False)
    link = f"{machine.link_latency_seconds * 1e6:.0f} us and {machine.link_bytes_per_second / 1e9:.2f} GB/s"
    columns = ("model", "cut", "stage 0", "stage 1", "bubble", "predicted", "measured", "residual")
    title = f"{RANKS} ranks, {MICROBATCHES} microbatches; a message takes {link}; stages: forward + backward of a microbatch"
    table, residuals = Table(*columns, title=title, title_justify="left"), []
    for case in CASES:
        for row in rows_of(case, machine, steps):
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
    parser.add_argument("--check", action="store_true")
    return parser.parse_args(arguments)


def launch(arguments: Sequence[str], machine: str | None) -> int:
    """Measure this computer if need be, then start the ranks."""
    with tempfile.TemporaryDirectory() as folder:
        if machine is None:
            machine = str(Path(folder) / "machine.toml")
            Machine.measure(progress=lambda what: print(f"measuring {what}", file=sys.stderr)).save(machine)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS), __file__]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.run([*command, *arguments, "--machine", machine], env=environment).returncode


if __name__ == "__main__":
    given = parse(sys.argv[1:])
    if "RANK" in os.environ:
        sys.exit(main(Machine.load(given.machine), given.steps, given.check))
    sys.exit(launch(sys.argv[1:], given.machine))
