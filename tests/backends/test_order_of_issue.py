"""NCCL wants one consistent order of operations over all communicators, on all ranks: a recording backend shows that it is so."""

import dataclasses
from typing import Any

import networkx
import pytest
import torch

import pdcompiler
from pdcompiler.compiler import Request, compile_program, compile_ranks
from pdcompiler.core import ops
from pdcompiler.core.batch import read_batch
from pdcompiler.core.ir import Microbatch, RankProgram, Step
from pdcompiler.core.machine import Machine
from pdcompiler.passes.schedules.named import SCHEDULES
from pdcompiler.traces import Traces
from tests.closed_forms import half_squared, linear, minibatches, sgd
from tests.models import ZOO

Issue = tuple[str, int]  # a channel or a set of ranks, and which operation on it


def programs(name: str, ranks: int, schedule: str) -> tuple[RankProgram, ...]:
    """Rank programs as for CUDA: receives stand where they are used."""
    example = ZOO[name]()
    request = Request(example.model, ranks, example.loss_fn, Machine(), None, False, None, None)
    batch = read_batch(example.model, example.args, example.kwargs, example.target, None)
    traces = Traces(request)
    staged = traces.staged(batch, [2], True)[2]
    microbatches = tuple(Microbatch(start, start + 2, staged) for start in range(0, 8, 2))
    owners = traces.fixed_partition().owners()
    holders = {key: stages for key, stages in owners.items() if len(stages) > 1}
    program = compile_program(request, Step(microbatches, batch.dims, "all"), SCHEDULES[schedule](ranks, 4), holders)
    return compile_ranks(request, program)


def recorded(*programs: RankProgram) -> list[Issue]:
    """The operations on communicators in the order in which a rank issues them, one program after the other."""
    issued: list[Issue] = []
    counts: dict[str, int] = {}
    for node in [node for program in programs for node in program.graph.nodes]:
        key: Any = node.kwargs.get("channel") or node.kwargs.get("ranks")
        if node.target in (ops.send, ops.recv, ops.start_recv, ops.all_reduce):
            counts[str(key)] = counts.get(str(key), -1) + 1
            issued.append((str(key), counts[str(key)]))
    return issued


@pytest.mark.parametrize(
    ("name", "schedule"),
    [("mlp", "gpipe"), ("mlp", "1f1b"), ("gpt2", "1f1b"), pytest.param("gpt2", "gpipe", marks=pytest.mark.full)],
)
def test_all_ranks_issue_in_one_consistent_order(name: str, schedule: str) -> None:
    order = networkx.DiGraph()
    sequences = [recorded(program) for program in programs(name, 3, schedule)]
    for sequence in sequences:
        networkx.add_path(order, sequence)
    assert sum(map(len, sequences)) > 3 * 8
    assert networkx.is_directed_acyclic_graph(order)


def test_ticks_keep_one_order_too() -> None:
    """Receives for later ticks are started in their place."""
    pipe: Any = pdcompiler.compile(
        linear(3), 4, partition=["1", "2"], replicas=(2, 1, 1), schedule="pipedream", optimizer=sgd, loss_fn=half_squared
    )
    pipe.runner.request = dataclasses.replace(pipe.request, overlap=False)
    ticks = []
    for x, target in minibatches(9):
        pipe.step(x, target=target)
        ticks.append(pipe.stream.latest.ranks)
    order = networkx.DiGraph()
    for rank in range(4):
        networkx.add_path(order, recorded(*(tick[rank] for tick in ticks)))
    assert networkx.is_directed_acyclic_graph(order) and order.number_of_nodes() > 9 * 4
    pipe.drain()
    for layer, expected in zip(pipe.request.model, straight_weights(), strict=True):
        assert torch.equal(layer.weight.detach(), expected)


def straight_weights() -> list[torch.Tensor]:
    """What the same stream gives with early receives."""
    pipe = pdcompiler.compile(
        linear(3), 4, partition=["1", "2"], replicas=(2, 1, 1), schedule="pipedream", optimizer=sgd, loss_fn=half_squared
    )
    for x, target in minibatches(9):
        pipe.step(x, target=target)
    pipe.drain()
    return [parameter.detach() for parameter in pipe.parameters()]


def test_an_inconsistent_order_is_seen() -> None:
    order = networkx.DiGraph()
    networkx.add_path(order, [("0->1", 0), ("1->0", 0)])
    networkx.add_path(order, [("1->0", 0), ("0->1", 0)])
    assert not networkx.is_directed_acyclic_graph(order)


def test_no_receive_is_posted_early_for_nccl() -> None:
    targets = {node.target for program in programs("mlp", 2, "1f1b") for node in program.graph.nodes}
    assert ops.recv in targets and ops.start_recv not in targets
