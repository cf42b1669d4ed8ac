"""The proof that the ranks' programs cannot wait for ever, and that what meets is alike.

The k-th send on a channel meets the k-th receive with equal shape and type, and the ranks, run one operation at a time under the
weakest model (a send waits for its receive), reach their end. A failure is our fault, not the user's. Not here: what a program
may contain otherwise (`verify.py`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from pdcompiler.core import ops
from pdcompiler.core.errors import DeadlockError, VerifyError
from pdcompiler.core.ir import RankProgram, ValueType, name_of, type_of
from pdcompiler.core.printer import show_node

EFFECTS = (ops.send, ops.recv, ops.start_recv, ops.finish_recv)
REDUCTIONS = (ops.all_reduce, ops.start_all_reduce)


@dataclass
class _Rank:
    """Where one rank stands while its program is walked."""

    program: RankProgram
    nodes: list[fx.Node]
    at: int = 0


def verify_ranks(ranks: Sequence[RankProgram]) -> None:
    """Messages pair up, and every rank reaches its end even where each send waits for its receive."""
    for program in ranks:
        program.graph.lint()
    _check_pairs(ranks)
    _check_reductions(ranks)
    waits = (*EFFECTS, *REDUCTIONS, ops.finish_all_reduce)
    walking = [_Rank(program, [n for n in program.graph.nodes if n.target in waits]) for program in ranks]
    sent: dict[str, int] = defaultdict(int)
    posted: dict[Any, int] = defaultdict(int)
    numbers = _numbers(ranks)
    while any(rank.at < len(rank.nodes) for rank in walking):
        if not any([_advance(rank, sent, posted, numbers) for rank in walking]):
            raise DeadlockError(_cycle(walking, posted, numbers))


def _numbers(ranks: Sequence[RankProgram]) -> dict[fx.Node, int]:
    """Which receive of its channel (or reduction over its ranks) each start is, and for a finish, the start's."""
    numbers: dict[fx.Node, int] = {}
    for program in ranks:
        counts: dict[Any, int] = defaultdict(int)
        for node in program.graph.nodes:
            if node.target in (ops.recv, ops.start_recv, ops.send):
                channel = str(node.kwargs["channel"])
                numbers[node] = counts[channel + node.target.__name__[:1]]
                counts[channel + node.target.__name__[:1]] += 1
            elif node.target in REDUCTIONS:
                numbers[node] = counts[node.kwargs["ranks"]]
                counts[node.kwargs["ranks"]] += 1
            elif node.target is ops.finish_all_reduce or (node.target is ops.finish_recv and not _is_older(node)):
                numbers[node] = numbers[node.args[0]]
    return numbers


def _is_older(node: fx.Node) -> bool:
    """Whether it finishes a receive of an earlier program, in which the send stands too."""
    started: Any = node.args[0] if node.target is ops.finish_recv else node
    return started.target is ops.restore


def _advance(rank: _Rank, sent: dict[str, int], posted: dict[Any, int], numbers: dict[fx.Node, int]) -> bool:
    """Walk a rank until it has to wait; whether it moved. A receive or reduction that it stands at counts as posted."""
    start = rank.at
    moved = False
    while rank.at < len(rank.nodes):
        node = rank.nodes[rank.at]
        if node.target is ops.send:
            channel = str(node.kwargs["channel"])
            if posted[channel] <= numbers[node]:
                break
            sent[channel] += 1
        elif node.target is ops.start_recv:
            posted[str(node.kwargs["channel"])] += 1
        elif node.target in REDUCTIONS or node.target is ops.finish_all_reduce:
            over, own = _ranks_of(node), rank.program.rank
            if node.target in REDUCTIONS and posted[over, own] <= numbers[node]:
                posted[over, own] += 1
                moved = True
            if node.target is not ops.start_all_reduce and _missing(node, posted, numbers):
                break
        elif not _is_older(node):
            begun: Any = node if node.target is ops.recv else node.args[0]
            channel = str(begun.kwargs["channel"])
            if node.target is ops.recv and posted[channel] <= numbers[node]:
                posted[channel] += 1
                moved = True
            if sent[channel] <= numbers[node]:
                break
        rank.at += 1
    return moved or rank.at > start


