"""A device's constants from a profile."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdcompiler.core.errors import CompileError
from pdcompiler.core.machine import Device
from pdcompiler.core.profile import Measured, Profile
from pdcompiler.passes.tracing.fit import fit


def profile(operations: list[tuple[str, float, float, float]], device: str = "gpu") -> Profile:
    """Operations as (kind, flops, bytes, seconds)."""
    measured = [
        Measured("", False, kind, k, kind, seconds, flops, moved, int(kind != "view"))
        for k, (kind, flops, moved, seconds) in enumerate(operations)
    ]
    whole = sum(operation.seconds for operation in measured)
    return Profile("", device, 8, "float32", whole, 0.0, whole, tuple(measured))


def exact(flops: float, moved: float) -> float:
    return flops / 4e12 + moved / 5e11 + 3e-6


SIZES = [(8e9, 1e7), (1e9, 4e7), (1e6, 1e8), (1e3, 1e4), (2e6, 6e6)]


def test_the_constants_of_exact_measurements_are_found() -> None:
    found = fit([profile([("product", f, b, exact(f, b)) for f, b in SIZES])])
    assert math.isclose(found.flops_per_second, 4e12, rel_tol=1e-6)
    assert math.isclose(found.memory_bytes_per_second, 5e11, rel_tol=1e-6)
    assert math.isclose(found.seconds_per_operation, 3e-6, rel_tol=1e-6)
    assert abs(found.residuals["product"]) < 1e-6
    expected = Device("gpu", found.flops_per_second, found.memory_bytes_per_second, 16e9, found.seconds_per_operation)
    assert found.device(16e9) == expected and found.device().memory_bytes == math.inf


def test_the_residual_of_each_kind_is_said() -> None:
    operations = [("product", f, b, exact(f, b)) for f, b in SIZES]
    found = fit([profile([*operations, ("pooling", 1e6, 1e6, 50e-6), ("view", 0, 0, 2e-6)])])
    assert found.residuals["pooling"] < -0.5 and found.residuals["view"] == -1.0
    assert found.kinds[0].kind == "product"
    assert str(found).splitlines()[-1].split() == ["view", "1", "0.002", "0.000", "-100%"]


def test_what_nothing_was_seen_to_cost_by_is_infinitely_fast() -> None:
    found = fit([profile([("movement", 0.0, b, b / 1e9) for b in (1e6, 2e6, 5e6)])])
    assert found.flops_per_second == math.inf and found.seconds_per_operation == pytest.approx(0, abs=1e-9)
    assert math.isclose(found.memory_bytes_per_second, 1e9, rel_tol=1e-6)


def test_several_profiles_of_one_device_are_fitted_together() -> None:
    one, other = ([("product", f, b, exact(f, b)) for f, b in part] for part in (SIZES[:2], SIZES[2:]))
    assert math.isclose(fit([profile(one), profile(other)]).flops_per_second, 4e12, rel_tol=1e-6)
    with pytest.raises(CompileError, match="the profiles are of different devices: cpu, gpu"):
        fit([profile(one), profile(other, "cpu")])


def test_nothing_to_fit_is_refused() -> None:
    for empty in (profile([]), profile([("view", 0, 0, 1e-6)]), profile([("product", 1e6, 1e6, 0.0)])):
        with pytest.raises(CompileError, match="no operation that took any time"):
            fit([empty])


@settings(max_examples=30)
@given(st.lists(st.tuples(st.floats(0, 1e10), st.floats(1, 1e8), st.floats(1e-6, 1e-2)), min_size=3, max_size=20))
def test_law_all_operations_together_take_what_was_measured(operations: list[tuple[float, float, float]]) -> None:
    found = fit([profile([("product", flops, moved, seconds) for flops, moved, seconds in operations])])
    assert min(found.flops_per_second, found.memory_bytes_per_second) > 0 and found.seconds_per_operation >= 0
    (kind,) = found.kinds
    assert kind.residual == pytest.approx(0, abs=1e-9)


def test_law_a_device_twice_as_slow_has_twice_the_constants() -> None:
    fast = profile([("product", f, b, exact(f, b) * (1 + 0.1 * k)) for k, (f, b) in enumerate(SIZES)])
    slow = replace(fast, operations=tuple(replace(o, seconds=2 * o.seconds) for o in fast.operations))
    one, other = fit([fast]), fit([slow])
    assert math.isclose(one.flops_per_second, 2 * other.flops_per_second, rel_tol=1e-6)
    assert math.isclose(2 * one.seconds_per_operation, other.seconds_per_operation, rel_tol=1e-6)
