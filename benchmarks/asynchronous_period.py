"""Does a pipeline without flushes run at its ideal period with real messages, and who waits for whom?

Each rank sleeps where it would compute, 1 unit for a forward and 2 for a backward for each replica of its stage, so that cores do
not matter and the ideal period is 3 units a minibatch; messages between the ranks (gloo) are real. Beside it the same with each
receive waited for where it stands in the program, as without receives that finish in a later call: ASYNCHRONOUS.md gives 4.0 for
1-1-1-1 and 5.0 for 2-1.

    python benchmarks/asynchronous_period.py [--unit 0.05] [--ticks 48] [--check]

`waited` is the share of the time that the rank which waits most for gradients of later stages spends with that, by the backend's
own clock. With --check it exits 1 where a period is above 3.3 units, or a rank waits more than a tenth of the time.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from ranks import is_rank, run_on_ranks
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional as F

import pdcompiler
from pdcompiler.backends.distributed import Distributed

CASES = {"1-1-1-1": (1, 1, 1, 1), "2-1": (2, 1)}
MOST_PERIOD, MOST_WAITED = 3.3, 0.1


def sleeping(pipe: pdcompiler.Pipeline, replicas: tuple[int, ...], unit: float) -> None:
    """Have the stage functions of this rank's newest programs sleep first."""
    for name, function in pipe.ranks[dist.get_rank()].named_children():
        stage, forward = int(name[len("stage") : name.index("_")]), "_forward" in name
        if not hasattr(function, "sleeps"):
            function.sleeps = unit * replicas[stage] * (1 if forward else 2)
            function.register_forward_pre_hook(lambda module, _: time.sleep(module.sleeps))


def period(replicas: tuple[int, ...], unit: float, ticks: int, early: bool) -> tuple[float, float]:
    """In units; and the largest share of the time that a rank waits for later stages. early: whether receives are."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in replicas))
    pipe = pdcompiler.compile(
        model, sum(replicas), partition=[str(stage) for stage in range(1, len(replicas))], replicas=replicas,
        schedule="pipedream", optimizer=lambda weights: torch.optim.SGD(weights, lr=0.01), loss_fn=F.mse_loss,
    )  # fmt: skip
    runner: Any = pipe.runner
    if not early:
        runner.request = dataclasses.replace(runner.request, overlap=False)
        start, finish = Distributed.start_recv, Distributed.finish_recv
        Distributed.start_recv = lambda self, **what: (None, 0, finish(self, start(self, **what)))  # type: ignore[method-assign]
        Distributed.finish_recv = lambda self, pending: pending[-1]  # type: ignore[method-assign, assignment]
        Distributed.recv = lambda self, **what: finish(self, start(self, **what))  # type: ignore[method-assign]
    x = torch.randn(2, 8)
    warm = 4 * len(replicas) * max(replicas)
    for _ in range(warm):
        pipe.step(x, target=x)
        sleeping(pipe, replicas, unit)
    dist.barrier()
    runner.backend.waited.clear()
    begin = time.perf_counter()
    for _ in range(ticks):
        pipe.step(x, target=x)
    taken = time.perf_counter() - begin
    own = dist.get_rank()
    stage = next(s for s, ranks in runner.schedule.replicas.items() if own in ranks)
    later = {rank for s, ranks in runner.schedule.replicas.items() if s > stage for rank in ranks}
    waited = sum(seconds for rank, seconds in runner.backend.waited.items() if rank in later) / taken
    pipe.drain()
    found = torch.tensor([taken / ticks / unit, waited])
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found[0]), float(found[1])


def measure(name: str, unit: float, ticks: int) -> bool:
    """On the launched ranks; whether a bar is missed."""
    made = Table("plan", "receives", "period, in units", "waited for later stages", title=f"a unit is {unit * 1e3:g} ms")
    missed = False
    for early in (True, False):
        found, waited = period(CASES[name], unit, ticks, early)
        made.add_row(name, "early" if early else "in place", f"{found:.2f}", f"{waited:.1%}")
        missed |= early and (found > MOST_PERIOD or waited > MOST_WAITED)
    if dist.get_rank() == 0:
        Console(width=100).print(made)
    return missed


def main() -> None:
    """Launch the ranks of each plan; or, as one of them, measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--unit", type=float, default=0.05, help="seconds")
    parser.add_argument("--ticks", type=int, default=48)
    parser.add_argument("--plan", choices=sorted(CASES), help="for the ranks")
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    if is_rank():
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        missed = measure(given.plan, given.unit, given.ticks)
        sys.exit(missed and given.check)
    codes = []
    for name, replicas in CASES.items():
        arguments = ["--plan", name, "--unit", str(given.unit), "--ticks", str(given.ticks)]
        arguments += ["--check"] if given.check else []
        codes.append(run_on_ranks(os.path.abspath(__file__), sum(replicas), arguments))
    print("a bar was missed" if any(codes) else f"every period is below {MOST_PERIOD} units")
    sys.exit(any(codes))


if __name__ == "__main__":
    main()
