"""Machines as TOML: what is read, what is written, and what a user is told who writes it wrong."""

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcompiler import CompileError, Machine
from pdcompiler.core.machine import Device, Level
from pdcompiler.core.machine_file import ANY, from_toml, parse_bandwidth
from pdcompiler.core.machines import READY

TEXT = """\
[machine]
name = "two servers"
overlap = true

[[level]]
name = "PCIe"
count = 4
bytes_per_second = "12 GB/s"
latency_seconds = "5 us"

[[level]]
name = "network"
count = 2
bytes_per_second = 1.25e9
latency_seconds = 5e-5

[[device]]
name = "V100"
flops_per_second = "14 TFLOP/s"
memory_bytes_per_second = "900 GB/s"
memory_bytes = "16 GiB"
"""


def test_text_becomes_a_machine() -> None:
    v100 = Device("V100", 14e12, 900e9, 16 * 2**30)
    levels = Level("PCIe", 4, 12e9, 5e-6), Level("network", 2, 1.25e9, 5e-5)
    assert from_toml(TEXT) == Machine("two servers", levels, ((v100, 8),), overlap=True)


names = st.text(st.characters(exclude_categories=["Cs"]))
numbers = st.floats(1e-9, 1e18) | st.integers(1, 10**15)


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    counts: list[int | None] = list(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    inside = math.prod(count or 1 for count in counts[:-1])
    counts[-1] = draw(st.sampled_from([counts[-1], None]))
    levels = tuple(Level(draw(names), count, draw(numbers), draw(numbers | st.just(0))) for count in counts)
    memory = draw(numbers | st.just(math.inf))
    kinds = [Device(draw(names), draw(numbers), draw(numbers), memory, draw(numbers)) for _ in range(draw(st.integers(1, 2)))]
    machine = Machine(draw(names), levels, ((kinds[0], None),), draw(st.booleans()))
    if len(kinds) == 2 and inside > 1:
        machine = Machine(machine.name, levels, ((kinds[0], 1), (kinds[1], None)), machine.overlap)
    return machine if machine.is_unlimited else machine.take(draw(st.integers(1, machine.world_size)))


@given(machines())
def test_what_is_written_is_read_again(machine: Machine) -> None:
    assert from_toml(machine.to_toml()) == machine


def test_files_and_ready_names(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    machine = Machine.load("pipedream-a")
    machine.save(path)
    assert Machine.load(path) == Machine.load(str(path)) == machine == READY["pipedream-a"]()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12 GB/s", 12e9), ("12GB/s", 12e9), ("1.5e3 kB/s", 1.5e6), ("3 B/s", 3.0), ("2 GiB/s", 2 * 2**30), (" 1 TB/s ", 1e12),
    ],
)  # fmt: skip
def test_units_of_bandwidth(text: str, value: float) -> None:
    assert from_toml(TEXT.replace("12 GB/s", text)).levels[0].bytes_per_second == value


@pytest.mark.parametrize(("text", "value"), [("5 us", 5e-6), ("5 µs", 5e-6), ("3 ns", 3e-9), ("2 ms", 2e-3), ("0 s", 0.0)])
def test_units_of_time(text: str, value: float) -> None:
    assert from_toml(TEXT.replace("5 us", text)).levels[0].latency_seconds == pytest.approx(value)


def test_the_outermost_level_may_hold_any_number() -> None:
    assert from_toml(TEXT.replace("count = 2", f'count = "{ANY}"')).is_unlimited


