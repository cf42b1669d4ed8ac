"""The simulator walks programs to the times that `core/timing.py` finds for their schedule; the papers' bubbles hold in it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn
from torch.nn import functional as F

import pdcompiler
from pdcompiler import Pipeline, Schedule, traces
from pdcompiler.backends.simulator import Walked, simulate
from pdcompiler.core.schedule import Action
from pdcompiler.core.timing import timing
from pdcompiler.given_schedule import ONE_STAGE_A_RANK, SEVERAL, read_schedule
from pdcompiler.passes.schedules.named import one_f_one_b
from pdcompiler.testing import any_schedules
from tests.cases.against_loop import drawn, seeded
from tests.cases.every_cut import TracedOnce

LOSS = 8
"""Bytes of the loss, whose messages are not a schedule's."""


@dataclass
class Given:
    """Prices of stages by number, and of a message between neighbouring stages."""

    forward: Sequence[float]
    backward: Sequence[float]
    weight: Sequence[float]
    split: frozenset[tuple[int, int]] = frozenset()
    transfer: float = 0.0
    overlap: bool = True
    window: Mapping[str, int] | None = None  # type: ignore[assignment]

    def compute(self, rank: int, node: fx.Node) -> float:
        if node.op != "call_module":
            return 0.0
        stage, microbatch, phase = node.meta["stage"], node.meta["microbatch"], node.meta["phase"]
        if phase == "B" and (stage, microbatch) in self.split:
            return self.backward[stage] - self.weight[stage]
        return {"F": self.forward, "B": self.backward, "W": self.weight}[phase][stage]

    def message(self, sender: int, receiver: int, nbytes: int) -> tuple[float, float]:
        return 0.0, self.transfer * (nbytes > LOSS)

    def port(self, sender: int, receiver: int) -> int:
        return 0

    def reduce(self, ranks: Sequence[int], nbytes: int) -> float:
        return 0.0


@cache
def model(stages: int) -> nn.Sequential:
    """Whose stages all have a backward in two parts, the first too: its input wants no gradient, its first layer makes one."""
    return seeded(lambda: nn.Sequential(*[nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)) for _ in range(stages)]).double())


@cache
def traced(stages: int) -> TracedOnce:
    """Once for each model."""
    return TracedOnce()



def compiled(schedule: Schedule) -> Pipeline:
    stages = schedule.stages
    with mock.patch.object(traces, "trace_model", traced(stages)):
        return pdcompiler.compile(
            model(stages), len(schedule.ranks), schedule=schedule, partition=[str(s) for s in range(1, stages)] or None,
            loss_fn=F.mse_loss, example_args=(drawn(schedule.microbatches, 3),), example_target=drawn(schedule.microbatches, 3),
        )  # fmt: skip


def walked(pipe: Pipeline, prices: Given) -> Walked:
    assert pipe.runner.latest is not None
    prices.window = pipe.runner.latest.window
    return simulate(pipe.runner.latest.ranks, prices)  # type: ignore[arg-type]


def times(found: Walked) -> dict[Action, tuple[float, float]]:
    """Of each action of the schedule, when it began and ended."""
    events = [event for events in found.events for event in events if event.kind in ("F", "B", "W")]
    return {Action(e.kind, e.stage, e.microbatch): (e.start, e.end) for e in events}  # type: ignore[arg-type]


SECONDS = st.integers(1, 6).map(float)


@st.composite
def priced(draw: st.DrawFn) -> tuple[Schedule, Given]:
    schedule = draw(any_schedules(3, 3))
    forward, weight, rest = (draw(st.lists(SECONDS, min_size=3, max_size=3)) for _ in range(3))
    backward = [w + r for w, r in zip(weight, rest, strict=True)]
    overlap = draw(st.booleans())
    transfer = 0.0 if overlap else draw(st.sampled_from([0.0, 0.5, 2.0]))  # with overlap ports are shared, see below
    return schedule, Given(forward, backward, weight, transfer=transfer, overlap=overlap)


