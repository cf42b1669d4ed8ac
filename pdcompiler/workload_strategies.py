"""Random planner problems for hypothesis: workloads, machines, training. `testing.py` offers them to users.

Small whole numbers, so that plans often tie and memory often binds: a search that is wrong shows it within few examples.
"""

from __future__ import annotations

import numpy
from hypothesis import strategies as st

from pdcompiler.core.machine import Device, Level, Machine
from pdcompiler.core.plan import SCHEDULE_KINDS, Training
from pdcompiler.core.workload import Value, Workload

QUANTITIES = st.integers(0, 12).map(float)


@st.composite
def workloads(draw: st.DrawFn, kinds: int = 1, most_layers: int = 7, chain: bool = False) -> Workload:
    """A graph of 1 to `most_layers` layers; a value goes to some later layers, in a chain to the next."""
    count = draw(st.integers(1, most_layers))
    table = [draw(st.lists(QUANTITIES, min_size=count, max_size=count)) for _ in range(2 * kinds + 3)]
    values = []
    for producer in range(count - 1):
        any_later = st.lists(st.integers(producer + 1, count - 1), max_size=3, unique=True)
        later = [producer + 1] if chain else draw(any_later)
        if later:
            values.append(Value(producer, tuple(sorted(later)), draw(QUANTITIES)))
    names = tuple(f"layer{i}" for i in range(count))
    parameters, saved, working = (numpy.array(row) for row in table[2 * kinds :])
    forward, backward = numpy.array(table[:kinds]), numpy.array(table[kinds : 2 * kinds])
    return Workload(names, forward, backward, parameters, saved, working, tuple(values))


@st.composite
def machines(draw: st.DrawFn, kinds: int = 1, most_levels: int = 2, most_devices: int = 4) -> Machine:
    """At most `most_devices` devices in one level or two, the outer one slower; sometimes with little memory."""
    device_count = draw(st.integers(kinds, most_devices))
    unit = draw(st.integers(1, device_count)) if most_levels > 1 else device_count
    slow = draw(st.sampled_from([0.5, 1.0, 4.0]))
    fast = slow * draw(st.sampled_from([1.0, 2.0, 10.0]))
    latency = draw(st.sampled_from([0.0, 0.0, 0.25]))
    levels = [Level("inner", unit, fast, latency), Level("outer", -(-device_count // unit), slow, latency)]
    memory = draw(st.sampled_from([1e9, 1e9, 40.0, 80.0]))
    counts = [device_count - kinds + 1] + [1] * (kinds - 1)
    devices = tuple((Device(f"kind{k}", 1.0, 1.0, memory * (k + 1)), n) for k, n in enumerate(counts))
    used = device_count if levels[0].count * levels[1].count != device_count else None  # type: ignore[operator]
    overlap = draw(st.booleans())
    return Machine("random", tuple(levels), devices, overlap, used)


@st.composite
def trainings(draw: st.DrawFn, schedules: tuple[str, ...] = tuple(SCHEDULE_KINDS)) -> Training:
    """A schedule with 1 to 5 microbatches, an optimizer, perhaps recompute."""
    return Training(
        draw(st.sampled_from(schedules)), draw(st.integers(1, 5)), draw(st.sampled_from([0.0, 2.0])),
        reduce_factor=draw(st.sampled_from([2.0, 4.0])), recompute=draw(st.booleans()),
    )  # fmt: skip
