"""Two answers to whether ranks wait for ever, the compiler's proof and a plain walk, are the same for programs with nodes moved.

A node may stand anywhere between what it reads and what reads it; where messages of a channel no longer fit together, the proof
refuses it for that, and there is nothing to compare.
"""

from __future__ import annotations

import copy
import functools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx
from torch.nn import functional as F

import pdcompiler
from pdcompiler.core import ops
from pdcompiler.core.errors import DeadlockError, VerifyError
from pdcompiler.core.ir import RankProgram
from pdcompiler.core.verify_ranks import verify_ranks
from pdcompiler.passes.program.split_ranks import split_ranks
from tests import rendezvous
from tests.cases.against_loop import drawn, seeded
from tests.laws.test_mutated_schedules import STAGES, Skip

SCHEDULES = ("1f1b", "zb-v")
MOVED = (ops.send, ops.recv, ops.start_recv, ops.finish_recv, ops.all_reduce, ops.start_all_reduce, ops.finish_all_reduce)


@functools.cache
def programs(schedule: str, overlapped: bool) -> tuple[RankProgram, ...]:
    """Of four stages; overlapped: with receives and reductions that are started early."""
    pipe = pdcompiler.compile(
        seeded(Skip), 2 if schedule == "zb-v" else 4, loss_fn=F.mse_loss, schedule=schedule, microbatches=3,
        partition=STAGES[1:], example_args=(drawn(6, 3),), example_target=drawn(6, 3),
    )  # fmt: skip
    assert pipe.runner.latest is not None
    return pipe.runner.latest.ranks if overlapped else split_ranks(pipe.program)


def room(graph: fx.Graph, node: fx.Node) -> list[fx.Node]:
    """The nodes before which it may stand."""
    nodes = list(graph.nodes)
    first = max((nodes.index(read) for read in node.all_input_nodes), default=-1) + 1
    last = min((nodes.index(user) for user in node.users), default=len(nodes) - 1)
    return [other for other in nodes[first : last + 1] if other is not node and other.op != "placeholder"]


@st.composite
def moved(draw: st.DrawFn) -> list[RankProgram]:
    """Ranks' programs with one to three nodes moved."""
    whole = programs(draw(st.sampled_from(SCHEDULES)), draw(st.booleans()))
    ranks = [RankProgram(program.rank, copy.deepcopy(program.graph), program.root) for program in whole]
    for _ in range(draw(st.integers(1, 3))):
        graph = draw(st.sampled_from(ranks)).graph
        node = draw(st.sampled_from([node for node in graph.nodes if node.target in MOVED]))
        places = room(graph, node)
        if places:
            draw(st.sampled_from(places)).prepend(node)
    return ranks


def answer(ranks: list[RankProgram]) -> str:
    """By the proof."""
    try:
        verify_ranks(ranks)
    except DeadlockError:
        return "stuck"
    except VerifyError:
        return "no pairs"
    return "ends"


def test_the_proof_and_the_plain_walk_agree() -> None:
    answers: Counter[str] = Counter()

    @settings(max_examples=150)
    @given(moved())
    def law(ranks: list[RankProgram]) -> None:
        found = answer(ranks)
        answers[found] += 1
        if found == "ends":
            assert rendezvous.finish(ranks) > 0
        if found == "stuck":
            with pytest.raises(rendezvous.Stuck):
                rendezvous.finish(ranks)

    law()
    assert min(answers["ends"], answers["stuck"]) >= 20, answers


def copied(schedule: str, overlapped: bool) -> tuple[list[RankProgram], list[fx.Node]]:
    """Programs that a test may break, and the first rank's sends to the second."""
    whole = programs(schedule, overlapped)
    ranks = [RankProgram(program.rank, copy.deepcopy(program.graph), program.root) for program in whole]
    return ranks, [node for node in ranks[0].graph.nodes if node.kwargs.get("channel") == "0->1" and node.target is ops.send]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("overlapped", [False, True])
def test_the_walk_sees_sends_that_come_too_late(schedule: str, overlapped: bool) -> None:
    """All of a rank's, at its end: its own gradients come from what is made of them."""
    ranks, sends = copied(schedule, overlapped)
    output = next(iter(reversed(ranks[0].graph.nodes)))
    for send in sends:
        output.prepend(send)
    with pytest.raises(rendezvous.Stuck, match=r"^rank 0 stands at .*\nrank 1 stands at "):
        rendezvous.finish(ranks)


def test_the_walk_sees_messages_that_miss() -> None:
    ranks, sends = copied("1f1b", True)
    sends[1].append(sends[0])
    with pytest.raises(AssertionError, match=" meets send"):
        rendezvous.finish(ranks)


def test_the_walk_sees_a_receive_without_send() -> None:
    """Without a loss it is only asked for, and never finished."""
    ranks, sends = copied("1f1b", True)
    ranks[0].graph.erase_node(sends[-1])
    with pytest.raises(rendezvous.Stuck):
        rendezvous.finish(ranks)
    pending = [node for node in ranks[1].graph.nodes if node.target is ops.start_recv and node.kwargs["channel"] == "0->1"][-1]
    for user in list(pending.users):
        user.replace_all_uses_with(None)  # type: ignore[arg-type]
        ranks[1].graph.erase_node(user)
    with pytest.raises(AssertionError, match="a receive that nothing is sent to"):
        rendezvous.finish(ranks)
