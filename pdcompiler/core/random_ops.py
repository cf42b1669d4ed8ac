"""Random operations that draw from a seed of their own: a mask does not depend on where, when or beside what it is made.

    noise = bernoulli(x, 0.9)          noise = seeded(bernoulli, seed, "h.0.drop#0/0", x, 0.9)

seed: of a step and microbatch, see `microbatch_seeds`. The place is the module call that draws, and which of its draws it is. So
training with dropout gives the same numbers for any partition, schedule, replicas and recompute, and never touches the user's own
generators. Not here: which operations of a model are rewritten (`passes/stages/seed_random_ops.py`).
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def microbatch_seeds(seed: int, step: int | str, count: int) -> tuple[int, ...]:
    """The seeds of a step's microbatches. step: how many training steps were taken before, or what else is run."""
    return tuple(_mixed(f"{seed}/{step}/{microbatch}") for microbatch in range(count))


def seeded(operation: Callable[..., Any], seed: int, place: str, *args: Any, **kwargs: Any) -> Any:
    """What a random operation gives when it draws from (seed, place); the device's own generator stays as it is."""
    number, device = _mixed(f"{seed}/{place}"), _device(args, kwargs)
    if _takes_generator(operation):
        return operation(*args, **kwargs, generator=_generator(device).manual_seed(number))
    default = torch.default_generator if device.type == "cpu" else torch.cuda.default_generators[device.index or 0]
    state = default.get_state()
    try:
        default.manual_seed(number)
        return operation(*args, **kwargs)
    finally:
        default.set_state(state)


def _mixed(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


@functools.cache
def _takes_generator(operation: Any) -> bool:
    return any(argument.name == "generator" for argument in operation._schema.arguments)


@functools.cache
def _generator(device: torch.device) -> torch.Generator:
    return torch.Generator(device)


def _device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    """Where an operation draws: on its first tensor's device, or where it is told to make one."""
    tensor = next((value for value in args if isinstance(value, Tensor)), None)
    return tensor.device if tensor is not None else torch.device(kwargs.get("device") or "cpu")
