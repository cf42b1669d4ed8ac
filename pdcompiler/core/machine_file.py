"""A Machine as a TOML file: [machine], [[level]] innermost first, [[device]] kind by kind.

    [machine]                               [[device]]
    name = "two servers"                    name = "V100"
    overlap = true                          flops_per_second = "14 TFLOP/s"
                                            memory_bytes_per_second = "900 GB/s"
    [[level]]                               memory_bytes = "16 GiB"
    name = "PCIe"
    count = 4
    bytes_per_second = "12 GB/s"
    latency_seconds = "5 us"

A value is a number in bytes and seconds, or text with a unit. Bits are refused, with the bytes to write instead: a bandwidth
taken eight times too fast gives a plan that is wrong in silence. Not here: what a machine may be (`machine.py` checks).
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from pdcompiler.core.errors import CompileError
from pdcompiler.core.machine import Device, Level, Machine, check_number

T = TypeVar("T")

PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
BINARY_PREFIXES = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
BYTES = {f"{prefix}B": factor for prefix, factor in (PREFIXES | BINARY_PREFIXES).items()}
BYTES_PER_SECOND = {f"{unit}/s": factor for unit, factor in BYTES.items()}
FLOPS_PER_SECOND = {f"{prefix}FLOP/s": factor for prefix, factor in PREFIXES.items()}
SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
UNITS = {
    "flops_per_second": FLOPS_PER_SECOND,
    "memory_bytes_per_second": BYTES_PER_SECOND,
    "memory_bytes": BYTES,
    "bytes_per_second": BYTES_PER_SECOND,
    "latency_seconds": SECONDS,
    "seconds_per_operation": SECONDS,
}
ANY = "any"
TABLES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "machine": (("name",), ("overlap", "used")),
    "level": (("name", "count", "bytes_per_second", "latency_seconds"), ()),
    "device": (
        ("name", "flops_per_second", "memory_bytes_per_second", "memory_bytes"),
        ("count", "seconds_per_operation"),
    ),
}
"""The keys that each table must have, and those that it may have."""

QUANTITY = re.compile(r"\s*([-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)\s*(\S*)\s*")
BITS = re.compile(r"([kKmMgGtTpP]?|[KMGT]i)(?:b|[Bb]its?|bp(?=s))(/?s|)")


def load(source: str | Path) -> Machine:
    """A ready machine by its name, or the one in a TOML file. Raises CompileError with file, table and key."""
    from pdcompiler.core.machines import READY

    if isinstance(source, str) and source in READY:
        return READY[source]()
    if not isinstance(source, (str, Path)):
        raise CompileError(f"machine is a {type(source).__name__}, expected a Machine, a ready name, or a TOML file")
    try:
        text = Path(source).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise CompileError(
            f"the machine's file {source} can't be read: {reason}", ways_out=(f"a ready machine: {', '.join(READY)}",)
        ) from error
    return from_toml(text, str(source))


def from_toml(text: str, file: str = "the text") -> Machine:
    """The inverse of `to_toml`. file: what errors call it."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise CompileError(f"{file} is no TOML: {error}") from error
    if unknown := sorted(data.keys() - TABLES.keys()):
        raise CompileError(f"{file}: unknown table [{unknown[0]}]", ways_out=("[machine], [[level]], [[device]]",))
    head = _values(data.get("machine"), "machine", f"{file}, [machine]")
    levels, devices = (
        [(values, f"{file}, [[{table}]] {place}") for place, values in enumerate(_tables(data.get(table), table, file), 1)]
        for table in ("level", "device")
    )
    made_levels = [_make(Level, _values(values, "level", where), where) for values, where in levels]
    made_devices = []
    for values, where in devices:
        given = _values(values, "device", where)
        count = given.pop("count", None)
        made_devices.append((_make(Device, given, where), count))
    return _make(Machine, {**head, "levels": tuple(made_levels), "devices": tuple(made_devices)}, file)


def _make(kind: Callable[..., T], values: dict[str, Any], where: str) -> T:
    try:
        return kind(**values)
    except CompileError as error:
        raise CompileError(f"{where}: {error}") from None


