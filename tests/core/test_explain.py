"""What a user is told of a model that cannot be traced or may not be run: the line, what it did, the ways out.

Before any process group is made, as in tests/test_entry.py, whose helpers this file uses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.cases.against_loop import drawn, seeded
from tests.test_entry import pipeline, stepped, told

pytestmark = pytest.mark.usefixtures("launched")


class Doing(nn.Module):
    """Two layers, with something in between that is not supported."""

    def __init__(self, between: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.first, self.second, self.between = nn.Linear(4, 4), nn.Linear(4, 4), between

    def forward(self, x: Tensor) -> Any:
        changed = self.between(self, x)
        hidden = self.first(x)
        result: Tensor = self.second(hidden if changed is None else hidden + changed)
        return result


def decide(model: Any, x: Tensor) -> Any:
    if x.sum() > 0:  # the user's line
        return x
    return None


def test_a_model_that_decides_by_values_as_a_whole_message() -> None:
    lines = told(lambda: stepped(seeded(lambda: Doing(decide)))).splitlines()
    assert lines[0].startswith("the model decides by the values of a tensor, which are not known when it is compiled (")
    assert lines[1].startswith(f"  at: {__file__}:") and lines[1].endswith(": if x.sum() > 0:  # the user's line")
    assert lines[2:] == [
        "  try: compute with tensors: torch.where (both sides are computed) or torch.cond for a choice, no .item()",
        "  try: decide outside of the model and pass the answer as a Python value: forward(x, flag=True)",
    ]


def test_an_error_of_the_models_own_names_its_line() -> None:
    def fails(model: Any, x: Tensor) -> Tensor:
        return x @ torch.zeros(5, 4, dtype=torch.float64)  # 4 by 5

    text = told(lambda: stepped(seeded(lambda: Doing(fails))))
    assert text.startswith("the model cannot be traced: RuntimeError: ") and text.endswith("  # 4 by 5") and __file__ in text


def clamp(model: Any, x: Tensor) -> None:
    with torch.no_grad():
        model.second.weight.clamp_(-0.1, 0.1)


def test_a_forward_that_changes_a_parameter_or_an_input() -> None:
    ways_out = "\n  try: change a copy\n  try: do it after the step, outside of forward"
    assert told(lambda: stepped(seeded(lambda: Doing(clamp)))) == (
        "forward changes the parameter second.weight in place" + ways_out
    )
    x = drawn(8, 4)
    kept = x.clone()
    model = seeded(lambda: Doing(lambda model, x: x.mul_(2)))
    assert told(lambda: pipeline(model).step(x, target=drawn(8, 4))) == "forward changes the input x in place" + ways_out
    assert torch.equal(x, kept)
