"""The paper's headline on a real network limit: how fast is a pipeline, against DistributedDataParallel, where the link is slow?

Two hosts (`hosts.py`: network namespaces, a link between them that tc limits), a rank and a pinned core each. Three models of the
paper in shape (`paper_models.py`). The link is as slow as makes communication / computation of data parallelism what it was on the
paper's cluster A: 2.47 for VGG-16, 3.20 for GNMT-16, 3.25 for AWD LM (`cluster_a.py` says how these are derived):

    bytes per second = bytes of the parameters x 2 (hosts-1)/hosts / (ratio x seconds of forward and backward of a host's batch)

with the seconds measured at the start, on both hosts at once. Contestants, each with plain SGD and the same rows in each turn:

    DDP          DistributedDataParallel, a batch on each host; bucket_cap_mb as is the fastest of a few
    1f1b         the planner's own plan for two batches at once, in microbatches; costs profiled here
    pipedream    the planner's own plan; a batch after the other, each host's backward on the weights of its forward

They take turns within one run; `DDP / it` is the median of the paired ratios, with its quartiles: above 1, it is faster than DDP.
`predicted` is the planner's, which lets nothing hide DDP's communication.   `sent` is what both hosts' links carried.

    python benchmarks/against_data_parallel.py [--rounds 10] [--model VGG-16 ...] [--check]

With --check it exits 1 where the planner says that a schedule beats data parallelism, and it does not beat DDP.
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import statistics
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from cluster_a import RATIOS, predictions
from hosts import HOSTS, limit, run_on_hosts, sent_bytes, unlimit, why_not
from paper_models import CASES, Case
from ranks import by_turns, is_rank, paired_ratio, seconds_of, spread
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import pdcompiler
from pdcompiler.compiler import Request, fingerprint, plan_partition, trace_model
from pdcompiler.core.batch import read_batch
from pdcompiler.core.machine import Device, Machine
from pdcompiler.core.partition import Partition
from pdcompiler.core.plan import Training
from pdcompiler.passes.tracing.profile import apply_profile, profile_trace

BUCKETS_MB = (1.0, 4.0, 25.0)
MICROBATCHES = {"1f1b": 8, "pipedream": 1}
"""Of two hosts' batches; of one."""
TURN = 8
"""Hosts' batches in each turn."""
CORE = Device("core", 20e9, 8e9, math.inf)
"""For what a profile leaves open."""
LATENCY = 300e-6


@dataclass
class Contestant:
    """One way to train. turn: on TURN hosts' batches.   predicted: seconds of it, by the planner.   sent: bytes of each, by this
    host."""

    turn: Callable[[], None]
    plan: str
    predicted: float
    sent: list[int] = field(default_factory=list)

    def run(self) -> None:
        """What is timed."""
        before = sent_bytes()
        self.turn()
        self.sent.append(sent_bytes() - before)


