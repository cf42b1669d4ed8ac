"""A profile as JSON, and how its operations are known from one trace to the next."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pdcompiler.core.errors import CompileError
from pdcompiler.core.profile import Measured, Profile, dtype_of, measured_nodes
from tests.levels import TwoLayers, total, trace_of

MM = Measured("first", False, "addmm.default", 0, "product", 2e-3, 2e6, 3e4, 1)
VIEW = Measured("", True, "t.default", 0, "view", 1e-3, 0.0, 0.0, 0)
PROFILE = Profile("0123456789abcdef", "cpu x86_64", 8, "float32", 2e-3, 1e-3, 3.3e-3, (MM, VIEW))


def test_a_profile_is_saved_and_loaded(tmp_path: Path) -> None:
    PROFILE.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == PROFILE
    lines = PROFILE.to_json().splitlines()
    assert sum('"operator"' in line for line in lines) == 2 and json.loads(PROFILE.to_json())["rows"] == 8


def test_the_residual_is_what_the_clocks_took_longer_than_the_whole() -> None:
    assert PROFILE.seconds == 3e-3
    assert abs(PROFILE.residual - 0.1) < 1e-12
    assert replace(PROFILE, forward_seconds=0.0, backward_seconds=0.0).residual == 0.0


def test_it_is_shown_with_the_slowest_modules_and_kinds() -> None:
    assert str(PROFILE).splitlines() == [
        "cpu x86_64, 8 rows, float32: forward 2.000 ms, backward 1.000 ms",
        "with a clock at each operation it took 10.0% longer, which is scaled away",
        "slowest modules            count  forward ms  backward ms  share",
        "first                          1       2.000        0.000  66.7%",
        "(the model's own forward)      1       0.000        1.000  33.3%",
        "kinds of operations  count  forward ms  backward ms  share",
        "product                  1       2.000        0.000  66.7%",
        "view                     1       0.000        1.000  33.3%",
    ]
    layers = tuple(replace(MM, module=f"layers.{k}", seconds=k) for k in range(20))
    lines = str(replace(PROFILE, operations=layers, clocked_seconds=0.0)).splitlines()
    assert len(lines) == 2 + 1 + 8 + 1 + 1 and lines[3].startswith("layers.19 ") and "100.0% less long" in lines[1]
    assert len(str(replace(PROFILE, operations=())).splitlines()) == 4


def without(field: str) -> Callable[[dict[str, Any]], Any]:
    return lambda data: data.pop(field)


WRONG: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no rows": (without("rows"), "rows"),
    "no operations": (without("operations"), "operations"),
    "an unknown field": (lambda data: data.update(colour="red"), "colour"),
    "negative seconds": (lambda data: data["operations"][0].update(seconds=-1), "a number is negative or not finite"),
    "seconds that are no number": (lambda data: data["operations"][0].update(seconds="1"), "TypeError"),
    "an operation without kind": (lambda data: data["operations"][0].pop("kind"), "kind"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_text_that_is_no_profile(case: str) -> None:
    change, message = WRONG[case]
    data = json.loads(PROFILE.to_json())
    change(data)
    with pytest.raises(CompileError, match="the text is no profile") as error:
        Profile.from_json(json.dumps(data))
    assert message in str(error.value)


@pytest.mark.parametrize("text", ["", "[]", "3", "{"])
def test_a_text_that_is_something_else(text: str) -> None:
    with pytest.raises(CompileError, match="the text is no profile"):
        Profile.from_json(text)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match="can't be read: No such file"):
        Profile.load(tmp_path / "profile.json")


def test_files_that_are_no_profiles_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(CompileError, match=r"a\.json: the text is no profile: KeyError: 'operations'"):
        Profile.load(tmp_path / "a.json")
    (tmp_path / "b.json").write_bytes(b"\xff\xfe")
    with pytest.raises(CompileError, match="can't be read: it is not UTF-8"):
        Profile.load(tmp_path / "b.json")


def test_operations_are_known_in_every_trace_of_a_model() -> None:
    model = TwoLayers()
    general = trace_of(model, torch.zeros(2, 4), loss_fn=total, rows=5)
    one_row = trace_of(model, torch.zeros(1, 4), loss_fn=total, rows=1, symbolic=False)
    only_forward = trace_of(model, torch.zeros(2, 4), loss_fn=total, rows=5, gradients=False)
    keys = set(measured_nodes(general).values())
    assert {("first", False, "addmm.default", 0), ("second", True, "mm.default", 0)} <= keys
    assert set(measured_nodes(one_row).values()) <= keys
    assert set(measured_nodes(only_forward).values()) <= keys | {("", False, "detach.default", 0)}
    assert len(set(keys)) == len(measured_nodes(general))


def test_the_dtype_is_that_of_most_parameters() -> None:
    assert dtype_of(trace_of(TwoLayers().double(), torch.zeros(2, 4).double(), loss_fn=total)) == "float64"
    assert dtype_of(trace_of(torch.nn.Tanh(), torch.zeros(2, 4), rows=5, gradients=False)) == "float32"
