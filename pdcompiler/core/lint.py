"""Everything that is wrong with a schedule file, by rank and cell; and what is worth knowing about its memory. No torch.

    0F0,0F1,0B0,0F1         rank 0, cell 3, 0F1: stands twice, first at rank 0, cell 1, 0F1
    1F0,1B0junk,1F1,1B1     rank 1, cell 1, 1B0junk: 'junk' stands after the action; torch reads 1B0 and says nothing
                            rank 0, cell 1, 0F1: microbatch 1 has no backward on stage 0

Ranks and cells count from 0. Not here: messages and deadlock (`lint_messages.py`), reading the cells (`schedule_csv.py`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from pdcompiler.core.finding import Finding, Key, Use, all_uses, first_uses, key_of
from pdcompiler.core.lint_messages import check_messages
from pdcompiler.core.schedule import Action
from pdcompiler.core.schedule_csv import OF_STAGES, Rows, schedule_of

MANY = 4
"""So many missing numbers are named; of more, the first."""


def lint(rows: Rows, ranks: int | None = None, stages: int | None = None, buffers: int | None = None) -> list[Finding]:
    """What is wrong, by rank and cell, then what is worth knowing.

    Args:
        rows: from `read_cells`.
        ranks, stages: how many there should be; with `stages`, each stage's rank is checked too.
        buffers: how many messages of a channel may wait for their receive, as an order; None: as many as are sent.
    """
    uses = first_uses(rows)
    computed = {key: use for key, use in uses.items() if isinstance(key, Action)}
    findings = [Finding(what, cell) for row in rows for cell in row for what in cell.wrong]
    if not computed:
        return [*findings, Finding("the file has no forwards and no backwards")]
    findings += _twice(rows, uses)
    findings += _order(computed)
    findings += _whole(computed, stages)
    findings += _ranks(rows, ranks)
    findings += _places(computed, len(rows) if ranks is None else ranks, stages)
    findings += _of_stages(rows, computed)
    findings += check_messages(rows, buffers)
    findings += _memory(rows, computed)
    return sorted(findings, key=_by_place)


def _by_place(finding: Finding) -> tuple[bool, bool, int, int]:
    cell = finding.cell
    if cell is not None:
        return not finding.is_error, False, cell.rank, cell.position
    return not finding.is_error, True, -1 if finding.rank is None else finding.rank, 0


def _twice(rows: Rows, uses: dict[Key, Use]) -> Iterator[Finding]:
    for use in all_uses(rows):
        first = uses[key_of(use.op)]
        if first != use and use.op.kind not in ("UNSHARD", "RESHARD"):
            same = "stands twice, first" if first.op == use.op else "is a second backward, the first is"
            yield Finding(f"{same} at {first.cell.place}", use.cell)


def _order(computed: dict[Action, Use]) -> Iterator[Finding]:
    """Of F, B and W of each microbatch on each stage."""
    has_backward = any(action.phase == "B" for action in computed)
    if not has_backward:
        yield Finding("there are no backwards: this is no schedule of a training step")
    for (phase, stage, microbatch), use in ((_parts(action), use) for action, use in computed.items()):
        own = {other: computed.get(Action(other, stage, microbatch)) for other in ("F", "B", "W")}
        before = own["F"] if phase == "B" else own["B"]
        if phase == "F":
            if own["B"] is None and has_backward:
                yield Finding(f"microbatch {microbatch} has no backward on stage {stage}", use.cell)
        elif before is None:
            what = "forward" if phase == "B" else "I, whose rest it is,"
            yield Finding(f"microbatch {microbatch} has no {what} on stage {stage}", use.cell)
        elif before.rank != use.rank:
            yield Finding(f"{before} is on rank {before.rank}, where what it saved is", use.cell)
        elif not before.is_before(use):
            yield Finding(f"stands before {before} of cell {before.cell.position}, which it needs", use.cell)
        if phase == "W" and before is not None and before.op.kind == "B":
            yield Finding(f"{before} is a whole backward: with a W it must be an I", use.cell)
        if use.op.kind == "I" and own["W"] is None:
            yield Finding(f"it has no W: the gradients of stage {stage}'s weights of microbatch {microbatch} are lost", use.cell)


def _parts(action: Action) -> tuple[str, int, int]:
    return action.phase, action.stage, action.microbatch


def _whole(computed: dict[Action, Use], stages: int | None) -> Iterator[Finding]:
    """Every stage runs every microbatch."""
    seen = {(action.stage, action.microbatch) for action in computed}
    has_stages, has_microbatches = {stage for stage, _ in seen}, {microbatch for _, microbatch in seen}
    count = max(has_stages) + 1 if stages is None else stages
    for missing in _missing(has_stages, count):
        yield Finding(f"no rank runs stage {missing}")
    for missing in _missing(has_microbatches, max(has_microbatches) + 1):
        yield Finding(f"no stage runs microbatch {missing}")
    for stage in sorted(has_stages):
        lacks = [m for m in sorted(has_microbatches) if (stage, m) not in seen]
        for missing in _named(lacks):
            yield Finding(f"stage {stage} has neither forward nor backward of microbatch {missing}")
    if stages is not None:
        for stage in sorted(stage for stage in has_stages if stage >= stages):
            first = next(use for action, use in computed.items() if action.stage == stage)
            yield Finding(f"there is a stage {stage}, the last should be {stages - 1}", first.cell)


def _missing(seen: set[int], count: int) -> Iterator[str]:
    lacking = count - sum(number < count for number in seen)
    names: list[int] = []
    number = 0
    while len(names) < min(lacking, MANY + 1):
        if number not in seen:
            names.append(number)
        number += 1
    yield from _named(names, lacking)


def _named(numbers: list[int], of: int | None = None) -> Iterator[str]:
    """Each, or of many the first."""
    count = len(numbers) if of is None else of
    if count <= MANY:
        yield from map(str, numbers)
    else:
        yield f"{numbers[0]}, nor {count - 1} more"


def _ranks(rows: Rows, ranks: int | None) -> Iterator[Finding]:
    if ranks is not None and len(rows) != ranks:
        yield Finding(f"the file has {len(rows)} ranks, a row each, expected {ranks}")
    for rank, row in enumerate(rows):
        if not any(op.action for cell in row for op in cell.ops):
            yield Finding("has nothing to compute", rank=rank)


def _places(computed: dict[Action, Use], ranks: int, stages: int | None) -> Iterator[Finding]:
    """Where each stage stands: on one rank, with `stages` one after the other, or there and back again."""
    on: dict[int, dict[int, Use]] = defaultdict(dict)
    for action, use in computed.items():
        on[action.stage].setdefault(use.rank, use)
    if stages is None or stages < ranks or stages % ranks:
        for stage, on_ranks in sorted(on.items()):
            if len(on_ranks) > 1:
                where = ", ".join(map(str, sorted(on_ranks)))
                yield Finding(f"stage {stage} runs on ranks {where}: replicas, which torch does not load", is_error=False)
        return
    around = {stage: stage % ranks for stage in range(stages)}
    back = {stage: ranks - 1 - at if stage // ranks % 2 else at for stage, at in around.items()}
    names = {id(around): f"stage i on rank i mod {ranks}", id(back): "stages forth and back over the ranks"}

    def wrong(wanted: dict[int, int]) -> list[tuple[int, Use]]:
        return [(s, use) for s, uses in sorted(on.items()) if s in wanted for rank, use in uses.items() if rank != wanted[s]]

    best = min((around, back), key=lambda wanted: len(wrong(wanted)))
    for stage, use in wrong(best):
        yield Finding(f"stage {stage} belongs on rank {best[stage]} ({names[id(best)]})", use.cell)


def _of_stages(rows: Rows, computed: dict[Action, Use]) -> Iterator[Finding]:
    """UNSHARD, RESHARD and REDUCE_GRAD."""
    last: dict[tuple[int, int], Use] = {}
    for action, use in computed.items():
        if (place := (action.stage, use.rank)) not in last or last[place].is_before(use):
            last[place] = use
    for use in all_uses(rows):
        if use.op.kind in OF_STAGES:
            if (of := last.get((use.op.stage, use.rank))) is None:
                yield Finding(f"stage {use.op.stage} does not run on this rank", use.cell)
            elif use.op.kind == "REDUCE_GRAD" and use.is_before(of):
                yield Finding(f"{of} of cell {of.cell.position} comes later: its gradients are left out", use.cell)


def _memory(rows: Rows, computed: dict[Action, Use]) -> Iterator[Finding]:
    """More in flight than a pipeline needs to be full: a stage, as many as there are stages from it on."""
    if not any(action.phase == "B" for action in computed):
        return
    schedule = schedule_of(rows)
    for rank, actions in enumerate(schedule.ranks):
        most, forwards = schedule.in_flight(rank), sum(action.phase == "F" for action in actions)
        enough = sum(schedule.stages - stage for stage in {action.stage for action in actions})
        if most > enough and (most == forwards or most > 2 * enough):
            what = f"what {most} of {forwards} forwards save is held at once, and grows with the number of microbatches"
            yield Finding(f"{what}; {enough} are enough to keep all ranks busy", rank=rank, is_error=False)
