"""The norm of all ranks' gradients together, and gradients scaled down to it: `torch.nn.utils.clip_grad_norm_` for a pipeline.

A parameter that several ranks hold (a tied one, or one of a replicated stage) counts once, by the first of them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from pdcompiler.runner import Runner


def clip_gradients(runner: Runner, max_norm: float, norm_type: float) -> Tensor:
    """Scale this process's gradients; returns the norm, the same on every rank. Every rank calls it."""
    held = runner.holdings.parameters
    counted = _counted(runner)
    own = [parameter.grad for name, parameter in held.items() if parameter.grad is not None and counted.get(name, True)]
    none = next(runner.request.model.parameters()).new_zeros((), device=runner.device)
    norm = get_total_norm(own, norm_type) if own else none
    if runner.backend is not None:
        if norm_type == float("inf"):
            norm = runner.backend.of_all(norm, torch.distributed.ReduceOp.MAX)
        else:
            norm = runner.backend.of_all(norm**norm_type, torch.distributed.ReduceOp.SUM) ** (1 / norm_type)
    clip_grads_with_norm_(list(held.values()), max_norm, norm)
    return norm


def _counted(runner: Runner) -> Mapping[str, bool]:
    """Of the parameters that several ranks hold: whether this process counts them."""
    return {name: runner.rank in (None, ranks[0]) for name, ranks in runner.holders().items()}
