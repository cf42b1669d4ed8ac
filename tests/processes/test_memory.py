"""What stays in memory from step to step, and how much is on its way to a rank."""

import gc
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
from torch import Tensor

from pdcompiler.backends.distributed import Distributed
from pdcompiler.comparison import leaves
from tests.models import ZOO
from tests.processes.checks import compile_example
from tests.processes.pool import Group

pytestmark = pytest.mark.processes


def count_tensors() -> list[int]:
    """The number of live tensors after each of 5 steps, with nothing collected that is part of a cycle."""
    example = ZOO["mlp"]()
    pipe = compile_example(example)
    pipe.prepare(*example.args, target=example.target)
    gc.collect()
    gc.disable()
    counts = []
    try:
        for _ in range(5):
            pipe.zero_grad()
            result = pipe.step(*example.args, target=example.target, outputs="all")
            assert all(not leaf.requires_grad and leaf.grad_fn is None for leaf in leaves((result.loss, result.outputs)))
            counts.append(sum(issubclass(type(each), Tensor) for each in gc.get_objects()))
    finally:
        gc.enable()
    return counts


def test_the_number_of_live_tensors_is_constant(pool: Callable[[int], Group]) -> None:
    for counts in pool(2).run(count_tensors):
        assert len(counts) == 5 and len(set(counts)) == 1, counts


def largest_open(microbatches: int) -> int:
    """The most receives that were open at once in a step of `microbatches` microbatches."""
    example = ZOO["mlp"]()
    open_, most = 0, 0
    start, finish = Distributed.start_recv, Distributed.finish_recv

    def count_start(self: Distributed, **what: Any) -> Any:
        nonlocal open_, most
        open_ += 1
        most = max(most, open_)
        return start(self, **what)

    def count_finish(self: Distributed, pending: Any) -> Tensor:
        nonlocal open_
        open_ -= 1
        return finish(self, pending)

    with patch.object(Distributed, "start_recv", count_start), patch.object(Distributed, "finish_recv", count_finish):
        pipe = compile_example(example, microbatches=microbatches)
        pipe.step(*example.args, target=example.target)
    assert open_ == 0
    return most


def test_receive_buffers_do_not_grow_with_the_microbatches(pool: Callable[[int], Group]) -> None:
    few, many = pool(2).run(largest_open, 4), pool(2).run(largest_open, 8)
    assert few == many and all(1 < most <= 4 for most in many)
