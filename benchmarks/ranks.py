"""What the benchmarks that run on several ranks share: starting the ranks, and one clock for all of them.

Not here: what is measured, and how it is judged.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist


def is_rank() -> bool:
    """Whether this process was launched as a rank."""
    return "RANK" in os.environ


def run_on_ranks(script: str, ranks: int, arguments: Sequence[str]) -> int:
    """Run a script as this many processes with one thread each; its exit code."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), script]
    return subprocess.run([*command, *arguments], env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode


def seconds_of(step: Callable[[], Any]) -> float:
    """From a common start until the slowest rank is done."""
    dist.barrier()
    start = time.perf_counter()
    step()
    taken = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return taken.item()