def _tables(value: Any, table: str, file: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise CompileError(f"{file} has no [[{table}]]", ways_out=(f"one [[{table}]] with {', '.join(TABLES[table][0])}",))
    return value


def _values(given: Any, table: str, where: str) -> dict[str, Any]:
    """The values of one table by key, as numbers in bytes and seconds."""
    required, optional = TABLES[table]
    if not isinstance(given, dict):
        raise CompileError(f"{where} is missing", ways_out=(f"it needs {', '.join(required)}",))
    for key, value in given.items():
        if key not in required + optional:
            _refuse_key(key, value, required + optional, where)
    if missing := [key for key in required if key not in given]:
        raise CompileError(f"{where} lacks {', '.join(missing)}")
    values = {key: quantity(value, UNITS[key], f"{where}, {key}") if key in UNITS else value for key, value in given.items()}
    if not isinstance(values["name"], str):
        raise CompileError(f"{where}, name is {values['name']!r}, expected text")
    if not isinstance(values.get("overlap", False), bool):
        raise CompileError(f"{where}, overlap is {values['overlap']!r}, expected true or false")
    if table == "level" and values["count"] == ANY:
        values["count"] = None
    return values


def _refuse_key(key: str, value: Any, known: tuple[str, ...], where: str) -> NoReturn:
    in_bytes = re.sub("[kmgt]?bits?", "bytes", key.lower())
    if in_bytes not in known or in_bytes == key:
        raise CompileError(f"{where}: unknown key {key}", ways_out=(f"one of {', '.join(known)}",))
    plain = re.search("(?:^|_)bits?", key.lower()) and isinstance(value, (int, float))
    way_out = f"{in_bytes} = {value / 8:g}" if plain else f"{in_bytes}, an eighth of it"
    raise CompileError(f"{where}: {key} is in bits, {in_bytes} is wanted", ways_out=(way_out,))


def quantity(value: Any, units: dict[str, float], where: str) -> Any:
    """A number from text with a unit; what is no text stays as it is."""
    if not isinstance(value, str):
        return value
    match = QUANTITY.fullmatch(value)
    if match and "B" in "".join(units) and (bits := BITS.fullmatch(match[2])):
        prefix = bits[1].capitalize().replace("K", "k") if "i" not in bits[1] else bits[1]
        wanted = f'"{float(match[1]) / 8:g} {prefix}B{"/s" if bits[2] else ""}"'
        raise CompileError(f'{where}: "{value}" is in bits', ways_out=(f"{wanted}, the same in bytes",))
    if match is None or match[2] not in units:
        some = f"a number and one of {', '.join(filter(None, units))}"
        raise CompileError(f'{where}: "{value}" has no unit that is known here', ways_out=(some,))
    return float(Decimal(match[1]) * Decimal(repr(units[match[2]])))  # so that "5 us" is 5e-6 to the last digit


def parse_bytes(text: str, where: str) -> float:
    """"16GiB" or "80 GB" as a number of bytes above 0."""
    nbytes = quantity(text, BYTES, where)
    check_number(nbytes, where, above_zero=True)
    return float(nbytes)


def parse_bandwidth(text: str, where: str) -> float:
    """"12 GB/s" or "1e9" as a number of bytes per second, above 0."""
    bandwidth = quantity(text, {**BYTES_PER_SECOND, "": 1.0}, where)
    check_number(bandwidth, where, above_zero=True)
    return float(bandwidth)


def to_toml(machine: Machine) -> str:
    """The text form, in plain numbers."""
    tables = [("[machine]", {"name": machine.name, "overlap": machine.overlap, "used": machine.used})]
    for level in machine.levels:
        tables.append(("[[level]]", {**vars(level), "count": ANY if level.count is None else level.count}))
    for device, count in machine.devices:
        tables.append(("[[device]]", {"name": device.name, "count": count, **vars(device)}))
    return "\n".join(f"{head}\n{_lines(values)}" for head, values in tables)


def _lines(values: dict[str, Any]) -> str:
    return "".join(f"{key} = {_toml(value)}\n" for key, value in values.items() if value is not None)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f") if isinstance(value, str) else repr(value)
