"""How good are the planner's plans, against planners and optima that other people published?

Each suite reads workloads from ../shared/data and plans them in the cost model of those who published them. `ours / reference` is
below 1 where our plan is better, `gap` is how far it may be from the best of its class.

    python benchmarks/partition_quality.py [suite ...] [--check]

With --check it exits 1 where a workload misses one of its suite's bars. Suites whose data is absent are skipped.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import quality_dnn_partitioning
import quality_pipedream
import quality_piper
from quality import Row

DATA = Path(__file__).parents[2] / "shared" / "data"
SUITES: dict[str, Callable[[Path], Iterator[Row]]] = {
    "dnn-partitioning": quality_dnn_partitioning.suite,
    "piper": quality_piper.suite,
    "pipedream": quality_pipedream.suite,
}


def line(row: Row) -> str:
    """One row of the table."""
    ratio = row.ours / row.reference if row.ours is not None and row.reference else None
    gap = None if row.ours is None or not row.bound else max(0.0, row.ours / row.bound - 1)
    fields = (
        f"{row.name:<44}", f"{_number(row.ours):>12}", f"{_number(row.reference):>12}",
        f"{'' if ratio is None else format(ratio, '.6f'):>10}", f"{'' if gap is None else format(gap, '.2%'):>8}",
        f"{'proven' if row.proven else '':>7}", f"{row.seconds:8.2f} s", row.missed,
    )  # fmt: skip
    return "  ".join(fields).rstrip()


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.6g}"


def main(names: Sequence[str], data: Path = DATA) -> int:
    """Print the tables; how many rows miss a bar."""
    if not data.exists():
        print(f"skipped: there is no {data}")
        return 0
    rows = []
    for name in names or SUITES:
        print(f"{name}\n{'workload':<44}  {'ours':>12}  {'reference':>12}  {'ratio':>10}  {'gap':>8}  {'':>7}  {'time':>10}")
        for row in SUITES[name](data):
            print(line(row), flush=True)
            rows.append(row)
    missed = sum(bool(row.missed) for row in rows)
    slowest = max((row.seconds for row in rows), default=0.0)
    proven = sum(row.proven for row in rows)
    print(f"{len(rows)} workloads, {proven} proven, {missed} miss a bar, at most {slowest:.2f} s each")
    return missed


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", nargs="*", help=f"of {', '.join(SUITES)}; all, where none is given")
    parser.add_argument("--check", action="store_true", help="exit 1 where a bar is missed")
    arguments = parser.parse_args()
    if unknown := set(arguments.suites) - set(SUITES):
        parser.error(f"there is no suite {', '.join(sorted(unknown))}")
    missed = main(arguments.suites)
    sys.exit(1 if missed and arguments.check else 0)
