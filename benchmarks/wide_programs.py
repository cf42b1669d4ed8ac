"""How long do schedules of many ranks and microbatches take to compile, verify and simulate, on one core?

    python benchmarks/wide_programs.py [--check]

Stages of one small layer each, so that it is the programs that take the time, not the trace. Each size in a process of its own.
`verify_ranks` is the share of the compile time in which programs are proved free of deadlock. With --check it exits 1 where a
size takes 60 s or 4 GiB, or that share is above a tenth.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import sys
import time
import warnings
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import pdcompiler
from pdcompiler import compiler

SIZES = ((64, 1, 256, "1f1b"), (16, 2, 128, "zb-v"))
"""Ranks, stages a rank, microbatches, schedule."""
MOST_SECONDS, MOST_GIB, MOST_SHARE = 60.0, 4.0, 0.1
Figures = tuple[float, float, float, float]


def measure(ranks: int, stages_per_rank: int, microbatches: int, schedule: str) -> Figures:
    """Seconds to compile, of it in verify_ranks, to simulate; and GiB."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    stages = ranks * stages_per_rank
    model, rows = nn.Sequential(*[nn.Linear(4, 4) for _ in range(stages)]), torch.randn(microbatches, 4)
    spent = [0.0]

    def timed(programs: Any, verify: Any = compiler.verify_ranks) -> None:
        start = time.perf_counter()
        verify(programs)
        spent[0] += time.perf_counter() - start

    start = time.perf_counter()
    with mock.patch.object(compiler, "verify_ranks", timed):
        pipe = pdcompiler.compile(
            model, ranks, example_args=(rows,), example_target=rows, loss_fn=nn.functional.mse_loss, schedule=schedule,
            microbatches=microbatches, partition=[str(stage) for stage in range(1, stages)],
        )  # fmt: skip
    compiled = time.perf_counter()
    pipe.simulate()
    done = time.perf_counter()
    return compiled - start, spent[0], done - compiled, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main(check: bool) -> int:
    """Measure, print, judge."""
    table = Table("ranks", "stages", "microbatches", "schedule", "compile", "verify_ranks", "simulate", "GiB")
    missed, figures = False, []
    for size in SIZES:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            seconds, verifying, simulating, gib = pool.apply(measure, size)
        share = verifying / seconds
        shown = (f"{seconds:.1f} s", f"{100 * share:.1f} %", f"{simulating:.1f} s", f"{gib:.2f}")
        table.add_row(str(size[0]), str(size[0] * size[1]), str(size[2]), size[3], *shown)
        missed |= seconds + simulating >= MOST_SECONDS or gib >= MOST_GIB or share > MOST_SHARE
        figures.append(f"{size[3]}: {seconds + simulating:.1f} s, {gib:.2f} GiB, {100 * share:.1f} % (bars 60 s, 4 GiB, 10 %)")
    console = Console(width=130, highlight=False)
    console.print(table)
    console.print("   ".join(figures), "MISSED" if missed else "met")
    return int(check and missed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    sys.exit(main(parser.parse_args().check))
