"""How does the planner's time grow with layers, devices and branches?

    python benchmarks/plan_time.py [--check]

Random workloads with replication and stash memory, each planned once after a warm-up that compiles the loops. `probes` is left to
the planner; the bound says whether the plan is proven. With --check it exits 1 where a bar of issue 3 is missed: a chain of 1,000
layers on 1,024 devices in 0.5 s, 1,000 layers on 16 servers of 8 devices in 3 s, a graph with more than 200,000 downsets in 10 s.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass

import numpy
from rich.console import Console
from rich.table import Table

from pdcompiler.core.machine import Device, Level, Machine
from pdcompiler.core.plan import Training
from pdcompiler.core.workload import Value, Workload
from pdcompiler.planner import plan


@dataclass(frozen=True)
class Case:
    """One line of the table. bar: seconds, or None where the issue names none."""

    name: str
    workload: Workload
    machine: Machine
    training: Training
    bar: float | None = None


def random_chain(layers: int, seed: int = 0) -> Workload:
    """Layers of one to three times the same work, with parameters, saved values and messages of some size."""
    random = numpy.random.default_rng(seed)
    forward = random.uniform(5e-3, 15e-3, (1, layers))
    sent = random.uniform(1e5, 1e7, layers - 1)
    return Workload(
        tuple(f"layer {i}" for i in range(layers)), forward, 2 * forward, random.uniform(1e5, 2e7, layers),
        random.uniform(1e5, 3e6, layers), numpy.zeros(layers), tuple(Value(i, (i + 1,), b) for i, b in enumerate(sent)),
    )  # fmt: skip


def random_branches(branches: int, length: int, seed: int = 0) -> Workload:
    """A layer, `branches` rows of `length` layers side by side, a layer that reads them all: (length + 1) ^ branches downsets."""
    own = random_chain(branches * length + 2, seed)
    random = numpy.random.default_rng(seed)
    last = own.layers - 1
    rows = [[1 + branch * length + k for k in range(length)] for branch in range(branches)]
    values = [Value(0, tuple(row[0] for row in rows), 1e6)]
    for row in rows:
        values += [Value(a, (b,), random.uniform(1e5, 1e7)) for a, b in zip(row, [*row[1:], last], strict=True)]
    return Workload(own.names, own.forward, own.backward, own.parameters, own.saved, own.working, tuple(values))


def servers(*counts: int) -> Machine:
    """Devices of 16 GB; 12 GB/s within a server (or where there is one level), 1.25 GB/s across."""
    speeds = (12e9,) if len(counts) == 1 else (100e9, 12e9)
    levels = tuple(Level(f"level {k}", n, speeds[k], 1e-5) for k, n in enumerate(counts))
    return Machine("servers", levels, ((Device("device", 1e12, 1e11, 16e9), None),), overlap=True)


def cases() -> list[Case]:
    """The lines of the table."""
    stash = Training("pipedream")
    rows = [Case(f"chain of {n:,}", random_chain(n), servers(d), stash, 0.5 if (n, d) == (1000, 1024) else None)
            for n, d in ((100, 64), (300, 256), (1000, 1024), (2000, 1024))]  # fmt: skip
    rows += [Case(f"chain of {n:,}", random_chain(n), servers(8, s), stash, 3.0 if (n, s) == (1000, 16) else None)
             for n, s in ((300, 16), (1000, 16))]  # fmt: skip
    rows += [Case(f"chain of {n:,}", random_chain(n), servers(d), Training("1f1b", 32)) for n, d in ((100, 16), (200, 64))]
    rows += [Case(f"{b} branches of {n}", random_branches(b, n), servers(16), stash, bar)
             for b, n, bar in ((2, 30, None), (3, 20, None), (4, 25, 10.0))]  # fmt: skip
    return rows


def main(check: bool) -> int:
    """Plan each case, print the table, and judge."""
    table = Table("workload", "devices", "schedule", "plan", "gap", "seconds", "bar")
    warmed: set[tuple[str, int]] = set()
    missed = []
    for case in cases():
        key = (case.training.schedule, len(case.machine.levels))
        if key not in warmed:
            small = random_branches(2, 3) if "branch" in case.name else random_chain(6)
            plan(small, case.machine, case.training)
            warmed.add(key)
        begin = time.perf_counter()
        found = plan(case.workload, case.machine, case.training)
        seconds = time.perf_counter() - begin
        devices = " x ".join(str(level.count) for level in reversed(case.machine.levels))
        stages = f"{len(found.plan.stages)} stages" + (f" x {found.plan.pipelines}" if found.plan.pipelines > 1 else "")
        bar = "" if case.bar is None else f"{case.bar} s"
        gap = "proven" if found.proven else f"{found.gap:.1%}"
        table.add_row(case.name, devices, case.training.schedule, stages, gap, f"{seconds:.2f}", bar)
        if case.bar is not None and seconds > case.bar:
            missed.append(f"{case.name} on {devices}: {seconds:.2f} s (bar {case.bar} s)")
    Console(width=130, highlight=False).print(table)
    print("MISSED " + "; ".join(missed) if missed else "all bars met")
    return int(check and bool(missed))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    sys.exit(main(parser.parse_args().check))
