"""A schedule with faults in it is refused by its place before anything runs, or it is harmless: exact, and free of deadlock.

Nothing is refused for nothing either: what is refused is no schedule by the plain words of `is_sound`. The model has what orders
could spoil: a skip over two stages, a weight tied over the first and the last, microbatches of unequal rows.
"""

from __future__ import annotations

import graphlib
import itertools
import re
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import pdcompiler
from pdcompiler import CompileError, Pipeline, Schedule, compiler, traces
from pdcompiler.core import ops
from pdcompiler.core.errors import DeadlockError, PdcompilerError
from pdcompiler.core.ir import Program, RankProgram
from pdcompiler.core.schedule import Action
from pdcompiler.given_schedule import read_schedule
from pdcompiler.passes.program.split_ranks import split_ranks
from pdcompiler.testing import mutated_schedules
from tests import rendezvous
from tests.cases.against_loop import drawn, seeded
from tests.cases.every_cut import TracedOnce

STAGES = ("a", "b", "c", "d")
ROWS = 5
PLACED = re.compile(
    r"rank \d+, position \d+: |the schedule lacks [FB]\d+ on stage \d+, (expected on rank \d+|which no rank runs)"
    r"|the schedule is for \d+ (microbatches|ranks and \d+ stages), "
    r"|the schedule has \d+ stages on \d+ ranks, the partition has 4"
)
"""What a refusal says: where, or what is missing."""


