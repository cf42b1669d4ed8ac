"""What an operation draws depends on seed and place alone; the device's own generator stays as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pdcompiler.core.random_ops import microbatch_seeds, seeded

aten = torch.ops.aten
X = torch.ones(1000)
OPERATIONS: list[tuple[Any, tuple[Any, ...]]] = [
    (aten.bernoulli.p, (X, 0.9)),  # takes a generator
    (aten.native_dropout.default, (X, 0.1, True)),  # draws from the device's own alone
    (aten.randn.default, ([1000],)),
    (aten.bernoulli_.float, (X.clone(), 0.9)),
]


@pytest.mark.parametrize(("operation", "args"), OPERATIONS, ids=lambda value: str(value) if callable(value) else "")
def test_it_depends_on_seed_and_place_alone(operation: Any, args: tuple[Any, ...]) -> None:
    def draw(seed: int, place: str) -> torch.Tensor:
        drawn = seeded(operation, seed, place, *args)
        return (drawn[0] if isinstance(drawn, tuple) else drawn).clone()

    before = torch.get_rng_state()
    first = draw(1, "h.0#0/0")
    torch.rand(3)
    assert torch.equal(draw(1, "h.0#0/0"), first)
    others = [draw(2, "h.0#0/0"), draw(1, "h.1#0/0"), draw(1, "h.0#1/0"), draw(1, "h.0#0/1")]
    assert not any(torch.equal(other, first) for other in others)
    torch.set_rng_state(before)
    draw(1, "h.0#0/0")
    assert torch.equal(torch.get_rng_state(), before)


def test_every_microbatch_of_every_step_has_a_seed_of_its_own() -> None:
    seeds = [seed for base in (0, 1) for step in (0, 1, "evaluation") for seed in microbatch_seeds(base, step, 4)]
    assert len(set(seeds)) == len(seeds) == 24
    assert microbatch_seeds(0, 1, 4)[:2] == microbatch_seeds(0, 1, 2)


def test_an_operation_that_fails_leaves_the_generator_alone() -> None:
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError):
        seeded(aten.native_dropout.default, 0, "", X, 2.0, True)
    assert torch.equal(torch.get_rng_state(), before)
