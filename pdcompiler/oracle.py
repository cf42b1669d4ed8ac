"""What asynchronous training computes: a plain loop over minibatches, with every version of every stage's weights kept.

A model in n stages is a function f of its input and n parts of the weights. Each minibatch takes one gradient of f, at the
versions that `weight_versions.py` defines; each stage updates with the mean over a round of minibatches:

    for t, minibatch in enumerate(minibatches):
        w = w_0[v(0, t)], w_1[v(1, t)], ...                                    # forward and backward on the same versions
        gradients of f(minibatch; w)
        for each stage s whose round ends with t:
            w_s.append(step of s(w_s[-1], mean of the round's gradients))      # any torch.optim optimizer

That is all that leaving out the flushes changes: every minibatch counts as before, but its gradient is taken at older weights.
No ticks, schedules or programs are known here, so that no fault can be shared with the compiler. It is slow, and forgets nothing.

    stages = [model[:3], model[3:]]                                            # of an nn.Sequential
    result = asynchronous_steps(stages, minibatches, optimizer=lambda w: SGD(w, lr=0.1), loss_fn=mse_loss, model=model)
    result.weights[1][4]                                                       # of stage 1 after 4 updates, by the model's names
    result.forward_versions[0]                                                 # [0, 0, 1, 2, ...]
"""

import copy
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from pdcompiler.comparison import detached
from pdcompiler.core.errors import CompileError
from pdcompiler.plain import LossFunction, loss_of
from pdcompiler.weight_versions import Semantics, WeightVersions, pipedream_depths

OptimizerOf: TypeAlias = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
Gradients: TypeAlias = list[Tensor | None]


@dataclass(frozen=True)
class AsynchronousResult:
    """losses: of each minibatch.   weights: of each stage, after 0, 1, 2, ... updates, by name.   buffers: at the end, by name.
    forward_versions: of each stage, for each minibatch, how many updates its weights have seen; all are counted from the very
    beginning.   live_versions: of each stage, the most that a replica needs at once."""

    losses: list[Tensor]
    weights: list[list[dict[str, Tensor]]]
    buffers: dict[str, Tensor]
    forward_versions: list[list[int]]
    live_versions: list[int]

    @property
    def backward_versions(self) -> list[list[int]]:
        """The forward's: on any others it would be the gradient of nothing."""
        return self.forward_versions

    @property
    def final_weights(self) -> dict[str, Tensor]:
        """Of all stages, after their last updates."""
        return {name: value for versions in self.weights for name, value in versions[-1].items()}


def asynchronous_steps(
    stages: Sequence[nn.Module],
    minibatches: Sequence[tuple[Any, Any]],
    *,
    optimizer: OptimizerOf,
    loss_fn: LossFunction | None = None,
    replicas: Sequence[int] | None = None,
    depths: Sequence[int] | None = None,
    semantics: Semantics = "stash",
    batch: int | None = None,
    weights: Sequence[float] | None = None,
    drains: Sequence[int] = (),
    model: nn.Module | None = None,
    scale_learning_rate: bool = False,
) -> AsynchronousResult:
    """Train copies of the stages on all minibatches, in order, as an asynchronous pipeline does.

    stages: each takes what the one before returns, a tensor or a tuple of them, so a stage hands on what a later one reads.
    minibatches: (inputs, target) each; inputs, a tensor or a tuple, are for the first stage.   optimizer: makes one for a stage's
    parameters.   loss_fn: `loss_fn(outputs, target)`; without it the last stage returns the loss.   replicas: default 1.
    depths: default PipeDream's.   batch: with "2bw" a minibatch is a microbatch, and so many make an update.   weights: how much
    each microbatch counts in its batch, for example its rows; default the same.   drains: after how many minibatches the pipeline
    is drained: rounds and delays begin anew, versions and optimizers go on.   model: whose names parameters have; default
    nn.ModuleList(stages).   scale_learning_rate: of stage s by r_s / r_0, as PipeDream does.
    """
    counts = (1,) * len(stages) if replicas is None else tuple(replicas)
    rule = WeightVersions(semantics, counts, pipedream_depths(counts) if depths is None else tuple(depths), batch)
    _check(rule, len(stages), len(minibatches), weights, drains)
    names = _names(stages, nn.ModuleList(stages) if model is None else model)
    own = [_Stage(stage, names, count, optimizer) for stage, count in zip(stages, counts, strict=True)]
    if scale_learning_rate:
        for stage in own:
            stage.scale_learning_rate(stage.count / counts[0])
    shares = [1.0] * len(minibatches) if weights is None else list(weights)
    streams = list(itertools.pairwise(sorted({0, *drains, len(minibatches)})))
    losses: list[Tensor] = []
    for start, stop in streams:
        losses += _stream(own, rule, minibatches[start:stop], shares[start:stop], loss_fn)
    return AsynchronousResult(
        losses,
        [[dict(zip(stage.names, version, strict=True)) for version in stage.versions] for stage in own],
        {name: value for stage in own for name, value in stage.buffers().items()},
        [stage.seen for stage in own],
        [max((rule.live(s, stop - start) for start, stop in streams), default=1) for s in range(len(own))],
    )


