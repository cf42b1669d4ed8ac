"""Why a partition is as it is: what it takes, how good that is, what its neighbours would take. Data, a text form, JSON.

Not here: how these are found (`pdcompiler/planner.py`), nor how a stage's cost is made up (`plan.py`).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Border:
    """Between a stage and the next. begins: the layer with which the next begins.   sent_bytes: of one microbatch, one way.
    earlier, later: seconds of the whole plan with the border one possible cut earlier or later; None: there is none, or it
    doesn't fit the memory."""

    begins: str
    sent_bytes: float
    earlier: float | None
    later: float | None


@dataclass(frozen=True)
class Explanation:
    """seconds: of a step of `microbatches` microbatches of `rows` rows (asynchronous schedules: of one microbatch).   bound: no
    plan is faster, among those that `how` names.   one_device, data_parallel: seconds of those plans; None: the memory is too
    small.   memory_bytes: of a device, None: not known.   walked: seconds, when every action of the schedule is walked (beside
    `seconds`, which a formula gives); None: not walked.   depths: of an asynchronous schedule, by stage."""

    machine: str
    devices: int
    memory_bytes: float | None
    schedule: str
    microbatches: int
    rows: int
    seconds: float
    bound: float
    how: str
    one_device: float | None
    data_parallel: float | None
    borders: tuple[Border, ...] = ()
    walked: float | None = None
    depths: tuple[int, ...] | None = None

    @property
    def gap(self) -> float:
        """How far the plan may be from the best, relative to the bound."""
        return max(0.0, self.seconds / self.bound - 1) if self.bound > 0 else 0.0

    def to_data(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @staticmethod
    def from_data(data: dict[str, Any]) -> Explanation:
        """The inverse of `to_data`."""
        borders, depths = tuple(Border(**border) for border in data["borders"]), data.get("depths")
        return Explanation(**{**data, "borders": borders, "depths": None if depths is None else tuple(depths)})

    def lines(self) -> list[str]:
        """What `print(pipe.partition)` says below its table."""
        what = "step" if self.schedule in ("gpipe", "1f1b") else "microbatch"
        best = "the best" if self.gap <= 1e-6 else f"at most {self.gap:.1%} above the best"
        found = [f"one {what} of {self.schedule} takes {seconds(self.seconds)}: {best} of {self.how}"]
        if self.walked is not None:
            depths = f", with depths {'-'.join(map(str, self.depths))}" if self.depths else ""
            found.append(f"walked action by action: {seconds(self.walked)}{depths}")
        for name, other in (("one device", self.one_device), ("data parallelism", self.data_parallel)):
            takes = "not enough memory" if other is None else f"{seconds(other)}, {_compared(other, self.seconds)}"
            found.append(f"{name}: {takes}")
        for border in self.borders:
            moves = [f"one cut {way} {_change(other, self.seconds)}" for way, other in
                     (("earlier", border.earlier), ("later", border.later)) if other is not None]  # fmt: skip
            sends = f"sends {amount(border.sent_bytes)}B"
            found.append(f"border before {border.begins}: {sends}; {', '.join(moves) or 'no other cut'}")
        return found


def _compared(other: float, own: float) -> str:
    return f"{other / own:.3g} x as long" if other >= own else f"{own / other:.3g} x as fast"


def _change(other: float, own: float) -> str:
    change = other - own
    return "no change" if abs(change) <= 1e-9 * own else f"{'+' if change > 0 else '-'}{seconds(abs(change))}"


def seconds(value: float) -> str:
    """A time with three digits and its unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= size:
            return f"{value / size:.3g} {unit}" if value < 1000 else f"{value:.0f} s"
    return f"{value * 1e9:.3g} ns"


def amount(count: float) -> str:
    """A number of bytes with its unit's prefix."""
    for unit in ("", "Ki", "Mi", "Gi"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} Ti"
