"""What we compile for: devices, and the links between them in nested levels. Here and in `machines.py` stands every constant
about hardware.

    level 1   network   4 units    server 0          server 1          server 2          server 3
    level 0   PCIe      4 devices  0   1   2   3     4   5   6   7     8   9  10  11    12  13  14  15

Devices are numbered along the leaves, kind by kind. Two of them talk over the smallest unit that holds both: 1 and 3 over
PCIe, 3 and 4 over the network. All figures are in bytes, seconds and operations per second; a bandwidth in bits has no place
here. Not here: ready machines (`machines.py`), their files (`machine_file.py`), measuring this computer (`measure.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from operator import mul
from pathlib import Path

import sympy

from pdcompiler.core.cost import Cost
from pdcompiler.core.errors import CompileError


def check_number(value: object, what: str, *, above_zero: bool = False) -> None:
    """Raise CompileError unless it is a number of at least 0, or above 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise CompileError(f"{what} is {value!r}, expected a number")
    if not (value > 0 if above_zero else value >= 0):
        raise CompileError(f"{what} must be {'above 0' if above_zero else 'at least 0'}, is {value}")


def check_count(value: object, what: str) -> None:
    """Raise CompileError unless it is None or a whole number above 0."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise CompileError(f"{what} is {value!r}, expected a whole number of at least 1")


@dataclass(frozen=True)
class Device:
    """One kind of device. flops_per_second, memory_bytes_per_second: what programs reach, not a data sheet's peaks.
    memory_bytes: what one rank may fill (infinite: not known).   seconds_per_operation: the least that any operation takes."""

    name: str
    flops_per_second: float
    memory_bytes_per_second: float
    memory_bytes: float
    seconds_per_operation: float = 0.0

    def __post_init__(self) -> None:
        where = f"device {self.name!r}"
        for name in ("flops_per_second", "memory_bytes_per_second", "memory_bytes"):
            check_number(getattr(self, name), f"{where}: {name}", above_zero=True)
        check_number(self.seconds_per_operation, f"{where}: seconds_per_operation")

    def compute_seconds(self, cost: Cost, operations: int = 0) -> sympy.Expr:
        """Measured seconds, where the cost has them (they are of one kind of device); else the roofline: computing and moving the
        bytes, one after the other, an upper bound of the longer that stays a sum. operations: more than the cost's own."""
        if cost.seconds is not None:
            return cost.seconds
        seconds: sympy.Expr = cost.flops / self.flops_per_second + cost.bytes / self.memory_bytes_per_second
        return seconds + (cost.operations + operations) * self.seconds_per_operation


@dataclass(frozen=True)
class Level:
    """How units are joined to one larger unit. count: of units of the level below (of devices, for the innermost); None: any
    number, on the outermost level alone.   bytes_per_second: from one device to another, one way."""

    name: str
    count: int | None
    bytes_per_second: float
    latency_seconds: float

    def __post_init__(self) -> None:
        where = f"level {self.name!r}"
        check_count(self.count, f"{where}: count")
        check_number(self.bytes_per_second, f"{where}: bytes_per_second", above_zero=True)
        check_number(self.latency_seconds, f"{where}: latency_seconds")


CORE = Device("core", 20e9, 8e9, math.inf)
LOOPBACK = Level("loopback", None, 2e9, 60e-6)


