"""Let plain PyTorch draw from the seeds of a pipeline's microbatches, so that models with dropout can be compared too.

While a model runs eagerly inside `seeded_draws`, each random operation draws from (seed, the module call that runs, which of that
call's draws it is), as the compiled operation does. Not here: the loop (`plain.py`), and how a seed is drawn from
(`core/random_ops.py`).
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from pdcompiler.core.provenance import module_calls
from pdcompiler.core.random_ops import seeded


class _Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """open: the module calls that run, the innermost last.   places: by the state of torch's generator, which each draw moves on:
    a checkpoint that runs its forward again begins with the state that it had, so it finds the same places."""

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seed = seed
        self.open = [("", 0)]
        self.made = Counter[tuple[str, int]]()
        self.places: dict[bytes, str] = {}

    @contextlib.contextmanager
    def inside(self, path: str, number: int) -> Iterator[None]:
        """While a module's forward runs."""
        self.open.append((path, number))
        try:
            yield
        finally:
            self.open.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        state = torch.get_rng_state().numpy().tobytes()
        torch.rand(())
        if state not in self.places:
            path, number = call = self.open[-1]
            self.places[state] = f"{path}#{number}/{self.made[call]}"
            self.made[call] += 1
        return seeded(func, self.seed, self.places[state], *args, **(kwargs or {}))


@contextlib.contextmanager
def seeded_draws(model: nn.Module, seed: int) -> Iterator[None]:
    """One microbatch's forward, loss and backward; torch's generator is as before afterwards."""
    draws = _Draws(seed)
    with torch.random.fork_rng(devices=[]), module_calls(model, draws.inside), draws:
        yield