KINDS = "flops_per_second, memory_bytes_per_second, memory_bytes"
WRONG: dict[str, tuple[str, str, str]] = {
    "bits": (
        '"12 GB/s"', '"10 Gbit/s"',
        'c.toml, [[level]] 1, bytes_per_second: "10 Gbit/s" is in bits\n  try: "1.25 GB/s", the same in bytes',
    ),
    "bits, in short": (
        '"12 GB/s"', '"25 Gbps"',
        'c.toml, [[level]] 1, bytes_per_second: "25 Gbps" is in bits\n  try: "3.125 GB/s", the same in bytes',
    ),
    "bits, in lower case": (
        '"12 GB/s"', '"800 kb/s"',
        'c.toml, [[level]] 1, bytes_per_second: "800 kb/s" is in bits\n  try: "100 kB/s", the same in bytes',
    ),
    "memory in bits": (
        '"16 GiB"', '"128 Gib"', 'c.toml, [[device]] 1, memory_bytes: "128 Gib" is in bits\n  try: "16 GiB", the same in bytes',
    ),
    "a key in bits": (
        "bytes_per_second = 1.25e9", "bits_per_second = 1e10",
        "c.toml, [[level]] 2: bits_per_second is in bits, bytes_per_second is wanted\n  try: bytes_per_second = 1.25e+09",
    ),
    "a key in gigabits": (
        "bytes_per_second = 1.25e9", "gbits_per_second = 10",
        "c.toml, [[level]] 2: gbits_per_second is in bits, bytes_per_second is wanted\n  try: bytes_per_second, an eighth of it",
    ),
    "no unit": (
        '"5 us"', '"5"',
        'c.toml, [[level]] 1, latency_seconds: "5" has no unit that is known here\n  try: a number and one of s, ms, us, µs, ns',
    ),
    "another unit": (
        '"5 us"', '"5 GB"',
        'c.toml, [[level]] 1, latency_seconds: "5 GB" has no unit that is known here\n'
        "  try: a number and one of s, ms, us, µs, ns",
    ),
    "negative": (
        '"12 GB/s"', '"-12 GB/s"',
        "c.toml, [[level]] 1: level 'PCIe': bytes_per_second must be above 0, is -12000000000.0",
    ),
    "nan": ('"16 GiB"', "nan", "c.toml, [[device]] 1: device 'V100': memory_bytes must be above 0, is nan"),
    "a truth": ('"16 GiB"', "true", "c.toml, [[device]] 1: device 'V100': memory_bytes is True, expected a number"),
    "level of 0": (
        "count = 4", "count = 0", "c.toml, [[level]] 1: level 'PCIe': count is 0, expected a whole number of at least 1",
    ),
    "count in words": (
        "count = 4", 'count = "four"',
        "c.toml, [[level]] 1: level 'PCIe': count is 'four', expected a whole number of at least 1",
    ),
    "missing": ('memory_bytes = "16 GiB"\n', "", "c.toml, [[device]] 1 lacks memory_bytes"),
    "unknown key": (
        "count = 2", "count = 2\nspeed = 3",
        "c.toml, [[level]] 2: unknown key speed\n  try: one of name, count, bytes_per_second, latency_seconds",
    ),
    "unknown table": ("[machine]", "[machin]", "c.toml: unknown table [machin]\n  try: [machine], [[level]], [[device]]"),
    "no machine": (
        '[machine]\nname = "two servers"\noverlap = true\n', "", "c.toml, [machine] is missing\n  try: it needs name",
    ),
    "no device": (
        TEXT[TEXT.index("[[device]]") :], "", f"c.toml has no [[device]]\n  try: one [[device]] with name, {KINDS}",
    ),
    "one table, not a list": (
        "[[device]]", "[device]", f"c.toml has no [[device]]\n  try: one [[device]] with name, {KINDS}",
    ),
    "a name that is none": ('"V100"', "100", "c.toml, [[device]] 1, name is 100, expected text"),
    "overlap in words": ("overlap = true", 'overlap = "yes"', "c.toml, [machine], overlap is 'yes', expected true or false"),
    "devices that do not fit": (
        'name = "V100"', 'name = "V100"\ncount = 3',
        "c.toml: machine 'two servers' has room for 8 devices (2 x 4), its kinds are 3",
    ),
    "no TOML": ("count = 4", "count = ", "c.toml is no TOML: Invalid value (at line 7, column 9)"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_user_is_told_what_is_wrong(case: str) -> None:
    old, new, message = WRONG[case]
    assert old in TEXT
    with pytest.raises(CompileError) as caught:
        from_toml(TEXT.replace(old, new), "c.toml")
    assert str(caught.value) == message


def test_no_such_machine() -> None:
    with pytest.raises(CompileError) as caught:
        Machine.load("pipedream")
    assert str(caught.value) == (
        "the machine's file pipedream can't be read: No such file or directory\n"
        "  try: a ready machine: laptop, pipedream-a, pipedream-b, pipedream-c, h100-servers"
    )


def test_a_bandwidth_alone() -> None:
    for text in ("3.125e9", "3.125 GB/s", "3125MB/s"):
        assert parse_bandwidth(text, "--low") == 3.125e9


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("25Gbit/s", '--low: "25Gbit/s" is in bits\n  try: "3.125 GB/s", the same in bytes'),
        ("25GB", '--low: "25GB" has no unit that is known here\n  try: a number and one of B/s, kB/s, '),
        ("fast", '--low: "fast" has no unit that is known here'),
        ("0", "--low must be above 0, is 0.0"),
        ("-1e9", "--low must be above 0, is -1000000000.0"),
    ],
)
def test_case_36_what_is_no_bandwidth(text: str, message: str) -> None:
    with pytest.raises(CompileError) as caught:
        parse_bandwidth(text, "--low")
    assert str(caught.value).startswith(message)
