"""What crosses where the planner cuts GPT-2, T5, a U-Net and LSTMs: activations alone, and of equal cuts the smallest.

Not here: that what is computed stays right wherever they are cut (`test_exact.py`).
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from functools import cache

import pytest
from torch import fx

from pdcompiler.compiler import choose_partition, stage_trace, trace_model
from pdcompiler.core.batch import read_batch
from pdcompiler.core.ir import Trace, type_of
from pdcompiler.core.machine import Machine
from pdcompiler.core.partition import Problem
from pdcompiler.core.plan import SCHEDULE_KINDS, Plan, Training
from pdcompiler.core.values import Origins
from pdcompiler.passes.partition.evaluate import evaluate
from pdcompiler.passes.partition.make_partition import cuts_of, plan_of_cuts
from pdcompiler.passes.partition.problem import make_problem
from pdcompiler.planner import straight_plan
from tests.levels import request
from tests.models import ZOO

ROWS = 5
MODELS = ("gpt2", "unet", pytest.param("t5", marks=pytest.mark.full), pytest.param("awd_lm", marks=pytest.mark.full))
BIAS = "layer_0_SelfAttention_unsqueeze"
"""In the name of T5's bias of positions: rows of an embedding, the same for each row of the batch, so it depends on no input."""
EQUAL = 1e-4
"""Relative: of seconds that count as equal."""


@cache
def traced(name: str) -> Trace:
    """A model's trace; whoever changes it takes a copy."""
    example = ZOO[name]()
    batch = read_batch(example.model, example.args, example.kwargs, example.target, None)
    asked = request(example.model, loss_fn=example.loss_fn)
    return trace_model(asked, batch, rows=ROWS, symbolic=True, gradients=True)


def crossing(name: str, world_size: int) -> tuple[Trace, list[fx.Node]]:
    """The staged trace, and the values that some stage's forward takes from another's."""
    example, trace = ZOO[name](), copy.deepcopy(traced(name))
    asked = request(example.model, world_size, loss_fn=example.loss_fn)
    staged = stage_trace(asked, trace, choose_partition(asked, trace, ROWS), ROWS)
    made = {node.name: node for node in trace.graph.nodes if node.op == "call_function"}
    return trace, [made[value] for stage in staged.stages for value in stage.forward.takes if value in made]


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("name", MODELS)
def test_only_activations_cross(name: str, world_size: int) -> None:
    """No weight in another shape, no mask, no position ids: those are made again where they are read."""
    trace, values = crossing(name, world_size)
    origins = Origins(trace)
    assert len({node.meta["stage"] for node in values}) >= world_size - 1
    for node in values:
        assert node not in origins.batch_values, f"{node} is made of the batch alone"
        assert node not in origins.weight_values or (name == "t5" and BIAS in node.name), f"{node} is made of weights alone"
        assert type_of(node).dtype.is_floating_point


def sent_bytes(plan: Plan, problem: Problem) -> float:
    """Of all values over all borders that they cross."""
    stage = {layer: index for index, planned in enumerate(plan.stages) for layer in planned.layers}
    return sum(v.bytes * (max(stage[reader] for reader in v.consumers) - stage[v.producer]) for v in problem.workload.values)


def other_cuts(cuts: list[int], places: tuple[int, ...]) -> Iterator[list[int]]:
    """All cuts in two; of more stages, those with one border moved past no other."""
    bounds = [0, *cuts, places[-1] + 1]
    for index, cut in enumerate(cuts):
        for place in places:
            if bounds[index] < place < bounds[index + 2] and place != cut:
                yield [*cuts[:index], place, *cuts[index + 1 :]]


@pytest.mark.parametrize(("machine", "schedule"), [*itertools.product(("laptop", "h100-servers"), sorted(SCHEDULE_KINDS))])
@pytest.mark.parametrize("name", MODELS)
def test_no_equal_cut_sends_less(name: str, machine: str, schedule: str) -> None:
    for world_size in (2, 3, 4):
        on, training = Machine.load(machine).take(world_size), Training(schedule, 2 * world_size)
        problem = make_problem(traced(name), on, ROWS)
        found = straight_plan(problem.workload, on, training)
        least, own, compared = found.evaluation.seconds, sent_bytes(found.plan, problem), 0
        for cuts in other_cuts(cuts_of(problem, found.plan), problem.places):
            other = plan_of_cuts(problem, cuts)
            seconds = evaluate(other, problem.workload, on, training).seconds
            compared += 1
            assert seconds >= least * (1 - 1e-9)
            assert seconds > least * (1 + EQUAL) or sent_bytes(other, problem) >= own, (cuts, seconds, least)
        assert compared >= 5
