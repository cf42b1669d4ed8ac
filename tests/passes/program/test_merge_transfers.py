"""Small values of one call travel as one message and arrive equal; large ones keep their own."""

import operator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from pdcompiler.backends.reference import Memory, run_program, run_ranks
from pdcompiler.core import ops
from pdcompiler.core.ir import Program, ValueType
from pdcompiler.core.machine import Machine
from pdcompiler.passes.program.merge_transfers import merge_transfers
from pdcompiler.passes.program.split_ranks import split_ranks
from pdcompiler.testing import assert_shows
from tests.levels import Writer

EMPTY = Memory(lambda stage, rank: (), lambda stage, rank: ())
SMALL = ValueType((2, 3), torch.float32)
LARGE = ValueType((1000, 1000), torch.float32)


class Give(nn.Module):
    """Values whatever the input is."""

    def __init__(self, values: list[Tensor]) -> None:
        super().__init__()
        for place, value in enumerate(values):
            self.register_buffer(f"value_{place}", value)
        self.count = len(values)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(getattr(self, f"value_{place}") for place in range(self.count))


def program(types: list[ValueType], values: list[Tensor] | None = None) -> Program:
    """One call on rank 0; each of its results is transferred to rank 1, which returns them."""
    writer = Writer()
    if values is not None:
        writer.root.add_module("stage0_forward", fx.symbolic_trace(Give(values)))
    call = writer.call("stage0_forward", writer.input("x"))
    made = [writer.call(operator.getitem, call, place, name=f"value_{place}", type=type) for place, type in enumerate(types)]
    moved = [writer.call(ops.transfer, value, rank=1, name=value.name, type=value.meta["type"], to=1) for value in made]
    return writer.program({1: {"outputs": [[value] for value in moved]}})


def test_two_small_values_of_one_call_are_one_message() -> None:
    assert_shows(merge_transfers(program([SMALL, SMALL]), Machine()), """
        x = input
        value_0, value_1 = stage0_forward(x)  # rank 0
        pack = pack((value_0, value_1))  # rank 0
        transfer = transfer(pack, to=1)  # rank 1
        value_0, value_1 = unpack(transfer, types=(((2, 3), float32), ((2, 3), float32)))  # rank 1
        return {}  # rank 0
        return {outputs: [[value_0], [value_1]]}  # rank 1
    """)


def test_a_large_value_keeps_its_own_message() -> None:
    text = str(merge_transfers(program([SMALL, LARGE, SMALL]), Machine()))
    assert "pack = pack((value_0, value_2))  # rank 0" in text
    assert "value_1 = transfer(value_1, to=1)  # rank 1" in text


@pytest.mark.parametrize("types", [[SMALL], [LARGE, LARGE], [SMALL, LARGE]])
def test_nothing_is_merged_where_nothing_is_won(types: list[ValueType]) -> None:
    before = program(types)
    text = str(before)
    assert_shows(merge_transfers(before, Machine()), text)


def test_the_machine_decides_what_is_small() -> None:
    assert "pack(" not in str(merge_transfers(program([SMALL, SMALL]), Machine.flat(latency_seconds=1e-12)))
    assert "pack(" in str(merge_transfers(program([LARGE, LARGE]), Machine.flat(latency_seconds=1.0)))


def test_values_of_two_calls_are_not_merged() -> None:
    writer = Writer()
    x = writer.input("x")
    calls = [writer.call("stage0_forward", x, microbatch=m) for m in range(2)]
    values = [writer.call(operator.getitem, call, 0, name=f"h_{m}") for m, call in enumerate(calls)]
    moved = [writer.call(ops.transfer, value, rank=1, name=value.name, to=1) for value in values]
    assert "pack(" not in str(merge_transfers(writer.program({1: {"outputs": [moved]}}), Machine()))


def test_values_of_a_tuple_that_a_call_gives_are_merged_apart_from_its_other_values() -> None:
    """Buffers, which other replicas get at the end."""
    writer = Writer()
    x = writer.input("x")
    call = writer.call("stage0_forward", x)
    h = writer.call(ops.transfer, writer.call(operator.getitem, call, 0, name="h"), rank=1, name="h", to=1)
    buffers = writer.call(operator.getitem, call, 1, name="buffers", type=None)
    items = [writer.call(operator.getitem, buffers, k, name=f"b{k}", microbatch=None) for k in range(2)]
    moved = [writer.call(ops.transfer, item, rank=1, name=item.name, microbatch=None, to=1) for item in items]
    text = str(merge_transfers(writer.program({1: {"outputs": [[h, *moved]]}}), Machine()))
    assert "pack = pack((b0, b1))  # rank 0" in text and "h = transfer(h, to=1)  # rank 1" in text


VALUES = [
    torch.tensor([True, False, True]),
    torch.tensor([2**40, -7]),
    torch.randn(3, 5).bfloat16(),
    torch.tensor(1.5, dtype=torch.float64),
    torch.tensor(True),
    torch.randn(4, 3).t(),
    torch.zeros(0, 4),
    torch.tensor([1 + 2j]),
    torch.tensor([7], dtype=torch.int8),
]


def test_values_arrive_equal_whatever_their_types() -> None:
    types = [ValueType(tuple(value.shape), value.dtype) for value in VALUES]
    merged = merge_transfers(program(types, VALUES), Machine())
    assert str(merged).count("transfer(") == 1
    inputs: dict[str, Any] = {"x": torch.zeros(1)}
    for results in (run_program(merged, inputs, EMPTY)[1], run_ranks(split_ranks(merged), inputs, EMPTY)[1]):
        for [arrived], value in zip(results["outputs"], VALUES, strict=True):
            assert arrived.dtype == value.dtype and arrived.shape == value.shape and torch.equal(arrived, value)
