"""Who computes what in which order, as data without torch.

A schedule is, for each rank, an ordered list of actions: forward (F) or backward (B) of one microbatch on one stage. Its text
form parses back; with one stage per rank the stage need not be written:

    F0 F1 F2 B0 F3 B1 B2 B3
    F0 F1 B0 F2 B1 F3 B2 B3
    F0 B0 F1 B1 F2 B2 F3 B3

and with several, or with a stage on several ranks, an action reads F<microbatch>@<stage>; all actions of a microbatch on a stage
run on one rank. A backward may be in two parts: where a W stands too, B gives the gradients of the stage's inputs, for which an
earlier stage waits, and W those of its weights, for which only the end of the step does; without one, B gives both:

    F0 F1 B0 W0 B1 W1
    F0 B0 F1 B1 W0 W1

Not here: which schedules there are (`passes/schedules/`), nor what runs them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from pdcompiler.core.errors import CompileError, DeadlockError

Phase = Literal["F", "B", "W"]
PHASES: tuple[Phase, ...] = ("F", "B", "W")


@dataclass(frozen=True, order=True)
class Action:
    """One phase of one microbatch on one stage."""

    phase: Phase
    stage: int
    microbatch: int

    def needs(self, stages: int) -> tuple[Action, ...]:
        """The actions that must be done before this one, whatever the order on its rank."""
        if self.phase == "F":
            return (Action("F", self.stage - 1, self.microbatch),) if self.stage else ()
        if self.phase == "W":
            return (Action("B", self.stage, self.microbatch),)
        own = Action("F", self.stage, self.microbatch)
        return (own, Action("B", self.stage + 1, self.microbatch)) if self.stage < stages - 1 else (own,)


    @property
    def reader(self) -> Action | None:
        """The action of another stage that needs what this one gives, None where there is none; the last stage's forward has one
        by name only."""
        if self.phase == "W" or (self.phase == "B" and not self.stage):
            return None
        return Action(self.phase, self.stage + (1 if self.phase == "F" else -1), self.microbatch)


@dataclass(frozen=True)
class Schedule:
    """For each rank its actions in order. `name` is for people only and does not count in comparisons."""

    ranks: tuple[tuple[Action, ...], ...]
    name: str = "custom"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schedule) and self.ranks == other.ranks

    def __hash__(self) -> int:
        return hash(self.ranks)

    def __iter__(self) -> Iterator[Action]:
        return (action for actions in self.ranks for action in actions)

    @cached_property
    def stages(self) -> int:
        """How many stages it is for."""
        return 1 + max(action.stage for action in self)

    @cached_property
    def microbatches(self) -> int:
        """How many microbatches it is for."""
        return 1 + max(action.microbatch for action in self)

    @cached_property
    def split(self) -> frozenset[tuple[int, int]]:
        """The stages and microbatches whose backward is in two parts."""
        return frozenset((action.stage, action.microbatch) for action in self if action.phase == "W")

    @cached_property
    def replicas(self) -> dict[int, tuple[int, ...]]:
        """The ranks that run each stage, by the first microbatch that each of them runs."""
        first: dict[int, dict[int, int]] = {}
        for rank, actions in enumerate(self.ranks):
            for action in actions:
                own = first.setdefault(action.stage, {})
                own[rank] = min(own.get(rank, action.microbatch), action.microbatch)
        return {stage: tuple(sorted(first[stage], key=first[stage].__getitem__)) for stage in sorted(first)}

    def without(self, drop: Iterable[Action]) -> Schedule:
        """The same order without some actions: microbatches without rows, backwards of weight 0, all of an evaluation's."""
        gone = frozenset(drop)
        return Schedule(tuple(tuple(a for a in actions if a not in gone) for actions in self.ranks), self.name)

    def in_flight(self, rank: int) -> int:
        """The largest number of forwards on a rank whose backward has not run."""
        most = now = 0
        for action in self.ranks[rank]:
            now += {"F": 1, "B": -1, "W": 0}[action.phase]
            most = max(most, now)
        return most

    def order(self) -> list[tuple[int, Action]]:
        """One total order of all actions with their ranks: as unit-time ranks would start them.

        Raises DeadlockError, naming what each rank waits for, where no order exists.
        """
        done: dict[Action, int] = {}
        order: list[tuple[int, int, Action]] = []
        position, clock = [0] * len(self.ranks), [0] * len(self.ranks)
        present, stages = frozenset(self), self.stages
        while len(done) < len(present):
            moved = False
            for rank, actions in enumerate(self.ranks):
                while position[rank] < len(actions):
                    action = actions[position[rank]]
                    needs = [need for need in action.needs(stages) if need in present]
                    if any(need not in done for need in needs):
                        break
                    start = max([clock[rank], *(done[need] for need in needs)])
                    done[action] = clock[rank] = start + 1
                    order.append((start, rank, action))
                    position[rank] += 1
                    moved = True
            if not moved:
                raise DeadlockError(self._stuck(position, done))
        return [(rank, action) for _, rank, action in sorted(order, key=lambda item: item[:2])]

    def _stuck(self, position: list[int], done: dict[Action, int]) -> str:
        lines = ["the schedule waits for itself:"]
        for rank, actions in enumerate(self.ranks):
            if position[rank] < len(actions):
                action = actions[position[rank]]
                missing = [show(need, True) for need in action.needs(self.stages) if need not in done]
                lines.append(f"  rank {rank}, position {position[rank]}: {show(action, True)} waits for {', '.join(missing)}")
        return "\n".join(lines)

    def check(self) -> Schedule:
        """Raise CompileError unless every stage runs F, B and perhaps W of every microbatch once, in this order on one rank."""
        if not any(self.ranks):
            raise CompileError("the schedule is empty")
        places = self._places()
        for stage in range(self.stages):
            for microbatch in range(self.microbatches):
                for phase in PHASES[:2]:
                    if Action(phase, stage, microbatch) not in places:
                        raise CompileError(self._lacks(phase, stage, microbatch, places))
        self.order()
        return self

    def _places(self) -> dict[Action, tuple[int, int]]:
        """Rank and position of each action. Raises CompileError where one stands twice, or without what it needs of its stage."""
        places: dict[Action, tuple[int, int]] = {}
        present = frozenset(self)
        for rank, actions in enumerate(self.ranks):
            for position, action in enumerate(actions):
                at = f"rank {rank}, position {position}: {show(action, True)}"
                if action.phase not in PHASES or action.stage < 0 or action.microbatch < 0:
                    raise CompileError(f"{at} is no action; expected F, B or W, a microbatch from 0 and a stage from 0")
                if action in places:
                    where = places[action][0]
                    raise CompileError(f"{at} stands twice" + (f", on rank {where} too" if where != rank else ""))
                places[action] = rank, position
                before = Action("B" if action.phase == "W" else "F", action.stage, action.microbatch)
                what = "backward (B)" if action.phase == "W" else "forward"
                if before not in places:
                    raise CompileError(f"{at} " + (f"stands before its {what}" if before in present else f"has no {what}"))
                if places[before][0] != rank:
                    raise CompileError(f"{at}: its {what} is on rank {places[before][0]}, where what it saved is")
        return places

    def _lacks(self, phase: Phase, stage: int, microbatch: int, places: dict[Action, tuple[int, int]]) -> str:
        """What is missing, and where it was expected."""
        if phase == "B":
            rank, position = places[Action("F", stage, microbatch)]
            expected = f", expected on rank {rank} after position {position}, its forward"
        else:
            ranks = self.replicas.get(stage, ())
            expected = f", expected on rank {' or '.join(map(str, ranks))}" if ranks else ", which no rank runs"
        return f"the schedule lacks {phase}{microbatch} on stage {stage}{expected}"

    @staticmethod
    def parse(text: str, name: str = "custom") -> Schedule:
        """The inverse of `str`: a line per rank; empty lines and what follows a # are passed over."""
        lines = [line.split("#")[0].split() for line in text.splitlines()]
        ranks = [words for words in lines if words]
        return Schedule(tuple(tuple(parse_action(word, r) for word in words) for r, words in enumerate(ranks)), name)

    def __str__(self) -> str:
        plain = all(action.stage == rank for rank, actions in enumerate(self.ranks) for action in actions)
        return "\n".join(" ".join(show(action, not plain) for action in actions) for actions in self.ranks)


def show(action: Action, with_stage: bool) -> str:
    """An action as text."""
    return f"{action.phase}{action.microbatch}" + (f"@{action.stage}" if with_stage else "")


def parse_action(word: str, rank: int) -> Action:
    """An action from text; without "@stage" it is on the stage of the rank's number."""
    match = re.fullmatch(r"([FBW])(\d+)(?:@(\d+))?", word)
    if match is None:
        raise CompileError(f"schedule, rank {rank}: {word!r} is no action; expected F, B or W, a microbatch, perhaps @stage")
    phase = next(phase for phase in PHASES if phase == match[1])
    return Action(phase, int(match[3]) if match[3] else rank, int(match[2]))
