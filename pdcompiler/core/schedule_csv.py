"""Schedules as the CSV of torch.distributed.pipelining, and the cells of any schedule file with their places. No torch.

A row per rank, a cell per action: stage, action, microbatch. An empty cell is idle time and says nothing here.

    0F0,0F1,0B0,0B1           F      forward
    1F0,1I0,1F1,1I1,1W0,1W1   B      the whole backward
                              I, W   its two parts: the gradients of the stage's inputs, and of its weights
    (0F1;1B0)OVERLAP_F_B             two at once: here one after the other

With communication, cells such as 0SEND_F0, 1RECV_F0, 1SEND_B0, 0RECV_B0 stand between them, and what FSDP does with a stage:
0UNSHARD, 0RESHARD, 0REDUCE_GRAD. A Schedule has none of these, for the compiler places messages itself. What is wrong with a
cell stands in it. Not here: what is wrong with their order (`lint.py`).
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from pdcompiler.core.errors import CompileError
from pdcompiler.core.schedule import Action, Phase, Schedule, parse_action

PHASE_OF: dict[str, Phase] = {"F": "F", "B": "B", "I": "B", "W": "W"}
MESSAGES = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")
OF_STAGES = ("UNSHARD", "RESHARD", "REDUCE_GRAD")
KINDS = (*PHASE_OF, *MESSAGES, *OF_STAGES)
ONE = re.compile(r"(\d{1,9})([A-Z_]+)(\d{0,9})(.*)", re.DOTALL)
FUSED = re.compile(r"\(([^()]*)\)([A-Z_]*)(.*)", re.DOTALL)
OWN_WORD = re.compile(r"[FBW]\d")


@dataclass(frozen=True)
class Op:
    """What a cell, or a part of a fused one, says.   kind: of KINDS.   microbatch: -1 where it has none."""

    stage: int
    kind: str
    microbatch: int = -1

    @property
    def action(self) -> Action | None:
        """The same in a Schedule; None for what is no computation."""
        phase = PHASE_OF.get(self.kind)
        return None if phase is None else Action(phase, self.stage, self.microbatch)

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}" + (str(self.microbatch) if self.microbatch >= 0 else "")


@dataclass(frozen=True)
class Cell:
    """Where it stands (from 0), its text, what it says (nothing: idle, or not understood), and what is wrong with its text."""

    rank: int
    position: int
    text: str
    ops: tuple[Op, ...] = ()
    wrong: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        """For people."""
        return f"rank {self.rank}, cell {self.position}, {self.text}"


Rows: TypeAlias = tuple[tuple[Cell, ...], ...]
"""For each rank its cells, the idle ones too."""


def read_cells(text: str) -> Rows:
    """Of a CSV, or of the text form of a Schedule: which of them, most of the words tell."""
    text = text.removeprefix("\ufeff")
    lines = [line.split("#")[0].split() for line in text.splitlines()]
    own = sum(bool(OWN_WORD.match(word)) for line in lines for word in line)
    if 2 * own > sum(map(len, lines)):
        return _own_rows([line for line in lines if line])
    rows = list(csv.reader(io.StringIO(text, newline="")))
    while rows and not any(map(str.strip, rows[-1])):
        rows.pop()
    return tuple(tuple(_cell(rank, k, cell.strip()) for k, cell in enumerate(row)) for rank, row in enumerate(rows))


def _cell(rank: int, position: int, text: str) -> Cell:
    if not text:
        return Cell(rank, position, text)
    wrong: list[str] = []
    if not text.startswith("("):
        ops = [_op(text, wrong)]
    elif (match := FUSED.fullmatch(text)) is None:
        ops = [None]
        wrong.append("its brackets do not match; expected (0F1;1B0)OVERLAP_F_B")
    else:
        ops = [_op(part.strip(), wrong) for part in match[1].split(";")]
        if match[2] != "OVERLAP_F_B":
            wrong.append(f"the action after its brackets is {match[2]!r}, expected OVERLAP_F_B")
        if any(op is not None and op.action is None for op in ops):
            wrong.append("only F, B, I and W may stand in brackets")
            ops = [op for op in ops if op is not None and op.action is not None]
        wrong += _junk(match[3], f"({match[1]}){match[2]}")
    return Cell(rank, position, text, tuple(op for op in ops if op is not None), tuple(wrong))


def _op(text: str, wrong: list[str]) -> Op | None:
    match = ONE.fullmatch(text)
    if match is None:
        wrong.append(f"{text!r} is no action; expected a stage, an action and a microbatch: 0F0")
        return None
    stage, kind, microbatch, rest = match.groups()
    if kind not in KINDS:
        wrong.append(f"there is no action {kind!r}; expected one of {', '.join(KINDS)}")
        return None
    if kind in OF_STAGES:
        wrong += _junk(microbatch + rest, stage + kind)
        return Op(int(stage), kind)
    if not microbatch:
        wrong.append(f"{stage}{kind} lacks its microbatch")
        return None
    wrong += _junk(rest, f"{stage}{kind}{microbatch}")
    return Op(int(stage), kind, int(microbatch))


def _junk(rest: str, read: str) -> list[str]:
    return [f"{rest!r} stands after the action; torch reads {read} and says nothing"] if rest else []


def _own_rows(lines: Sequence[Sequence[str]]) -> Rows:
    """Of the text form; where a W stands, its B is an I."""
    read = [[_own_action(word, rank) for word in words] for rank, words in enumerate(lines)]
    split = frozenset((a.stage, a.microbatch) for row in read for a in row if a is not None and a.phase == "W")
    rows = []
    for rank, (words, row) in enumerate(zip(lines, read, strict=True)):
        wrong = "it is no action; expected F, B or W, a microbatch, perhaps @stage: F0@0"
        cells = enumerate(zip(words, row, strict=True))
        rows.append(
            tuple(
                Cell(rank, k, word, (_op_of(action, split),)) if action else Cell(rank, k, word, (), (wrong,))
                for k, (word, action) in cells
            )
        )
    return tuple(rows)


def _own_action(word: str, rank: int) -> Action | None:
    try:
        return parse_action(word, rank)
    except CompileError:
        return None


def _op_of(action: Action, split: frozenset[tuple[int, int]]) -> Op:
    is_part = action.phase == "B" and (action.stage, action.microbatch) in split
    return Op(action.stage, "I" if is_part else action.phase, action.microbatch)


def schedule_of(rows: Rows, name: str = "custom") -> Schedule:
    """What the cells compute, in order. They must be without errors (`lint`)."""
    ops = [[op for cell in row for op in cell.ops] for row in rows]
    return Schedule(tuple(tuple(op.action for op in row if op.action is not None) for row in ops), name)


def to_csv(schedule: Schedule, *, communication: bool = False) -> str:
    """What torch.distributed.pipelining loads: as "compute_only", or as "compute_comms".

    Communication stands where torch places it: a send right after the action that makes the value, and its receive at what the
    reading rank has begun by then, so that the receives of a channel are in the order of its sends.
    """
    split = schedule.split
    if communication:
        rows = _with_communication(schedule)
    else:
        rows = [[_op_of(action, split) for action in actions] for actions in schedule.ranks]
    return "".join(",".join(map(str, row)) + "\n" for row in rows)


def _with_communication(schedule: Schedule) -> list[list[Op]]:
    where = {action: rank for rank, actions in enumerate(schedule.ranks) for action in actions}
    rows: list[list[Op]] = [[] for _ in schedule.ranks]
    for rank, action in schedule.order():
        rows[rank].append(_op_of(action, schedule.split))
        reader = action.reader
        if reader is not None and (to := where.get(reader, rank)) != rank:
            rows[rank].append(Op(action.stage, f"SEND_{action.phase}", action.microbatch))
            rows[to].append(Op(reader.stage, f"RECV_{action.phase}", action.microbatch))
    return rows
