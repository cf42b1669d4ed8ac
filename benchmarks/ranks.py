"""What the benchmarks that run on several ranks share: starting the ranks, one clock for all of them, and turns.

Not here: what is measured, and how it is judged.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from pdcompiler import Machine


def is_rank() -> bool:
    """Whether this process was launched as a rank."""
    return "RANK" in os.environ


def run_on_ranks(script: str, ranks: int, arguments: Sequence[str]) -> int:
    """Run a script as this many processes with one thread each; its exit code."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), script]
    return subprocess.run([*command, *arguments], env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode


def measure_and_run(script: str, ranks: int, arguments: Sequence[str], machine: str | None) -> int:
    """The same, told a machine's file; this computer is measured first where there is none."""
    with tempfile.TemporaryDirectory() as folder:
        if machine is None:
            machine = str(Path(folder) / "machine.toml")
            Machine.measure(progress=lambda what: print(f"measuring {what}", file=sys.stderr)).save(machine)
        return run_on_ranks(script, ranks, [*arguments, "--machine", machine])


def begin(width: int, pinned: bool = True) -> Console:
    """Join the group, with one thread, and perhaps a core of this rank's own; rank 0's console prints, the others' are quiet."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, cores = dist.get_rank(), sorted(os.sched_getaffinity(0))
    if pinned:
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    return Console(quiet=rank != 0, width=width, highlight=False)


def seconds_of(step: Callable[[], Any]) -> float:
    """From a common start until the slowest rank is done."""
    dist.barrier()
    start = time.perf_counter()
    step()
    taken = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return taken.item()


def by_turns(steps: Mapping[str, Callable[[], Any]], rounds: int, warm_up: int = 3) -> dict[str, list[float]]:
    """Seconds of each step in each round; every other round in reverse order."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(warm_up + rounds):
        for name in list(steps)[:: (-1) ** number]:
            taken = seconds_of(steps[name])
            if number >= warm_up:
                seconds[name].append(taken)
    return seconds


def paired_ratio(one: Sequence[float], other: Sequence[float]) -> tuple[float, float, float]:
    """First quartile, median and third quartile of one's seconds by the other's, round by round."""
    paired = [a / b for a, b in zip(one, other, strict=True)]
    if len(paired) < 2:
        return paired[0], paired[0], paired[0]
    low, middle, high = statistics.quantiles(paired, n=4, method="inclusive")
    return low, middle, high


def spread(ratio: tuple[float, float, float]) -> str:
    """The median with the quartiles."""
    low, middle, high = ratio
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"