def sgd(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """With small steps, since what is learned is not measured."""
    return torch.optim.SGD(parameters, lr=1e-4)


class Trial:
    """One model on a link of its own. data, target: of one batch of each host, the same in all turns."""

    def __init__(self, name: str, case: Case) -> None:
        torch.manual_seed(0)
        self.case, self.model, self.ratio = case, case.make(), RATIOS[name]
        self.data, self.target = case.batch(HOSTS * case.rows)
        self.nbytes = sum(parameter.nbytes for parameter in self.model.parameters())
        unlimit()
        self.compute = self.compute_seconds()
        self.bandwidth = self.nbytes * 2 * (HOSTS - 1) / HOSTS / (self.ratio * self.compute)
        limit(self.bandwidth)
        self.machine = Machine.flat(
            HOSTS, bytes_per_second=self.bandwidth, latency_seconds=LATENCY, device=CORE, overlap=True, name="hosts"
        )  # fmt: skip

    def batches(self, tensor: Tensor) -> Sequence[Tensor]:
        """Each host's."""
        return tensor.chunk(HOSTS)

    def compute_seconds(self) -> float:
        """Of forward and backward of a host's batch, on both at once."""
        model, rank = copy.deepcopy(self.model), dist.get_rank()
        rows, target = self.batches(self.data)[rank], self.batches(self.target)[rank]
        return statistics.median([seconds_of(lambda: self.case.loss_fn(model(rows), target).backward()) for _ in range(9)][2:])

    def plan(self, schedule: str) -> Partition:
        """The planner's, with costs profiled here, on both hosts at once; both take rank 0's."""
        training = Training(schedule, MICROBATCHES[schedule], optimizer_bytes=0.0)
        rows = self.case.rows * (1 if schedule == "pipedream" else HOSTS) // training.microbatches
        request = Request(self.model, HOSTS, self.case.loss_fn, self.machine, None, True, None, None, training)
        batch, name = read_batch(self.model, (self.data,), {}, self.target, None), fingerprint(self.model)
        trace = trace_model(request, batch, rows=rows, symbolic=False, gradients=True)
        dist.barrier()
        profile = profile_trace(trace, self.model, batch, rows=rows, fingerprint=name, loss_fn=self.case.loss_fn)
        apply_profile(trace, profile=profile, device=CORE, fingerprint=name)
        found: list[Any] = [plan_partition(request, trace, [rows], rows * training.microbatches)]
        dist.broadcast_object_list(found)
        partition: Partition = found[0]
        if partition.devices != HOSTS:
            raise SystemExit(f"the planner leaves a host without work: {partition}")
        return partition

    def flushing(self, partition: Partition) -> Contestant:
        """1f1b: all hosts' batches together, cut into microbatches."""
        model = copy.deepcopy(self.model)
        pipe = pdcompiler.compile(
            model, HOSTS, example_args=(self.data,), example_target=self.target, loss_fn=self.case.loss_fn,
            schedule="1f1b", microbatches=MICROBATCHES["1f1b"], partition=partition, machine=self.machine,
        )  # fmt: skip
        optimizer = sgd(list(pipe.parameters()))

        def turn() -> None:
            for _ in range(TURN // HOSTS):
                pipe.zero_grad()
                pipe.step(self.data, target=self.target)
                optimizer.step()

        return Contestant(turn, plan_of(partition), predicted(partition) * TURN / HOSTS)

    def asynchronous(self, partition: Partition) -> tuple[Contestant, pdcompiler.Pipeline]:
        """pipedream: a host's batch after the other."""
        data, target = self.batches(self.data), self.batches(self.target)
        pipe = pdcompiler.compile(
            copy.deepcopy(self.model), HOSTS, example_args=(data[0],), example_target=target[0], loss_fn=self.case.loss_fn,
            schedule="pipedream", optimizer=sgd, partition=partition, machine=self.machine,
        )  # fmt: skip

        def turn() -> None:
            for number in range(TURN):
                pipe.step(data[number % HOSTS], target=target[number % HOSTS])

        return Contestant(turn, plan_of(partition), predicted(partition) * TURN), pipe

    def data_parallel(self, bucket_mb: float, predicted: float) -> Contestant:
        """DistributedDataParallel with buckets of at most so many megabytes."""
        model, rank = DistributedDataParallel(copy.deepcopy(self.model), bucket_cap_mb=bucket_mb), dist.get_rank()
        rows, target = self.batches(self.data)[rank], self.batches(self.target)[rank]
        optimizer = sgd(list(model.parameters()))

        def turn() -> None:
            for _ in range(TURN // HOSTS):
                optimizer.zero_grad()
                self.case.loss_fn(model(rows), target).backward()  # type: ignore[no-untyped-call]
                optimizer.step()

        return Contestant(turn, f"buckets of {bucket_mb:g} MB", predicted * TURN / HOSTS)

    def tuned(self, predicted: float) -> Contestant:
        """With the buckets that are the fastest of a few."""
        tried = {f"{size}": self.data_parallel(size, predicted) for size in BUCKETS_MB}
        seconds = by_turns({name: contestant.run for name, contestant in tried.items()}, 3, warm_up=1)
        medians = [statistics.median(values) for values in seconds.values()]
        found: list[Any] = [min(zip(medians, tried, strict=True))[1]]
        dist.broadcast_object_list(found)
        best = tried[found[0]]
        best.sent.clear()
        return best


def plan_of(partition: Partition) -> str:
    """Replicas of each stage, and where the later ones begin."""
    replicas = "-".join(str(stage.replicas) for stage in partition.stages)
    begins = [next((str(call) for call in stage.calls), "?") for stage in partition.stages[1:]]
    return f"{replicas} at {', '.join(begins)}" if begins else replicas


def predicted(partition: Partition) -> float:
    """Seconds of a step; pipedream: of a minibatch."""
    why = partition.explanation
    assert why is not None and why.walked is not None
    return why.walked


def rows_of(name: str, rounds: int, console: Console) -> tuple[list[list[str]], list[str]]:
    """The lines of the table for one model; and what its bars missed."""
    trial = Trial(name, CASES[name])
    console.print(
        f"{name}: parameters {trial.nbytes / 1e6:.1f} MB, a host's batch {trial.compute * 1e3:.0f} ms, ratio {trial.ratio:.2f}: "
        f"{trial.bandwidth / 1e6:.1f} MB/s each way"
    )
    plans = {schedule: trial.plan(schedule) for schedule in MICROBATCHES}
    why = plans["1f1b"].explanation
    assert why is not None and why.data_parallel is not None
    asynchronous, pipe = trial.asynchronous(plans["pipedream"])
    contestants = {"DDP": trial.tuned(why.data_parallel), "1f1b": trial.flushing(plans["1f1b"]), "pipedream": asynchronous}
    seconds = by_turns({name: contestant.run for name, contestant in contestants.items()}, rounds, warm_up=2)
    pipe.drain()
    lines, missed = [], []
    for way, contestant in contestants.items():
        sent = torch.tensor(float(statistics.fmean(contestant.sent)))
        dist.all_reduce(sent)
        ratio = paired_ratio(seconds["DDP"], seconds[way])
        times = [f"{value / TURN * 1e3:.0f} ms" for value in (contestant.predicted, statistics.median(seconds[way]))]
        throughput = TURN * trial.case.rows / statistics.median(seconds[way])
        faster = contestants["DDP"].predicted / contestant.predicted
        by_planner = "" if way == "DDP" else f"{faster:.2f}"
        cells = [contestant.plan, *times, f"{throughput:.0f}", by_planner, "" if way == "DDP" else spread(ratio)]
        lines.append([name, way, *cells, f"{sent.item() / TURN / 1e6:.2f} MB"])
        if faster > 1 and not ratio[1] > 1:
            missed.append(f"{name} {way}")
    return lines, missed


def main(names: Sequence[str], rounds: int, check: bool) -> int:
    """Measure each model, print the tables, and judge. Only rank 0 prints."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, cores = dist.get_rank(), sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    console = Console(quiet=rank != 0, width=150, highlight=False)
    columns = ("model", "way", "plan", "predicted", "measured", "rows/s", "predicted DDP / it", "DDP / it", "sent")
    table = Table(*columns, title=f"{HOSTS} hosts, {rounds} rounds; times and bytes of a host's batch", title_justify="left")
    missed = []
    for name in names:
        lines, failed = rows_of(name, rounds, console)
        missed += failed
        for line in lines:
            table.add_row(*line)
        table.add_section()
    console.print(table)
    console.print(f"faster than DDP where the planner says so: {'MISSED: ' + ', '.join(missed) if missed else 'met'}")
    dist.destroy_process_group()
    return int(check and bool(missed))


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--model", choices=CASES, nargs="+", default=list(CASES))
    parser.add_argument("--check", action="store_true")
    return parser.parse_args(arguments)


def launch(arguments: Sequence[str]) -> int:
    """The planner's predictions for the paper's cluster; then the hosts, where they can be made."""
    Console(width=150, highlight=False).print(predictions())
    if reason := why_not():
        print(f"skipped: no hosts can be made here: {reason}")
        return 0
    return run_on_hosts(__file__, arguments)


if __name__ == "__main__":
    given = parse(sys.argv[1:])
    if is_rank():
        sys.exit(main(given.model, given.rounds, given.check))
    sys.exit(launch(sys.argv[1:]))
