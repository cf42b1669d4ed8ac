"""The norm of all ranks' gradients together, and gradients scaled down to it: `torch.nn.utils.clip_grad_norm_` for a pipeline.

A parameter that several ranks hold (a tied one, or one of a replicated stage) counts once, by the first of them. Here is also
what `torch.amp.GradScaler` needs of a pipeline: that an overflow on one rank is seen on all.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from pdcompiler.core.errors import CompileError
from pdcompiler.runner import Runner


def clip_gradients(runner: Runner, max_norm: float, norm_type: float, deterministic: bool) -> Tensor:
    """Scale this process's gradients; returns the norm, the same on every rank. Every rank calls it. deterministic: the norm is
    made of the parameters' in the model's order, as one process does, and equal to the last bit."""
    if not norm_type > 0:
        raise CompileError(f"norm_type is {norm_type}, expected a number above 0, or inf")
    own = _counted_gradients(runner)
    none = next(runner.request.model.parameters()).new_zeros((), device=runner.device)
    if deterministic and runner.backend is not None:
        norm = _norm_in_order(runner, own, norm_type, none)
    else:
        norm = get_total_norm(list(own.values()), norm_type) if own else none
        if runner.backend is not None and norm_type == float("inf"):
            norm = runner.backend.of_all(norm, torch.distributed.ReduceOp.MAX)
        elif runner.backend is not None:
            norm = runner.backend.of_all(norm**norm_type, torch.distributed.ReduceOp.SUM) ** (1 / norm_type)
    clip_grads_with_norm_(list(runner.holdings.parameters.values()), max_norm, norm)
    return norm


def share_overflow(runner: Runner) -> None:
    """Where any rank's gradients have an infinity or no number, all ranks' have one: every rank's GradScaler then skips."""
    held = [parameter.grad for parameter in runner.holdings.parameters.values() if parameter.grad is not None]
    overflows = not all(bool(torch.isfinite(gradient).all()) for gradient in held)
    if runner.backend is not None:
        own = torch.tensor(float(overflows), device=runner.device)
        overflows = bool(runner.backend.of_all(own, torch.distributed.ReduceOp.MAX))
    if overflows:
        for gradient in held:
            gradient[(0,) * gradient.dim()] = float("inf")


def _counted_gradients(runner: Runner) -> dict[str, Tensor]:
    """Those that this process counts: of the parameters that several ranks hold, the first of them does."""
    first = {name: runner.rank in (None, ranks[0]) for name, ranks in runner.holders().items()}
    held = runner.holdings.parameters
    return {name: p.grad for name, p in held.items() if p.grad is not None and first.get(name, True)}


def _norm_in_order(runner: Runner, own: dict[str, Tensor], norm_type: float, none: Tensor) -> Tensor:
    """As `get_total_norm` of all gradients, in the model's order, makes it of each one's norm."""
    assert runner.backend is not None
    norms = {name: torch.linalg.vector_norm(gradient, norm_type).cpu() for name, gradient in own.items()}
    everywhere = {name: norm for part in runner.backend.gather(norms) for name, norm in part.items()}
    ordered = [everywhere[name] for name, _ in runner.request.model.named_parameters() if name in everywhere]
    return torch.linalg.vector_norm(torch.stack(ordered).to(runner.device), norm_type) if ordered else none