class Skip(nn.Module):
    """See the module's docstring; a stage for each letter."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(3, 3) for _ in STAGES)
        self.d.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        early = torch.tanh(self.a(x))
        result: Tensor = self.d(torch.tanh(self.c(torch.tanh(self.b(early)))) * early)
        return result


@pytest.fixture(scope="module")
def compiled() -> Any:
    """Of a schedule and a number of microbatches a pipeline; all share one model and its traces."""
    model, once = seeded(Skip), TracedOnce()

    def compile(schedule: Schedule, microbatches: int) -> Pipeline:
        return pdcompiler.compile(
            model, len(schedule.ranks), schedule=schedule, microbatches=microbatches, loss_fn=F.mse_loss, partition=STAGES[1:]
        )

    with mock.patch.object(traces, "trace_model", once):
        yield compile


Compiled = Callable[[Schedule, int], Pipeline]


def runs(compiled: Compiled, schedule: Schedule, microbatches: int) -> bool:
    """Whether it is accepted. Raises AssertionError unless it is refused with a place, or runs and is exact."""
    try:
        pipe = compiled(schedule, microbatches)
    except (CompileError, DeadlockError) as error:
        assert PLACED.search(str(error)), f"a refusal without a place: {error}"
        return False
    pipe.verify(drawn(ROWS, 3), target=drawn(ROWS, 3, seed=1))
    assert pipe.runner.latest is not None
    assert rendezvous.finish(pipe.runner.latest.ranks) >= len(set(schedule.replicas.values())) - 1
    return True


def is_sound(schedule: Schedule, microbatches: int) -> bool:
    """Every stage on one rank; F and B once, W once or never, of every microbatch on every stage; an order of all of them."""
    count = Counter(schedule)
    pairs = [(stage, m) for stage in range(len(STAGES)) for m in range(microbatches)]
    whole = {Action(phase, *pair) for pair in pairs for phase in ("F", "B")}  # type: ignore[arg-type]
    weights = {Action("W", *pair) for pair in pairs}
    if max(count.values()) > 1 or not whole <= count.keys() <= whole | weights:
        return False
    if any(len(ranks) > 1 for ranks in schedule.replicas.values()):
        return False
    before: dict[Action, set[Action]] = {action: set() for action in schedule}
    for actions in schedule.ranks:
        for one, other in itertools.pairwise(actions):
            before[other].add(one)
    for stage, m in pairs:
        before[Action("B", stage, m)].add(Action("F", stage, m))
        if stage:
            before[Action("F", stage, m)].add(Action("F", stage - 1, m))
            before[Action("B", stage - 1, m)].add(Action("B", stage, m))
        if Action("W", stage, m) in before:
            before[Action("W", stage, m)].add(Action("B", stage, m))
    try:
        graphlib.TopologicalSorter(before).prepare()
    except graphlib.CycleError:
        return False
    return True


@st.composite
def mutated(draw: st.DrawFn) -> tuple[Schedule, int]:
    microbatches = draw(st.sampled_from((2, 3, 4, 1)))
    return draw(mutated_schedules(len(STAGES), microbatches)), microbatches


def check(compiled: Compiled, schedule: Schedule, microbatches: int) -> None:
    assert runs(compiled, schedule, microbatches) == is_sound(schedule, microbatches), str(schedule)


def law(compiled: Compiled, examples: int) -> Counter[bool]:
    """So many mutated schedules; how many are sound, and how many are not."""
    found: Counter[bool] = Counter()

    @settings(max_examples=examples, suppress_health_check=[HealthCheck.too_slow])
    @given(mutated())
    def each(schedule: tuple[Schedule, int]) -> None:
        found[is_sound(*schedule)] += 1
        check(compiled, *schedule)

    each()
    return found


def test_mutated_schedules_are_refused_or_harmless(compiled: Compiled) -> None:
    found = law(compiled, 100)
    assert found[True] >= 10 and found[False] >= 40, found


@pytest.mark.full
def test_2000_mutated_schedules_are_refused_or_harmless(compiled: Compiled) -> None:
    found = law(compiled, 2000)
    assert found[True] >= 200 and found[False] >= 800, found


BROKEN = {
    "dropped": ("F0@0 F1@0 B0@0\nF0@1 F1@1 B0@1 B1@1\nF0@2 F1@2 B0@2 B1@2\nF0@3 F1@3 B0@3 B1@3", 2),
    "doubled": ("F0@0 B0@0 B0@0\nF0@1 B0@1\nF0@2 B0@2\nF0@3 B0@3", 1),
    "backwards crossed": ("F0@0 F1@0 B0@0 B1@0\nF0@1 F1@1 B1@1 B0@1\nF0@2 F1@2 B0@2 B1@2\nF0@3 B1@3 F1@3 B0@3", 2),
}


@pytest.mark.parametrize("case", BROKEN)
def test_the_law_fails_where_a_schedule_is_not_checked(case: str, compiled: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    text, microbatches = BROKEN[case]
    schedule = Schedule.parse(text)
    check(compiled, schedule, microbatches)
    monkeypatch.setattr(Schedule, "check", lambda self: self)
    with pytest.raises((AssertionError, PdcompilerError, KeyError)):
        check(compiled, schedule, microbatches)


def test_the_law_fails_where_sound_schedules_are_refused(compiled: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(schedule: Schedule) -> Schedule:
        raise CompileError("rank 0, position 0: F0@0 is not liked")

    schedule = Schedule.parse("F0@0 F0@1 F0@2 F0@3 B0@3 B0@2 B0@1 B0@0")
    check(compiled, schedule, 1)
    monkeypatch.setattr(Schedule, "check", refuse)
    with pytest.raises(AssertionError, match=r"^F0@0 F0@1 "):
        check(compiled, schedule, 1)


def test_the_law_fails_where_programs_wait_without_buffers(compiled: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    """Receives right before their readers: exact where sends are buffered, and two ranks that send to each other if not."""

    def late(program: Program) -> tuple[RankProgram, ...]:
        ranks = split_ranks(program)
        for graph in [rank.graph for rank in ranks]:
            for receive in [node for node in graph.nodes if node.target is ops.recv]:
                min(receive.users, key=list(graph.nodes).index).prepend(receive)
        return ranks

    schedule = read_schedule("1f1b", ((1,) * len(STAGES), 1), 4)
    check(compiled, schedule, 4)
    monkeypatch.setattr(compiler, "split_ranks", late)
    monkeypatch.setattr(compiler, "overlap_transfers", lambda program, window: program)
    with pytest.raises(DeadlockError):
        check(compiled, schedule, 4)
    monkeypatch.setattr(compiler, "verify_ranks", lambda ranks: None)
    with pytest.raises(rendezvous.Stuck):
        check(compiled, schedule, 4)
