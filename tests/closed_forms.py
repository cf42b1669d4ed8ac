"""The paper's equations for a linear model, by hand: what asynchronous training must give, without autograd and torch.optim.

A stage is one matrix, the model `x @ w_0.T @ w_1.T ...`, the loss half the squared error. Each function returns, for each stage,
its weights after 0, 1, 2, ... updates by plain gradient descent, in float64.
"""

from typing import Any

import torch
from torch import Tensor, nn

RATE = 0.05
Weights = list[Tensor]


def minibatches(count: int, rows: int = 3) -> list[tuple[Tensor, Tensor]]:
    """The same however many."""
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randn(2, rows, 4, generator=generator, dtype=torch.float64) for _ in range(count)]
    return [(x, target) for x, target in drawn]


def linear(stages: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(stages)]).double()


def half_squared(outputs: Tensor, target: Tensor) -> Tensor:
    return (outputs - target).square().sum() / 2


def sgd(weights: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights, lr=RATE)


def gradients(weights: Weights, x: Tensor, target: Tensor) -> Weights:
    """Of half the squared error, by hand: stage s gets (what the later ones make of the error).T @ its input."""
    inputs = [x]
    for w in weights:
        inputs.append(inputs[-1] @ w.T)
    error, found = inputs.pop() - target, list[Tensor]()
    for w, read in zip(reversed(weights), reversed(inputs), strict=True):
        found.insert(0, error.T @ read)
        error = error @ w
    return found


def first_weights(stages: int) -> list[Weights]:
    """Of each stage the versions so far."""
    return [[weight.detach()] for weight in linear(stages).parameters()]


def one_each(delays: list[int], count: int) -> list[Weights]:
    """One device a stage: w(t+1) = w(t) - rate * gradient of f(w_1(t - delay_1), ..., w_n(t - delay_n)), at first of w(0).

    Stashing: the delays are n-1, ..., 1, 0. Vertical sync: n-1 everywhere.
    """
    w = first_weights(len(delays))
    for t, (x, target) in enumerate(minibatches(count)):
        old = [versions[max(0, t - delay)] for versions, delay in zip(w, delays, strict=True)]
        for versions, gradient in zip(w, gradients(old, x, target), strict=True):
            versions.append(versions[t] - RATE * gradient)
    return w


def one_batch_behind(stages: int, batch: int, batches: int) -> list[Weights]:
    """2BW: W(b+1) = W(b) - rate * mean gradient of f(W(b-1)) over the microbatches of batch b."""
    w, stream = first_weights(stages), minibatches(batch * batches)
    for b in range(batches):
        old = [versions[max(0, b - 1)] for versions in w]
        found = [gradients(old, *part) for part in stream[batch * b : batch * (b + 1)]]
        for versions, of_parts in zip(w, zip(*found, strict=True), strict=True):
            versions.append(versions[b] - RATE * torch.stack(of_parts).mean(0))
    return w


def two_replicas_and_one(rounds: int) -> list[Weights]:
    """2-1, stashing: w_0(j+1) = w_0(j) - rate * mean over t = 2j, 2j+1 of the gradients at w_0(j-1), w_1(t); w_1 as ever."""
    (w0, w1), stream = first_weights(2), minibatches(2 * rounds)
    for j in range(rounds):
        first = []
        for t in (2 * j, 2 * j + 1):
            of_stages = gradients([w0[max(0, j - 1)], w1[t]], *stream[t])
            first.append(of_stages[0])
            w1.append(w1[t] - RATE * of_stages[1])
        w0.append(w0[j] - RATE * (first[0] + first[1]) / 2)
    return [w0, w1]
