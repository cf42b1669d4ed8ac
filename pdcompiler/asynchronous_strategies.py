"""Whole cases of asynchronous training for hypothesis: stages with skips, replicas, depths, drains, an optimizer.

A case prints as text that builds it again, and has what both sides of a test need: the stages and minibatches for the oracle,
the model and where its stages begin for the compiler.

    stages = list(model.stages)                            # model = case.model()
    expected = asynchronous_steps(stages, case.minibatches(), model=model, loss_fn=mse_loss, **case.options())
    pipe = pdcompiler.compile(model, case.world_size, partition=case.partition, loss_fn=mse_loss, ...)

Every stage has parameters, and nothing is tied: these are questions of the model, not of its schedule. No assertions are here.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from pdcompiler.core.ticks import pipedream_depths
from pdcompiler.plain import split_rows
from pdcompiler.random_model import LENGTH, WIDTH, Body, Kind
from pdcompiler.strategies import OFTEN
from pdcompiler.weight_versions import Semantics

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda weights: torch.optim.SGD(weights, lr=0.2),
    "momentum": lambda weights: torch.optim.SGD(weights, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adamw": lambda weights: torch.optim.AdamW(weights, lr=0.01),
}
KINDS: tuple[Kind, ...] = ("linear", "layernorm", "gated", "batchnorm", "running", "counter")


@dataclass(frozen=True)
class StageSkip:
    """What stage `source` returns is added to the input of stage `to`, at least two stages later."""

    source: int
    to: int


class SkippingStage(nn.Module):
    """One stage: `hidden, *carried` to the same for the next one. carried: what skips over a stage, by source."""

    def __init__(self, index: int, kinds: tuple[Kind, ...], skips: tuple[StageSkip, ...]) -> None:
        super().__init__()
        self.index = index
        self.blocks = nn.ModuleList(Body(kind) for kind in kinds)
        self.arriving = [skip for skip in skips if skip.source < index <= skip.to]
        self.leaving = sum(skip.source == index for skip in skips)

    def forward(self, hidden: Tensor, *carried: Tensor) -> Any:
        handed_on = []
        for skip, value in zip(self.arriving, carried, strict=True):
            if skip.to == self.index:
                hidden = hidden + value
            else:
                handed_on.append(value)
        for block in self.blocks:
            hidden = block(hidden, hidden)
        handed_on += [hidden] * self.leaving
        return (hidden, *handed_on) if handed_on else hidden


class StagedModel(nn.Module):
    """An ordinary model, the composition of its stages."""

    def __init__(self, stages: list[SkippingStage]) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)

    def forward(self, x: Tensor) -> Tensor:
        values: Any = (x,)
        for stage in self.stages:
            given = stage(*values)
            values = given if isinstance(given, tuple) else (given,)
        (outputs,) = values
        return outputs  # type: ignore[no-any-return]


@dataclass(frozen=True)
class AsynchronousCase:
    """kinds: of each stage's blocks.   batch: with 2bw, microbatches of an update.   count: of minibatches (2bw: microbatches).
    drains: after how many of them.   rows: of each minibatch; with 2bw of each batch, before it is cut into microbatches."""

    kinds: tuple[tuple[Kind, ...], ...]
    skips: tuple[StageSkip, ...]
    replicas: tuple[int, ...]
    depths: tuple[int, ...]
    semantics: Semantics
    batch: int | None
    count: int
    drains: tuple[int, ...]
    rows: int
    optimizer: Literal["sgd", "momentum", "adamw"]
    seed: int = 0

    @property
    def world_size(self) -> int:
        """Ranks."""
        return sum(self.replicas)

    @property
    def partition(self) -> list[str]:
        """Where stages 1, 2, ... begin, by module path."""
        return [f"stages.{index}" for index in range(1, len(self.kinds))]

    @property
    def streams(self) -> list[range]:
        """Minibatches between drains."""
        return [range(*ends) for ends in itertools.pairwise(sorted({0, *self.drains, self.count}))]

    def rows_of_each(self) -> list[int]:
        """Of a batch's microbatches, the first ones have more; a batch that a drain cuts short has only its first ones."""
        sizes = split_rows(self.rows, self.batch or 1)
        return [sizes[t % len(sizes)] for stream in self.streams for t in range(len(stream))]

    def model(self) -> StagedModel:
        """In float64; the global random state is left alone."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return StagedModel([SkippingStage(s, kinds, self.skips) for s, kinds in enumerate(self.kinds)]).double()

    def minibatches(self) -> list[tuple[Tensor, Tensor]]:
        """Inputs and target."""
        generator = torch.Generator().manual_seed(self.seed + 1)

        def drawn(rows: int) -> Tensor:
            return torch.randn(rows, LENGTH, WIDTH, generator=generator, dtype=torch.float64)

        return [(drawn(rows), drawn(rows)) for rows in self.rows_of_each()]

    def options(self) -> dict[str, Any]:
        """For `asynchronous_steps`."""
        return {
            "replicas": self.replicas, "depths": self.depths, "semantics": self.semantics, "batch": self.batch,
            "weights": self.rows_of_each() if self.batch else None, "drains": self.drains,
            "optimizer": OPTIMIZERS[self.optimizer],
        }  # fmt: skip


@st.composite
def asynchronous_cases(
    draw: st.DrawFn,
    semantics: tuple[Semantics, ...] = ("stash", "vertical-sync", "2bw"),
    most_stages: int = 5,
    most_replicas: int = 3,
    whole_batches: bool = False,
) -> AsynchronousCase:
    """Any case. whole_batches: with 2bw, drains and the end stand between batches only."""
    stages = draw(st.sampled_from((1, *range(2, most_stages + 1), *range(2, most_stages + 1))))
    replicas = tuple(draw(st.integers(1, most_replicas)) for _ in range(stages))
    depths = draw(_depths(replicas))
    chosen = draw(st.sampled_from(semantics))
    batch = max(depths[0], *replicas) + draw(st.integers(0, 2)) if chosen == "2bw" else None
    unit = batch if batch and whole_batches else 1
    most = max(1, 24 // unit)
    units = draw(st.integers(1, most) | st.integers(min(most, depths[0] // unit + 2), most))
    drains = draw(st.sets(st.integers(1, units - 1), min_size=1, max_size=2)) if units > 1 and draw(OFTEN) else set()
    first: st.SearchStrategy[Kind] = st.sampled_from(("linear", "gated"))
    return AsynchronousCase(
        kinds=tuple((draw(first), *draw(st.lists(st.sampled_from(KINDS), max_size=1))) for _ in range(stages)),
        skips=draw(_skips(stages)),
        replicas=replicas,
        depths=depths,
        semantics=chosen,
        batch=batch,
        count=units * unit,
        drains=tuple(drain * unit for drain in sorted(drains)),
        rows=(batch or 1) + draw(st.integers(0, 4)),
        optimizer=draw(st.sampled_from(("sgd", "momentum", "adamw"))),
        seed=draw(st.integers(0, 1000)),
    )


@st.composite
def _depths(draw: st.DrawFn, replicas: tuple[int, ...]) -> tuple[int, ...]:
    """PipeDream's, or deeper from some stage on back to the first."""
    usual = pipedream_depths(replicas)
    deeper = draw(st.sampled_from((None, None, *range(len(replicas) - 1))))
    depths: list[int] = [0]
    for stage in reversed(range(len(replicas) - 1)):
        count = replicas[stage]
        least = max(usual[stage], (depths[0] // count + 1) * count)
        depths.insert(0, least + (count * draw(st.integers(1, 2)) if stage == deeper else 0))
    return tuple(depths)


@st.composite
def _skips(draw: st.DrawFn, stages: int) -> tuple[StageSkip, ...]:
    possible = [StageSkip(source, to) for source in range(stages - 2) for to in range(source + 2, stages)]
    if not possible or not draw(OFTEN):
        return ()
    drawn = draw(st.lists(st.sampled_from(possible), min_size=1, max_size=2, unique=True))
    return tuple(sorted(drawn, key=lambda skip: (skip.source, skip.to)))
