"""What is wrong with the messages of a schedule file, and whether its ranks wait for each other for ever.

Where the file has no communication, a message is sent right after the cell that makes its value and received right before the
cell that needs it. Not here: the models of communication (`messages.py`), and what is wrong with computations (`lint.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pdcompiler.core.finding import Finding, Key, Use, first_uses, key_of
from pdcompiler.core.messages import Event, Wait, deadlock, least_buffers
from pdcompiler.core.schedule import Action
from pdcompiler.core.schedule_csv import MESSAGES, Cell, Op, Rows

Uses = Mapping[Key, Use]


def check_messages(rows: Rows, buffers: int | None) -> Iterator[Finding]:
    """buffers: of each channel, as an order; None: any number may be had."""
    uses = first_uses(rows)
    is_given = any(use.op.kind in MESSAGES for use in uses.values())
    if is_given:
        yield from (Finding(what, use.cell) for use in uses.values() if (what := _wrong_with(use, uses)))
    events = [[event for cell in row for event in _events(cell, uses, is_given)] for row in rows]
    if cycle := deadlock(events):
        yield _stuck("deadlock, however messages travel", cycle)
        return
    how = "one cell after the other" if is_given else "sends right after their actions, receives right before"
    if cycle := deadlock(events, in_order=True):
        tail = "" if is_given else "; pdcompiler and torch start receives in the order of the sends"
        yield _stuck(f"deadlock if a channel keeps the order of its messages ({how}){tail}", cycle, is_error=is_given)
    if cycle := deadlock(events, buffers or 0):
        model = f"with {_buffers(buffers)}" if buffers else "if a send waits for its receive (unbuffered)"
        enough = f"{_buffers(least_buffers(events))} would be enough"
        yield _stuck(f"deadlock {model} ({how}); {enough}", cycle, is_error=buffers is not None)


def _buffers(count: int) -> str:
    return f"{count} buffer{'' if count == 1 else 's'} a channel"


def _stuck(what: str, cycle: tuple[Wait, ...], is_error: bool = True) -> Finding:
    return Finding("\n".join([what, *(f"  {wait}" for wait in cycle)]), is_error=is_error)


def need_of(action: Action, uses: Uses) -> Action | None:
    """What an action needs of another stage, where it stands somewhere."""
    need = Action(action.phase, action.stage + (-1 if action.phase == "F" else 1), action.microbatch)
    return need if action.phase != "W" and need in uses else None


def message(maker: Action) -> tuple[Op, Op]:
    """The send and the receive of what an action gives."""
    reader = maker.reader
    assert reader is not None
    return (
        Op(maker.stage, f"SEND_{maker.phase}", maker.microbatch),
        Op(reader.stage, f"RECV_{maker.phase}", maker.microbatch),
    )


def maker_of(op: Op) -> Action:
    """Whose value a send or receive is about."""
    phase = "F" if op.kind.endswith("F") else "B"
    step = 0 if op.kind.startswith("SEND") else -1 if phase == "F" else 1
    return Action("F" if phase == "F" else "B", op.stage + step, op.microbatch)


# What is wrong with messages that stand in the file


def _wrong_with(use: Use, uses: Uses) -> str | None:
    if use.op.kind.startswith("SEND"):
        return _wrong_with_send(use, uses)
    if use.op.kind.startswith("RECV"):
        return _wrong_with_receive(use, uses)
    if use.op.action is None:
        return None
    need = need_of(use.op.action, uses)
    if need is not None and uses[need].rank != use.rank and not any(op in uses for op in message(need)):
        send, receive = message(need)
        return f"no message brings what {uses[need]} on rank {uses[need].rank} gives: there is neither {send} nor {receive}"
    return None


def _wrong_with_send(use: Use, uses: Uses) -> str | None:
    maker = maker_of(use.op)
    reader = maker.reader
    if reader is None or reader not in uses:
        return "no action needs what it sends"
    if (source := uses.get(maker)) is None or not source.is_before(use):
        return f"what it sends is not there: {_missing(source, use, maker)}"
    if uses[reader].rank == use.rank:
        return f"{uses[reader]}, which needs it, is on the same rank: there must be no message"
    _, receive = message(maker)
    return None if receive in uses else f"a send without its receive: there is no {receive}"


def _wrong_with_receive(use: Use, uses: Uses) -> str | None:
    maker = maker_of(use.op)
    reader = maker.reader if maker.stage >= 0 else None
    if reader is None or maker not in uses:
        return "no action makes what it receives"
    needs_it = uses.get(reader)
    if needs_it is None:
        return "no action needs what it receives"
    if not use.is_before(needs_it):
        where = "before it" if needs_it.rank == use.rank else f"on rank {needs_it.rank}"
        return f"{needs_it}, which needs it, stands {where}"
    send, _ = message(maker)
    return None if send in uses else f"a receive without its send: there is no {send}"


def _missing(source: Use | None, use: Use, maker: Action) -> str:
    if source is None:
        return f"stage {maker.stage} has no {'forward' if maker.phase == 'F' else 'backward'} of microbatch {maker.microbatch}"
    return f"{source} stands {'behind it' if source.rank == use.rank else f'on rank {source.rank}'}"


# What ranks do, one thing after the other


def _events(cell: Cell, uses: Uses, is_given: bool) -> Iterator[Event]:
    """Of a cell. What stands twice counts once, and what nobody gives is not waited for."""
    own = [use for use in (uses[key_of(op)] for op in cell.ops) if use.cell is cell]
    computed = [use.op.action for use in own if use.op.action is not None]
    needs = [(action, need_of(action, uses)) for action in computed]
    away = [need for _, need in needs if need is not None and uses[need].rank != cell.rank]
    if not is_given:
        yield from (Event(cell, "recv", need, uses[need].rank) for need in away)
    for action, need in needs:
        yield Event(cell, "compute", action, needs=() if need is None or need in away else (need,))
    if not is_given:
        for action in computed:
            reader = action.reader
            if reader is not None and reader in uses and uses[reader].rank != cell.rank:
                yield Event(cell, "send", action, uses[reader].rank)
    for use in own:
        if use.op.kind in MESSAGES:
            yield from _given(use, uses)


def _given(use: Use, uses: Uses) -> Iterator[Event]:
    """A send or receive, where the file has the other too."""
    maker = maker_of(use.op)
    if maker.stage >= 0 and maker.reader is not None:
        send, receive = message(maker)
        if send in uses and receive in uses and uses[send].rank != uses[receive].rank:
            is_send = use.op == send
            yield Event(use.cell, "send" if is_send else "recv", maker, uses[receive if is_send else send].rank)
