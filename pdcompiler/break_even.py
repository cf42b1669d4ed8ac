"""At which bandwidths which plan is the best: the places where it is worth to replicate more, or less.

    from         to           plan                     seconds        VGG-16 on 16 devices, worth=0.01
    1e+09        1.265e+09    13-2-1                   0.0565298 to 0.0547152
    ...
    2.169e+09    1e+11        15-1                     0.0473604 to 0.0424401

A plan is kept as long as none is better, so plans that tie make no rows. Looked at are some bandwidths, evenly spaced on a
logarithmic scale; between two of which the first's plan is no longer the best at the second, bisection finds where it ends. Of a
machine with several levels, the outermost one's bandwidth is varied. Not here: how the best plan at one bandwidth is found
(`planner.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf

from pdcompiler.core.errors import CompileError
from pdcompiler.core.machine import Machine
from pdcompiler.core.plan import Plan, Training
from pdcompiler.core.workload import Workload
from pdcompiler.found import Found
from pdcompiler.passes.partition.evaluate import evaluate
from pdcompiler.planner import plan

SAME = 1e-6
"""A plan that is slower than the best by less than this part is as good."""
STEPS_PER_DECADE = 8


@dataclass(frozen=True)
class BestRange:
    """One plan is the best from one bandwidth to another, both in bytes per second; and its seconds at both. Plans that only cut
    elsewhere have one range together, under the first of them; the seconds are then those of the best."""

    plan: Plan
    low: float
    high: float
    seconds_at_low: float
    seconds_at_high: float


def break_even(
    best: Callable[[float], Found], seconds: Callable[[Plan, float], float], low: float, high: float, *,
    close: float = 1e-3, worth: float = SAME,
) -> tuple[BestRange, ...]:  # fmt: skip
    """The ranges between two bandwidths, in order. best: the best plan at a bandwidth.   seconds: what a plan takes at one.
    close: how exactly the ends of ranges are found, relative.   worth: a plan is kept as long as none is faster by more than this
    part; 0.01 leaves out plans that hardly matter. Raises CompileError where the bandwidths are none."""
    check_bandwidths(low, high)

    def is_as_good(kept: Found, other: Found, bandwidth: float) -> bool:
        return seconds(kept.plan, bandwidth) <= other.evaluation.seconds * (1 + worth)

    found, start, ranges = best(low), low, list[BestRange]()
    for end in _grid(low, high):
        while True:
            other = best(end)
            if is_as_good(found, other, end):
                break
            last, first, after = _end_of(found, best, is_as_good, (start, end, other), close)
            ranges.append(_range(found, start, last, seconds))
            found, start = after, first
            if start == end:
                break
    ranges.append(_range(found, start, high, seconds))
    return _joined(ranges)


def check_bandwidths(low: float, high: float) -> None:
    """Raise CompileError unless one can go from one to the other."""
    if not 0 < low < high < inf:
        raise CompileError(f"the bandwidths go from {low:g} to {high:g} bytes per second, expected 0 < from < to")


def break_even_of_machine(
    workload: Workload, machine: Machine, training: Training, low: float, high: float, *,
    in_order: bool = False, worth: float = SAME, watch: Callable[[float], None] | None = None,
) -> tuple[BestRange, ...]:  # fmt: skip
    """The ranges of a workload's plans on a machine, were the bandwidth of its outermost level another. in_order: as in `plan`.
    watch: told each bandwidth before it is planned for."""

    def best(bandwidth: float) -> Found:
        if watch is not None:
            watch(bandwidth)
        return plan(workload, with_bandwidth(machine, bandwidth), training, in_order=in_order)

    def seconds(chosen: Plan, bandwidth: float) -> float:
        return evaluate(chosen, workload, with_bandwidth(machine, bandwidth), training).seconds

    return break_even(best, seconds, low, high, worth=worth)


def with_bandwidth(machine: Machine, bandwidth: float) -> Machine:
    """The machine with another bandwidth of its outermost level, in bytes per second."""
    outermost = replace(machine.levels[-1], bytes_per_second=bandwidth)
    return replace(machine, levels=(*machine.levels[:-1], outermost))


def as_text(ranges: Sequence[BestRange]) -> str:
    """A table, bandwidths in bytes per second."""
    rows = [f"{'from':<12} {'to':<12} {'plan':<24} seconds"]
    for own in ranges:
        taken = f"{own.seconds_at_low:.6g} to {own.seconds_at_high:.6g}"
        rows.append(f"{own.low:<12.4g} {own.high:<12.4g} {own.plan!s:<24} {taken}")
    return "\n".join(rows)


def _grid(low: float, high: float) -> list[float]:
    points, factor = [], 10 ** (1 / STEPS_PER_DECADE)
    while low * factor < high:
        low *= factor
        points.append(low)
    return [*points, high]


def _end_of(
    found: Found, best: Callable[[float], Found], is_as_good: Callable[[Found, Found, float], bool],
    between: tuple[float, float, Found], close: float,
) -> tuple[float, float, Found]:  # fmt: skip
    """Up to where the plan is the best, from where it is not, and what is there."""
    low, high, after = between
    while high > low * (1 + close):
        middle = (low * high) ** 0.5
        other = best(middle)
        if is_as_good(found, other, middle):
            low = middle
        else:
            high, after = middle, other
    return (low * high) ** 0.5, high, after


def _range(found: Found, low: float, high: float, seconds: Callable[[Plan, float], float]) -> BestRange:
    return BestRange(found.plan, low, high, seconds(found.plan, low), seconds(found.plan, high))


def _joined(ranges: list[BestRange]) -> tuple[BestRange, ...]:
    joined: list[BestRange] = []
    for own in ranges:
        before = joined[-1] if joined else None
        if before and str(before.plan) == str(own.plan):
            joined[-1] = replace(before, high=own.high, seconds_at_high=own.seconds_at_high)
        else:
            joined.append(own if before is None else replace(own, low=before.high))
    return tuple(joined)
