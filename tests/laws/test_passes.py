"""Laws of the passes, on random models: a program is the model at every moment, and ranks hold and say what they should.

The laws of schedules stand in test_schedules.py.
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from torch import fx

from pdcompiler.compiler import receive_window
from pdcompiler.core import ops
from pdcompiler.core.ir import Function, Program, RankProgram, rank_of, type_of
from pdcompiler.core.verify_ranks import verify_ranks
from pdcompiler.passes.program.lower_schedule import lower_schedule
from pdcompiler.passes.program.split_ranks import split_ranks
from pdcompiler.passes.ranks.overlap_reductions import overlap_reductions
from pdcompiler.passes.ranks.overlap_transfers import overlap_transfers
from pdcompiler.passes.ranks.reuse_memory import reuse_memory
from pdcompiler.testing import Case, cases
from tests.laws.one_step import OneStep

RECEIVES = (ops.recv, ops.start_recv)


def check_laws(case: Case) -> None:
    """All laws, for one case: tracing is what costs time, so they share it."""
    passed: list[str] = []

    def watch(name: str, value: Any) -> None:
        passed.append(name)
        if isinstance(value, Program):
            one.check_program(value)
            each_value_crosses_once_per_receiver(value)

    one = OneStep.of(case)
    one.check_program(lower_schedule(one.step, one.schedule), reduced=False)
    one.watch = watch
    program = one.program()
    assert passed == ["insert_reductions", "split_backward", "insert_transfers", "merge_transfers"]
    ranks = split_ranks(program)
    window = receive_window(program)
    for rewrite in (lambda rank: rank, reuse_memory, lambda rank: overlap_transfers(rank, window), overlap_reductions):
        ranks = tuple(rewrite(rank) for rank in ranks)
        verify_ranks(ranks)
        one.check_ranks(program, ranks)
        sends_meet_receives(program, ranks)
        ranks_read_what_they_hold(one, ranks)
    stages_share_out_the_parameters(one)


def each_value_crosses_once_per_receiver(program: Program) -> None:
    """No value is sent twice to one rank, by itself or in a pack, nor to the rank that made it."""
    crossings: Counter[tuple[fx.Node, int]] = Counter()
    for node in program.graph.nodes:
        if node.target is ops.transfer:
            sent: Any = node.args[0]
            assert rank_of(sent) != node.kwargs["to"] == rank_of(node), f"{node.format_node()} stays where it is"
            crossings.update((value, rank_of(node)) for value in (sent.args[0] if sent.target is ops.pack else (sent,)))
    assert all(count == 1 for count in crossings.values()), crossings.most_common(3)


def sends_meet_receives(program: Program, ranks: Sequence[RankProgram]) -> None:
    """A transfer of the program is one send and one receive, on one channel, of its shape and type, in its order."""
    expected: dict[str, list[Any]] = defaultdict(list)
    for node in program.graph.nodes:
        if node.target is ops.transfer:
            kind = type_of(node)
            expected[f"{rank_of(node.args[0])}->{rank_of(node)}"].append((tuple(kind.shape), kind.dtype, node.meta["microbatch"]))
    sent, received = defaultdict(list), defaultdict(list)
    for rank in ranks:
        for node in rank.graph.nodes:
            if node.target is ops.send:
                assert node.kwargs["channel"] == f"{rank.rank}->{node.kwargs['to']}"
                kind = type_of(node.args[0])
                sent[node.kwargs["channel"]].append((tuple(kind.shape), kind.dtype, node.meta["microbatch"]))
            elif node.target in RECEIVES:
                assert node.kwargs["channel"] == f"{node.kwargs['frm']}->{rank.rank}"
                what = (tuple(node.kwargs["shape"]), node.kwargs["dtype"], node.meta["microbatch"])
                received[node.kwargs["channel"]].append(what)
    assert dict(sent) == dict(received) == dict(expected)


def ranks_read_what_they_hold(one: OneStep, ranks: Sequence[RankProgram]) -> None:
    """A rank reads placeholders, its own stage's weights, buffers and functions, and values that stand before the reader."""
    for rank in ranks:
        before: set[fx.Node] = set()
        for node in rank.graph.nodes:
            assert before.issuperset(node.all_input_nodes), f"rank {rank.rank}: {node.format_node()}"
            before.add(node)
            if node.op == "call_module":
                assert str(node.target).startswith(f"stage{rank.rank}_") and hasattr(rank.root, str(node.target))
            elif node.op == "call_function":
                assert node.target in ops.VOCABULARY.values() or node.target in (operator.getitem, operator.mul), node.target
                if node.target in (ops.weights, ops.buffers, ops.write_buffers):
                    assert node.kwargs == {"stage": rank.rank, "rank": rank.rank}
            elif node.op == "placeholder":
                assert node.users and len(before) <= len(one.batch.tensors) + 2
        held = {name for name, _ in rank.root.named_children()}
        assert held == {str(node.target) for node in rank.graph.nodes if node.op == "call_module"}


def stages_share_out_the_parameters(one: OneStep) -> None:
    """The stages' parameters are the model's; one stands on several stages only where each of them reads it."""
    stages = one.step.microbatches[0].staged.stages
    held = [name for stage in stages for name in stage.parameters]
    assert set(held) == {name for name, _ in one.model.named_parameters()}
    for stage, planned in zip(stages, one.partition.stages, strict=True):
        assert stage.parameters == planned.parameters and len(set(stage.parameters)) == len(stage.parameters)
        read = weights_read(stage.forward) | (weights_read(stage.backward) if stage.backward else set())
        for place, name in enumerate(stage.parameters):
            assert place in read or held.count(name) == 1, f"stage {stage.index} holds {name}, which it does not read"
    for name, parameter in one.model.named_parameters():
        giving = [stage.index for stage in stages if name in stage.gradients]
        assert bool(giving) == (one.expected.gradients[name] is not None), (name, parameter.requires_grad)
        assert all(name in stages[index].parameters for index in giving)


def weights_read(function: Function) -> set[int]:
    """The places of `weights` that a stage's function takes out and uses."""
    taken = [n for n in function.module.graph.nodes if n.op == "placeholder" and n.target == "weights"]
    return {int(item.args[1]) for weights in taken for item in weights.users if item.users}  # type: ignore[arg-type]


@settings(max_examples=6)
@given(case=cases())
def test_a_sample_of_random_cases_keeps_the_laws(case: Case) -> None:
    check_laws(case)


@pytest.mark.full
@settings(max_examples=100)
@given(case=cases())
def test_100_random_cases_keep_the_laws(case: Case) -> None:
    check_laws(case)