@dataclass(frozen=True)
class Machine:
    """Any number of a laptop's cores, unless told otherwise. levels: innermost first.   devices: kinds with how many of each, in
    the order in which they are laid along the leaves; the last kind may say None: all that are left.   overlap: whether
    messages travel while a device computes.   used: only the first so many devices; None: all."""

    name: str = "laptop"
    levels: tuple[Level, ...] = (LOOPBACK,)
    devices: tuple[tuple[Device, int | None], ...] = ((CORE, None),)
    overlap: bool = False
    used: int | None = None

    def __post_init__(self) -> None:
        where = f"machine {self.name!r}"
        if not self.levels or not self.devices:
            raise CompileError(f"{where} has no {'devices' if self.levels else 'levels'}")
        for level in self.levels[:-1]:
            if level.count is None:
                raise CompileError(f"{where}: level {level.name!r} needs a count; only the outermost may hold any number")
        for place, (device, count) in enumerate(self.devices, 1):
            check_count(count, f"{where}: count of device {device.name!r}")
            if count is None and place < len(self.devices):
                raise CompileError(f"{where}: device {device.name!r} needs a count; only the last kind may be all that are left")
        check_count(self.used, f"{where}: used")
        self._fit_devices(where)

    def _fit_devices(self, where: str) -> None:
        """Replace the last kind's None by a number, where one is known; refuse counts that do not add up."""
        size = self.used or self._product
        told = sum(count or 0 for _, count in self.devices)
        last, count = self.devices[-1]
        if size is None and count is not None:
            raise CompileError(f"{where} has any number of devices, its kinds only {told}", ways_out=("no count for the last",))
        if size is None:
            return
        if self._product is not None and size > self._product:
            raise CompileError(f"{where}: {size} devices used, but its levels hold {self._product}")
        left = size - told
        if left < 0 or (left > 0) != (count is None):
            has = " x ".join(str(level.count) for level in reversed(self.levels))
            kinds = f"{told}{' and more' if count is None else ''}"
            raise CompileError(f"{where} has room for {size} devices ({has}), its kinds are {kinds}")
        if count is None:
            object.__setattr__(self, "devices", (*self.devices[:-1], (last, left)))

    @staticmethod
    def flat(
        count: int | None = None, *, bytes_per_second: float = LOOPBACK.bytes_per_second,
        latency_seconds: float = LOOPBACK.latency_seconds, device: Device = CORE, overlap: bool = False, name: str = "flat",
    ) -> Machine:  # fmt: skip
        """Equal devices, all pairs linked alike. count: None: any number."""
        return Machine(name, (Level("link", count, bytes_per_second, latency_seconds),), ((device, None),), overlap)

    @staticmethod
    def load(source: str | Path) -> Machine:
        """A ready machine by its name ("pipedream-a", "h100-servers", ...), or the one in a TOML file."""
        from pdcompiler.core.machine_file import load

        return load(source)

    @staticmethod
    def measure(*, dtype: str = "float32", timeout: float = 120.0, progress: Callable[[str], None] | None = None) -> Machine:
        """This computer, measured: its devices, and the link between two processes. dtype: of the matrix products.
        progress: told what is being measured."""
        from pdcompiler.core.measure import measure

        return measure(dtype=dtype, timeout=timeout, progress=progress)

    def to_toml(self) -> str:
        """What `load` reads."""
        from pdcompiler.core.machine_file import to_toml

        return to_toml(self)

    def save(self, path: str | Path) -> None:
        """Write it as TOML."""
        Path(path).write_text(self.to_toml())

    @property
    def _product(self) -> int | None:
        counts = [level.count for level in self.levels]
        return None if counts[-1] is None else math.prod(count or 1 for count in counts)

    @property
    def is_unlimited(self) -> bool:
        """Whether it has any number of devices; `take` makes it a machine of so many."""
        return self.used is None and self._product is None

    @cached_property
    def world_size(self) -> int:
        """How many devices."""
        size = self.used or self._product
        if size is None:
            raise CompileError(f"machine {self.name!r} has any number of devices", ways_out=("machine.take(world_size)",))
        return size

    @cached_property
    def unit_sizes(self) -> tuple[int, ...]:
        """How many devices a unit of each level holds, innermost first; 0: any number."""
        return tuple(accumulate((level.count or 0 for level in self.levels), mul))

    def level_of(self, first: int, last: int) -> int:
        """The innermost level of which one unit holds both devices, and so all between them."""
        sizes = self.unit_sizes[:-1]
        return next((index for index, size in enumerate(sizes) if first // size == last // size), len(sizes))

    def kind_of(self, device: int) -> int:
        """Which of `devices` stands at this place."""
        ends = accumulate(count or 0 for _, count in self.devices)
        return next((kind for kind, end in enumerate(ends) if device < end), len(self.devices) - 1)

    def device_of(self, device: int) -> Device:
        """What stands at this place."""
        return self.devices[self.kind_of(device)][0]

    def take(self, world_size: int) -> Machine:
        """The machine of the first `world_size` devices, without the levels that they do not need."""
        check_count(world_size, "world_size")
        if not self.is_unlimited and world_size > self.world_size:
            raise CompileError(
                f"world_size is {world_size}, machine {self.name!r} has {self.world_size}",
                ways_out=(f"world_size={self.world_size} or less", f"a machine with {world_size} devices"),
            )
        levels: list[Level] = []
        held = 1
        for level in self.levels:
            needed = -(-world_size // held)
            count = needed if level.count is None else min(level.count, needed)
            levels.append(replace(level, count=count))
            held *= count
            if held >= world_size:
                break
        devices: list[tuple[Device, int | None]] = []
        left = world_size
        for device, there in self.devices:
            if left:
                taken = left if there is None else min(there, left)
                devices.append((device, taken))
                left -= taken
        return replace(self, levels=tuple(levels), devices=tuple(devices), used=None if held == world_size else world_size)

    def parted(self, stages: int) -> Machine:
        """Each device counted as often as it has stages, where there are more of these than devices, with its part of the memory.
        Neighbouring stages are still on other devices, over the same links."""
        each = -(-stages // self.world_size)
        if each == 1:
            return self
        devices = tuple(
            (replace(device, memory_bytes=device.memory_bytes / each), count and count * each) for device, count in self.devices
        )
        *inner, outermost = self.levels
        levels = (*inner, replace(outermost, count=outermost.count and outermost.count * each))
        return replace(self, levels=levels, devices=devices, used=self.used and self.used * each).take(stages)

    @property
    def link_bytes_per_second(self) -> float:
        """Of the slowest level that joins anything."""
        return min(level.bytes_per_second for level in self._joining)

    @property
    def link_latency_seconds(self) -> float:
        """Of the level with the longest that joins anything."""
        return max(level.latency_seconds for level in self._joining)

    @property
    def _joining(self) -> tuple[Level, ...]:
        return tuple(level for level in self.levels if level.count != 1) or self.levels

    def compute_seconds(self, cost: Cost) -> sympy.Expr:
        """What a cost takes on the first kind of device."""
        return self.devices[0][0].compute_seconds(cost)

    def transfer_seconds(self, nbytes: sympy.Expr | float) -> sympy.Expr:
        """One message of `nbytes` over the worst level."""
        return self.link_latency_seconds + nbytes / self.link_bytes_per_second