def _stream(
    stages: Sequence["_Stage"],
    rule: WeightVersions,
    minibatches: Sequence[tuple[Any, Any]],
    weights: Sequence[float],
    loss_fn: LossFunction | None,
) -> list[Tensor]:
    """From an empty pipeline to an empty pipeline. Returns the losses."""
    newest = [len(stage.versions) - 1 for stage in stages]
    losses = []
    for t, (inputs, target) in enumerate(minibatches):
        modules = [stage.at(newest[s] + rule.of(s, t), t % stage.count) for s, stage in enumerate(stages)]
        loss = _loss(modules, inputs, target, loss_fn)
        if loss.requires_grad:  # not so where every parameter is frozen
            (_share(rule, t, weights) * loss).backward()  # type: ignore[no-untyped-call]
        losses.append(loss.detach())
        for s, stage in enumerate(stages):
            stage.keep_gradients(t % stage.count)
            if (t + 1) % rule.round(s) == 0 or t + 1 == len(minibatches):
                stage.update(mean=rule.batch is None)
    for stage in stages:
        stage.share_buffers()
    return losses


class _Stage:
    """One stage: a module for each replica, all versions of the weights, and the gradients that wait for the next one."""

    def __init__(self, module: nn.Module, names: Mapping[int, str], count: int, optimizer: OptimizerOf) -> None:
        self.names = [names[id(parameter)] for parameter in module.parameters()]
        self.buffer_names = [names[id(buffer)] for buffer in module.buffers()]
        self.count = count
        self.modules = [copy.deepcopy(module) for _ in range(count)]
        self.newest = [nn.Parameter(p.detach().clone(), p.requires_grad) for p in module.parameters()]
        self.optimizer = optimizer(self.newest) if self.newest else None
        self.versions = [detached(self.newest)]
        self.gradients: list[list[Gradients]] = [[] for _ in range(count)]
        self.seen: list[int] = []

    def scale_learning_rate(self, factor: float) -> None:
        for group in self.optimizer.param_groups if self.optimizer else ():
            group["lr"] *= factor

    def at(self, version: int, replica: int) -> nn.Module:
        """A replica's module, which has its own buffers, with the weights of a version."""
        self.seen.append(version)
        module = self.modules[replica]
        for parameter, value in zip(module.parameters(), self.versions[version], strict=True):
            parameter.data.copy_(value)
            parameter.grad = None
        return module

    def keep_gradients(self, replica: int) -> None:
        """Of the minibatch that the replica has just run."""
        self.gradients[replica].append([parameter.grad for parameter in self.modules[replica].parameters()])

    def update(self, mean: bool) -> None:
        """One optimizer step with what waits: the sum of each replica, in its own order, then over the replicas, in theirs."""
        total = _sum(_sum(own) for own in self.gradients if own)
        divisor = sum(map(len, self.gradients)) if mean else 1
        for parameter, gradient in zip(self.newest, total, strict=True):
            parameter.grad = None if gradient is None else gradient / divisor
        if self.optimizer is not None:
            self.optimizer.step()
        self.versions.append(detached(self.newest))
        self.gradients = [[] for _ in range(self.count)]

    def share_buffers(self) -> None:
        """They have no versions: each replica's forwards moved its own; at a drain the first replica's hold for all."""
        for module in self.modules[1:]:
            for buffer, value in zip(module.buffers(), self.modules[0].buffers(), strict=True):
                buffer.data.copy_(value)

    def buffers(self) -> dict[str, Tensor]:
        return dict(zip(self.buffer_names, detached(list(self.modules[0].buffers())), strict=True))


def _loss(modules: Iterable[nn.Module], inputs: Any, target: Any, loss_fn: LossFunction | None) -> Tensor:
    """Of copies of the inputs, so that the caller's are safe from in-place operations."""
    values = detached(inputs)
    for module in modules:
        values = module(*values) if isinstance(values, tuple | list) else module(values)
    return loss_of(values, detached(target), loss_fn)


def _share(rule: WeightVersions, t: int, weights: Sequence[float]) -> float:
    """How much a microbatch's loss counts in its batch, which may be a partial one. A minibatch's counts as it is."""
    if rule.batch is None:
        return 1.0
    first = t // rule.batch * rule.batch
    return weights[t] / sum(weights[first : first + rule.batch])


def _sum(gradients: Iterable[Gradients]) -> Gradients:
    """From the first to the last; None for a parameter that nothing reads."""
    return [None if parts[0] is None else functools.reduce(torch.add, parts) for parts in zip(*gradients, strict=True)]


def _names(stages: Sequence[nn.Module], model: nn.Module) -> dict[int, str]:
    """The model's names of the stages' parameters and buffers, by the tensors' ids."""
    names = {id(value): name for name, value in [*model.named_parameters(), *model.named_buffers()]}
    owner: dict[int, int] = {}
    for index, stage in enumerate(stages):
        for name, value in [*stage.named_parameters(), *stage.named_buffers()]:
            if id(value) not in names:
                raise CompileError(f"{name} of stage {index} is not in the model: stages must be made of the model's own modules")
            if isinstance(value, nn.Parameter) and owner.setdefault(id(value), index) != index:
                what = f"{names[id(value)]} is on stages {owner[id(value)]} and {index}, each of which has versions of its own"
                raise CompileError(what, ways_out=("all its uses on one stage", "a schedule with flushes"))
    return names


def _check(rule: WeightVersions, stages: int, minibatches: int, weights: Sequence[float] | None, drains: Sequence[int]) -> None:
    if len(rule.replicas) != stages:
        raise CompileError(f"replicas {rule.replicas} are of {len(rule.replicas)} stages, there are {stages}")
    if weights is not None and (rule.batch is None or len(weights) != minibatches):
        raise CompileError(f"{len(weights)} weights for {minibatches} minibatches, {rule.semantics!r}: 2bw takes one for each")
    if wrong := [drain for drain in drains if not 0 <= drain <= minibatches]:
        raise CompileError(f"a drain after {wrong[0]} of {minibatches} minibatches")
