"""A case of asynchronous training run as a pipeline and by the oracle, and what both saw.

    seen = run(case)                    # what the compiled pipeline did
    assert_equal(case, seen)            # to the oracle: every version of the weights, losses, buffers, versions used
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

import pdcompiler
from pdcompiler.asynchronous_strategies import StageSkip
from pdcompiler.core.asynchronous import Asynchronous
from pdcompiler.oracle import AsynchronousResult
from pdcompiler.pipeline import Pipeline
from pdcompiler.testing import AsynchronousCase, assert_close_by_tensor, asynchronous_steps
from pdcompiler.weight_versions import pipedream_depths

EXACT = 1e-12


@dataclass
class Seen:
    """losses: by batch.   weights: of each stage after 0, 1, 2, ... updates.   forwards, backwards: by stage and minibatch, after
    how many updates their weights were the newest."""

    losses: dict[int, Tensor] = field(default_factory=dict)
    weights: dict[int, list[dict[str, Tensor]]] = field(default_factory=lambda: defaultdict(list))
    forwards: dict[tuple[int, int], int] = field(default_factory=dict)
    backwards: dict[tuple[int, int], int] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)


def case_of(replicas: tuple[int, ...], semantics: Any, optimizer: Any, count: int, **other: Any) -> AsynchronousCase:
    """Two blocks a stage, one of them with BatchNorm on the last stage; partial last rounds where the count asks for them."""
    kinds = tuple(("linear", "batchnorm" if stage == len(replicas) - 1 else "gated") for stage in range(len(replicas)))
    skips = (StageSkip(0, 2),) if len(replicas) > 2 else ()
    given = {"depths": pipedream_depths(replicas), "batch": None, "drains": (), "rows": 4}
    return AsynchronousCase(kinds, skips, replicas, semantics=semantics, optimizer=optimizer, count=count, **(given | other))


def compiled(case: AsynchronousCase, **options: Any) -> Pipeline:
    """The pipeline of a case; nothing is compiled yet."""
    name = "pipedream-2bw" if case.batch else "pipedream"
    given = {
        "partition": case.partition, "replicas": case.replicas, "loss_fn": nn.functional.mse_loss, "microbatches": case.batch,
        "schedule": Asynchronous(name, case.depths, vertical_sync=case.semantics == "vertical-sync"),
        "optimizer": case.options()["optimizer"],
    }  # fmt: skip
    return pdcompiler.compile(case.model(), case.world_size, **{**given, **options})


def batches(case: AsynchronousCase) -> Iterable[tuple[Tensor, Tensor, bool]]:
    """Inputs, target, and whether the pipeline is drained afterwards."""
    minibatches, size = case.minibatches(), case.batch or 1
    for stream in case.streams:
        for first in range(stream.start, stream.stop, size):
            parts = minibatches[first : first + size]
            inputs, targets = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
            yield inputs, targets, first + size >= stream.stop


def run(case: AsynchronousCase, pipe: Pipeline | None = None) -> Seen:
    """Feed all batches, with the drains."""
    pipe, seen, start = pipe or compiled(case), Seen(), 0
    stream: Any = pipe.stream
    stream.observe = lambda node, arguments: _note(seen, stream, start + stream.number, node, arguments)
    for place, (inputs, target, drains) in enumerate(batches(case)):
        if not place:
            pipe.prepare(inputs, target=target)
            _follow(seen, pipe)
        finished = [pipe.step(inputs, target=target), *(pipe.drain() if drains else [])]
        seen.losses |= {found.index: found.loss for found in finished if found is not None}
        start = (place + 1) * (case.batch or 1) if drains else start
    seen.buffers = {name: value.clone() for name, value in pipe.named_buffers()}
    return seen


def _note(seen: Seen, stream: Any, tick: int, node: fx.Node, arguments: Any) -> None:
    if node.op != "call_module":
        return
    owner: Any = node.graph.owning_module
    function = owner.get_submodule(str(node.target))
    names = [n.target for n in function.graph.nodes if n.op == "placeholder"]
    if "weights" in names:
        found = seen.forwards if node.meta["phase"] == "F" else seen.backwards
        version = stream.memory.version(node.meta["stage"], arguments[names.index("weights")])
        found[node.meta["stage"], tick - node.meta["microbatch"]] = version


def _follow(seen: Seen, pipe: Pipeline) -> None:
    """Of every stage that this process steps: its weights after each step, those before it first."""
    optimizer: Any = pipe.optimizer
    for stage, own in optimizer.of_stage.items():
        names = [name for name in pipe.partition.stages[stage].parameters]

        def record(*_: Any, stage: int = stage, names: list[str] = names) -> None:
            held = dict(pipe.named_parameters())
            seen.weights[stage].append({name: held[name].detach().clone() for name in names})

        record()
        own.register_step_post_hook(record)


def oracle(case: AsynchronousCase, **options: Any) -> AsynchronousResult:
    """What asynchronous training computes on the case."""
    model = case.model()
    return asynchronous_steps(
        list(model.stages), case.minibatches(), model=model, loss_fn=nn.functional.mse_loss, **{**case.options(), **options}
    )


def assert_equal(case: AsynchronousCase, seen: Seen, same: Callable[[Any, Any, str], None] | None = None) -> None:
    """same: compares two tensors; None: within 1e-12 of the largest element."""
    expected = oracle(case)
    close = same or (lambda a, b, what: assert_close_by_tensor(a, b, EXACT, what))
    for stage, versions in seen.weights.items():
        for version, (actual, weights) in enumerate(zip(versions, expected.weights[stage], strict=True)):
            assert actual.keys() == weights.keys()
            for name, value in weights.items():
                close(actual[name], value, f"{name} after update {version}")
    for name, value in seen.buffers.items():
        close(value, expected.buffers[name], name)
    losses = losses_of_batches(case, expected)
    assert seen.losses.keys() == set(range(len(losses)))
    for index, loss in enumerate(losses):
        close(seen.losses[index], loss, f"loss of batch {index}")
    for (stage, t), version in [*seen.forwards.items(), *seen.backwards.items()]:
        assert version == expected.forward_versions[stage][t], (stage, t)


def losses_of_batches(case: AsynchronousCase, expected: AsynchronousResult) -> list[Tensor]:
    """With 2bw the mean of a batch's microbatches by their rows."""
    if not case.batch:
        return expected.losses
    rows, found = case.rows_of_each(), []
    for first in range(0, case.count, case.batch):
        part = slice(first, first + case.batch)
        shares = torch.tensor(rows[part], dtype=torch.float64) / sum(rows[part])
        found.append((torch.stack(expected.losses[part]) * shares).sum())
    return found
