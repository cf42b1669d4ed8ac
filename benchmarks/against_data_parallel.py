"""The paper's headline on a real network limit: how fast is a pipeline, against DistributedDataParallel, where the link is slow?

Two hosts (`hosts.py`: network namespaces, a link between them that tc limits), a rank and a pinned core each. Three models of
the paper in shape (`paper_models.py`). The link is as slow as makes communication / computation of data parallelism what it was
on the paper's cluster A: 2.47 for VGG-16, 3.20 for GNMT-16, 3.25 for AWD LM (`cluster_a.py` says how these are derived):

    bytes per second = bytes of the parameters x 2 (hosts-1)/hosts / (ratio x seconds of forward and backward of a host's batch)

with the seconds measured at the start, on both hosts at once. Contestants, each with plain SGD and the same rows in each turn:

    DDP          DistributedDataParallel, a batch on each host; bucket_cap_mb as is the fastest of a few
    1f1b         the planner's own plan for two batches at once, in 4 or 8 microbatches; costs profiled here
    pipedream    the planner's own plan and depths; a batch after the other, each backward on the weights of its forward

They take turns within one run; `DDP / it` is the median of the paired ratios, with its quartiles: above 1, it is faster than DDP.
`predicted` is the planner's, which lets nothing hide DDP's communication.   `sent` is what both hosts' links carried.

    python benchmarks/against_data_parallel.py [--rounds 10] [--model VGG-16 ...] [--check]

With --check it exits 1 where the planner says that a schedule beats data parallelism, and it does not beat DDP.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist
from cluster_a import predictions
from contestants import MICROBATCHES, TURN, Trial, why
from hosts import HOSTS, run_on_hosts, why_not
from paper_models import CASES
from ranks import begin, by_turns, is_rank, paired_ratio, spread
from rich.console import Console
from rich.table import Table


def rows_of(name: str, rounds: int, console: Console) -> tuple[list[list[str]], list[str]]:
    """The lines of the table for one model; and what its bars missed."""
    trial = Trial(name, CASES[name])
    console.print(
        f"{name}: {HOSTS} hosts, parameters {trial.nbytes / 1e6:.1f} MB, a host's batch {trial.compute * 1e3:.0f} ms, ratio "
        f"{trial.ratio:.2f}: {trial.bandwidth / 1e6:.1f} MB/s each way; {rounds} rounds; times and bytes of a host's batch"
    )
    plans = {schedule: trial.plan(schedule) for schedule in MICROBATCHES}
    parallel = why(plans["pipedream"]).data_parallel
    assert parallel is not None
    asynchronous, pipe = trial.asynchronous(plans["pipedream"])
    contestants = {"DDP": trial.tuned(parallel), "1f1b": trial.flushing(plans["1f1b"]), "pipedream": asynchronous}
    seconds = by_turns({name: contestant.run for name, contestant in contestants.items()}, rounds, warm_up=2)
    pipe.drain()
    console.print(f"ratio at the end: {trial.ratio_now():.2f}")
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
        lines.append([way, *cells, f"{sent.item() / TURN / 1e6:.2f} MB"])
        if faster > 1 and not ratio[1] > 1:
            missed.append(f"{name} {way}")
    return lines, missed


def main(names: Sequence[str], rounds: int, check: bool) -> int:
    """Measure each model, print the tables, and judge. Only rank 0 prints."""
    console = begin(width=150)
    columns = ("way", "plan", "predicted", "measured", "rows/s", "predicted DDP / it", "DDP / it", "sent")
    missed = []
    for name in names:
        lines, failed = rows_of(name, rounds, console)
        missed += failed
        table = Table(*columns)
        for line in lines:
            table.add_row(*line)
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