def _ranks_of(reduction: fx.Node) -> tuple[int, ...]:
    """Over which ranks a reduction is, or the one that is finished."""
    begun: Any = reduction.args[0] if reduction.target is ops.finish_all_reduce else reduction
    return tuple(begun.kwargs["ranks"])


def _missing(reduction: fx.Node, posted: dict[Any, int], numbers: dict[fx.Node, int]) -> list[int]:
    """The ranks that have not yet given their part."""
    over = _ranks_of(reduction)
    return [rank for rank in over if posted[over, rank] <= numbers[reduction]]


def _check_pairs(ranks: Sequence[RankProgram]) -> None:
    sends: dict[str, list[fx.Node]] = defaultdict(list)
    receives: dict[str, list[fx.Node]] = defaultdict(list)
    for program in ranks:
        for node in program.graph.nodes:
            if node.target is ops.send:
                sends[str(node.kwargs["channel"])].append(node)
            elif node.target in (ops.recv, ops.start_recv):
                receives[str(node.kwargs["channel"])].append(node)
    for channel in sends.keys() | receives.keys():
        if len(sends[channel]) != len(receives[channel]):
            raise VerifyError(f"channel {channel}: {len(sends[channel])} sends meet {len(receives[channel])} receives")
        for k, (send, receive) in enumerate(zip(sends[channel], receives[channel], strict=True)):
            expected, value = (receive.kwargs["shape"], receive.kwargs["dtype"]), type_of(send)
            same = isinstance(value, ValueType) and (value.shape, value.dtype) == expected
            if not same or any(send.meta[key] != receive.meta[key] for key in ("stage", "microbatch", "phase")):
                raise VerifyError(f"channel {channel}, message {k}: {show_node(send)} meets {show_node(receive)}")


def _check_reductions(ranks: Sequence[RankProgram]) -> None:
    """The k-th reduction over the same ranks is of the same values on each of them."""
    found: dict[Any, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for program in ranks:
        for node in program.graph.nodes:
            if node.target in REDUCTIONS:
                values: Any = node.args[0]
                what = ", ".join(f"{name_of(value)}: {type_of(value)}" for value in values)
                found[node.kwargs["ranks"]][program.rank].append(what)
    for group, on_rank in found.items():
        first = on_rank[group[0]]
        for rank in group:
            if on_rank[rank] != first:
                raise VerifyError(f"reductions over ranks {group}: {on_rank[rank]} on rank {rank}, {first} on rank {group[0]}")


def _cycle(walking: list[_Rank], posted: dict[Any, int], numbers: dict[fx.Node, int]) -> str:
    """The shortest cycle of ranks that wait for each other, by rank and node."""
    waits: dict[int, tuple[int, fx.Node]] = {}
    for index, rank in enumerate(walking):
        if rank.at < len(rank.nodes):
            node = rank.nodes[rank.at]
            begun: Any = node.args[0] if node.target is ops.finish_recv else node
            partner = begun.kwargs.get("to", begun.kwargs.get("frm"))
            if partner is None:
                partner = _missing(node, posted, numbers)[0]
            waits[index] = (int(partner), node)
    cycles = []
    for start in waits:
        path = [start]
        while (nearest := waits.get(path[-1], (None, None))[0]) is not None and nearest not in path:
            path.append(nearest)
        if nearest is not None:
            cycles.append(path[path.index(nearest) :])
    shortest = min(cycles, key=len) if cycles else list(waits)
    lines = [f"  rank {r} waits for rank {waits[r][0]} at {show_node(waits[r][1])}" for r in shortest if r in waits]
    return "\n".join(["the ranks' programs wait for each other:", *lines])
