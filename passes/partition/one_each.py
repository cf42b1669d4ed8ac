"""The best plan with one stage on each device: the recurrence of `by_devices.py` for one replica a stage, whole arrays at a time.

    best[d][i] = min over stages from state i to j of  combine(best[d - 1][j], seconds of that stage on device d)

Device d is counted from the machine's end. There is nothing to choose but the cuts, so a few array operations for each device
do, and nothing is compiled to machine code first: `compile` plans with it on a fresh machine in the time of a trace.
"""

from __future__ import annotations

import numpy

from pdcompiler.core.native import plain
from pdcompiler.core.plan import Choice
from pdcompiler.core.spans import Spans
from pdcompiler.core.stage_time import Terms, border_seconds, level_of, stage_memory, stage_seconds
from pdcompiler.core.workload import Floats


class OneEach:
    """What every candidate stage takes on each device, once for all solutions."""

    def __init__(self, spans: Spans, terms: Terms, devices: int, *, recompute: bool = False) -> None:
        self.spans, self.terms, self.devices = spans, terms, devices
        self.variants = (False, True) if recompute else (False,)
        self.known: dict[tuple[int, ...], Floats] = {}
        self.seconds = [[self._seconds(device, again) for again in self.variants] for device in range(devices)]
        self.passing = [self._passing(device) for device in range(devices)]

    def solve(self, cap: float, *, total: bool) -> tuple[float, list[Choice]]:
        """The least sum of the stages' seconds (and of what a first microbatch waits for at borders), or the least of the slowest
        one, with no stage above the cap; and the stages. Infinite where there are none."""
        best = [numpy.full(self.spans.states, numpy.inf)]
        best[0][-1] = 0.0
        begins = self.spans.start[: self.spans.states - 1]
        for device in range(self.devices):
            own = numpy.full(self.spans.states, numpy.inf)
            values = [self._values(device, n, slice(None), best[-1], cap, total) for n in range(len(self.variants))]
            own[:-1] = numpy.minimum.reduceat(numpy.minimum.reduce(values), begins)
            best.append(own)
        value = float(best[-1][0])
        return value, self._stages(best, cap, total) if value < numpy.inf else []

    def _stages(self, best: list[Floats], cap: float, total: bool) -> list[Choice]:
        state, found = 0, list[Choice]()
        for device in reversed(range(self.devices)):
            pairs = slice(int(self.spans.start[state]), int(self.spans.start[state + 1]))
            values = numpy.array([self._values(device, n, pairs, best[device], cap, total) for n in range(len(self.variants))])
            variant, pair = numpy.unravel_index(values.argmin(), values.shape)
            found.append(Choice(pairs.start + int(pair), 1, self.variants[variant]))
            state = int(self.spans.end[found[-1].pair])
        return found

    def _values(self, device: int, variant: int, pairs: slice, best: Floats, cap: float, total: bool) -> Floats:
        taken, later = self.seconds[device][variant][pairs], best[self.spans.end[pairs]]
        value = later + taken + self.passing[device][pairs] if total else numpy.maximum(later, taken)
        return numpy.where(taken <= cap, value, numpy.inf)

    def _meets(self, device: int) -> tuple[int, int, int]:
        """The device's kind, and the levels of the borders before and behind its stage."""
        kind = min(int(numpy.searchsorted(self.terms.ends, device, side="right")), len(self.terms.ends) - 1)
        behind = plain(level_of)(self.terms, device - 1, device) if device else 0
        return kind, plain(level_of)(self.terms, device, device + 1), behind

    def _seconds(self, device: int, again: bool) -> Floats:
        """Of every candidate stage; infinite where the device's memory does not hold it."""
        kind, before, behind = self._meets(device)
        spans, key = self.spans, (kind, before, behind, again)
        if key not in self.known:
            forward, backward = spans.forward[len(spans.forward) - 1 - kind], spans.backward[len(spans.forward) - 1 - kind]
            enter = plain(border_seconds)(self.terms, spans.entering, before)
            leave = plain(border_seconds)(self.terms, spans.leaving, behind)
            self.known[key] = plain(stage_seconds)(self.terms, forward * (1 + again) + backward, enter, leave, 0.0, 1)
        kept = spans.entering if again else spans.saved
        extra = spans.working + spans.entering + spans.leaving + (spans.saved if again else 0.0)
        fits = plain(stage_memory)(self.terms, spans.parameters, kept, extra, 1, device) <= self.terms.memory[kind]
        return self.known[key] if fits.all() else numpy.where(fits, self.known[key], numpy.inf)

    def _passing(self, device: int) -> Floats:
        """What the first microbatch waits for at the border before, where messages travel while devices compute."""
        bytes_ = self.spans.entering if self.terms.overlap else numpy.zeros_like(self.spans.entering)
        return plain(border_seconds)(self.terms, bytes_, self._meets(device)[1])
