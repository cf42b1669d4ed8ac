"""What is no workload, and what is no training, is said with the layer and the number."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy
import pytest

from pdcompiler.core.errors import CompileError
from pdcompiler.core.plan import Training
from pdcompiler.core.workload import Value, Workload, in_order

ONES = numpy.ones(2)
PAIR = Workload(("first", "second"), ONES[None], 2 * ONES[None], ONES, ONES, ONES, (Value(0, (1,), 4.0),))
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "negative seconds": ({"backward": numpy.array([[1.0, -1.0]])}, "layer 'second': backward is negative or not a number"),
    "seconds that are not a number": (
        {"forward": numpy.array([[numpy.nan, 1.0]])}, "layer 'first': forward is negative or not a number",
    ),
    "endless bytes": ({"saved": numpy.array([1.0, numpy.inf])}, "layer 'second': saved is negative or not a number"),
    "a value of negative bytes": ({"values": (Value(0, (1,), -4.0),)}, "layer 'first': what it makes has -4.0 bytes"),
    "a value of endless bytes": ({"values": (Value(0, (1,), numpy.inf),)}, "layer 'first': what it makes has inf bytes"),
    "a value that goes back": ({"values": (Value(1, (0,), 4.0),)}, "layer 'second' is read by one that stands before it"),
    "a value that a layer makes for itself": (
        {"values": (Value(1, (1,), 4.0),)}, "layer 'second' is read by one that stands before it",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_workload(case: str) -> None:
    changes, message = WRONG[case]
    with pytest.raises(CompileError) as caught:
        replace(PAIR, **changes)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schedule": "1b1f"}, "the planner knows no schedule '1b1f'\n  try: one of ['1f1b', 'gpipe', "),
        ({"microbatches": 0}, "microbatches is 0, expected 1 or more"),
        ({"optimizer_bytes": -1.0}, "optimizer_bytes is -1.0, expected 0 or more"),
        ({"gradient_bytes": numpy.nan}, "gradient_bytes is nan, expected 0 or more"),
        ({"reduce_factor": -0.5}, "reduce_factor is -0.5, expected 0 or more"),
    ],
)
def test_what_is_no_training(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CompileError) as caught:
        Training(**changes)
    assert str(caught.value).startswith(message)


def test_layers_in_another_order_are_the_same_layers() -> None:
    three = Workload(
        ("a", "b", "c"), numpy.array([[1.0, 2.0, 3.0]]), numpy.array([[4.0, 5.0, 6.0]]), numpy.array([7.0, 8.0, 9.0]),
        numpy.zeros(3), numpy.zeros(3), (Value(0, (2,), 4.0), Value(1, (2,), 5.0)), together=((0, 2),),
    )  # fmt: skip
    other = in_order(three, (1, 0, 2))
    assert other.names == ("b", "a", "c") and other.parameters.tolist() == [8, 7, 9] and other.seconds.tolist() == [[7, 5, 9]]
    assert other.values == (Value(1, (2,), 4.0), Value(0, (2,), 5.0)) and other.together == ((1, 2),)
    assert three.edges() == [(0, 2), (1, 2)] == other.edges()