def that_falls_apart(pipe: Pipeline, schedule: Schedule) -> Schedule:
    """The schedule without a W for stages whose backward runs as a whole (the first: nobody waits for its inputs' gradients)."""
    calls = {node.target for rank in pipe.ranks for node in rank.graph.nodes if node.op == "call_module"}
    whole = [a for a in schedule if a.phase == "W" and f"stage{a.stage}_backward_input" not in calls]
    return schedule.without(whole)


@settings(max_examples=12)
@given(priced())
def test_programs_run_when_their_schedule_says(drawn: tuple[Schedule, Given]) -> None:
    schedule, prices = drawn
    pipe = compiled(schedule)
    schedule = that_falls_apart(pipe, schedule)
    prices.split = schedule.split
    expected = timing(
        schedule, forward=prices.forward, backward=prices.backward, weight=prices.weight, overlap=prices.overlap,
        forward_transfer=[prices.transfer] * 2, backward_transfer=[prices.transfer] * 2,
    )  # fmt: skip
    assert times(walked(pipe, prices)) == {action: (expected.starts[action], end) for action, end in expected.ends.items()}


ASSUMED = {"zb-h1": lambda p: p, "zb-h2": lambda p: 2 * p - 1, "zb-v": lambda p: 2 * p, "dualpipe-v": lambda p: 2 * p}
"""From how many microbatches on a paper's formula holds, for so many ranks; of interleaved for multiples, else for any."""


def sizes() -> list[Any]:
    """Schedules, ranks and microbatches: one of each in every run, all of the issue's in `make test-all`."""
    found = []
    for name, ranks, microbatches in itertools.product((*ONE_STAGE_A_RANK, *SEVERAL), range(2, 9), range(1, 17)):
        if microbatches >= ASSUMED.get(name, lambda _: 1)(ranks) and (name != "interleaved" or microbatches % ranks == 0):
            marks = () if (ranks, microbatches) == (2, 4) else pytest.mark.full
            found.append(pytest.param(name, ranks, microbatches, marks=marks))
    return found


@pytest.mark.parametrize(("name", "ranks", "microbatches"), sizes())
def test_the_bubble_of_the_papers(name: str, ranks: int, microbatches: int) -> None:
    """At F = B = W = 1: (ranks - 1)(F + B + W) of each rank's time for gpipe, 1f1b and interleaved, (ranks - 1)(F + B - W) for
    zb-h1, (ranks - 1) F for those in a V, nothing between a rank's first and last action for zb-h2."""
    several = name in SEVERAL
    schedule = read_schedule(name, ((1,) * ranks * (1 + several), 1), microbatches, ranks)
    ones = [1.0] * schedule.stages
    pipe = compiled(schedule)
    found = walked(pipe, Given(ones, [2.0] * schedule.stages, ones, that_falls_apart(pipe, schedule).split))
    spans = [[(e.start, e.end) for e in events if e.kind in ("F", "B", "W")] for events in found.events]
    busy = 3.0 * microbatches * (1 + several)
    assert [sum(end - start for start, end in own) for own in spans] == [busy] * ranks
    if name == "zb-h2":
        assert [own[-1][1] - own[0][0] for own in spans] == [busy] * ranks
    else:
        bubble = 3 * (ranks - 1) if name in ("gpipe", "1f1b", "interleaved") else ranks - 1
        assert max(own[-1][1] for own in spans) - busy == bubble


def test_messages_of_one_port_wait_for_each_other() -> None:
    """Rank 1 of three sends a value forwards and a gradient backwards at once: with messages as long as stages they'd be late."""
    pipe = compiled(one_f_one_b(3, 4))
    apart = walked(pipe, Given([1.0] * 3, [2.0] * 3, [1.0] * 3))
    shared = walked(pipe, Given([1.0] * 3, [2.0] * 3, [1.0] * 3, transfer=4.0))
    by_port: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for message in [m for m in shared.messages if m.nbytes > LOSS]:
        by_port.setdefault(("out", message.sender), []).append((message.start, message.end))
        by_port.setdefault(("in", message.receiver), []).append((message.start, message.end))
    for spans in by_port.values():
        spans.sort()
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert len(shared.messages) == len(apart.messages)
    assert max(message.end for message in shared.messages) > max(message.end for message in apart.messages)
