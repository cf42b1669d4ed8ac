"""Any model trained with delays, as a plain loop over whole forwards: for models that are no list of stages.

Minibatch t's gradient is taken at weights of which each stage's part is of the version that `weight_versions.py` defines. Stages
are known by the names of their parameters alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from pdcompiler.core.partition import Partition
from pdcompiler.plain import loss_of
from pdcompiler.weight_versions import WeightVersions, pipedream_depths
from tests.models import Example

Weights = dict[str, Tensor]


def minibatch(example: Example, t: int) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """The example's batch with its rows rolled, so that each differs: args, kwargs, target."""

    def rolled(value: Any) -> Any:
        return torch.roll(value, t, 0) if isinstance(value, Tensor) and value.dim() else value

    kwargs = {name: rolled(value)[: 4 + t % 2] for name, value in example.kwargs.items()}
    return tuple(rolled(value)[: 4 + t % 2] for value in example.args), kwargs, _first(rolled(example.target), 4 + t % 2)


def _first(target: Any, rows: int) -> Any:
    return None if target is None else target[:rows]


def delayed_training(
    example: Example, partition: Partition, replicas: Sequence[int], optimizer: Callable[[Any], torch.optim.Optimizer], count: int
) -> tuple[list[Tensor], Weights]:
    """Losses, and the weights and buffers after a drain. (Buffers as with one replica each.)"""
    rule, model = WeightVersions("stash", tuple(replicas), pipedream_depths(replicas)), copy.deepcopy(example.model)
    given = dict(model.named_parameters())
    newest = [{name: nn.Parameter(given[name].detach().clone()) for name in stage.parameters} for stage in partition.stages]
    steppers = [optimizer(list(own.values())) for own in newest]
    versions = [[_copied(own)] for own in newest]
    gradients: list[list[dict[str, Tensor | None]]] = [[] for _ in newest]
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    losses = []
    for t in range(count):
        args, kwargs, target = minibatch(example, t)
        old = {name: value for s, own in enumerate(versions) for name, value in own[rule.of(s, t)].items()}
        leaves = {name: value.clone().requires_grad_() for name, value in old.items()}
        loss = loss_of(functional_call(model, {**leaves, **buffers}, args, kwargs), target, example.loss_fn)
        found = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values()), allow_unused=True), strict=True))
        losses.append(loss.detach())
        for s, own in enumerate(newest):
            gradients[s].append({name: found[name] for name in own})
            if (t + 1) % rule.round(s) == 0 or t + 1 == count:
                _step(own, steppers[s], gradients[s])
                versions[s].append(_copied(own))
                gradients[s] = []
    return losses, {**{name: value for own in versions for name, value in own[-1].items()}, **buffers}


def _copied(weights: dict[str, nn.Parameter]) -> Weights:
    return {name: value.detach().clone() for name, value in weights.items()}


def _step(own: dict[str, nn.Parameter], stepper: torch.optim.Optimizer, gradients: list[dict[str, Tensor | None]]) -> None:
    """With the mean of the round's."""
    for name, parameter in own.items():
        parts = [found[name] for found in gradients]
        parameter.grad = None if parts[0] is None else torch.stack([p for p in parts if p is not None]).sum(0) / len(parts)
    stepper.step()
