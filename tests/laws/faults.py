"""The faults that test_planted_faults.py plants: each changes what one step of compiler.py gives, as a wrong step would.

They know the programs of that file's model: three stages, one a rank, and three microbatches of 3, 2 and 2 rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from pdcompiler.core import ops

Plant = Callable[[Any], None]
FAULTS: dict[str, tuple[str, Plant, str]] = {}
"""By name: the step after which it is planted, what it does, and the check that catches it."""


def fault(level: str, caught_by: str) -> Callable[[Plant], None]:
    """A fault, planted into what a step of compiler.py gives."""

    def keep(plant: Plant) -> None:
        FAULTS[plant.__name__] = (level, plant, caught_by)

    return keep


def nodes(graph: fx.Graph, target: Any, **meta: Any) -> list[fx.Node]:
    """The calls of a function, in order, by their metadata."""
    return [n for n in graph.nodes if n.target == target and all(n.meta[key] == value for key, value in meta.items())]


def swap_arguments(one: fx.Node, other: fx.Node, place: int) -> None:
    """Two calls take each other's argument."""
    first, second = one.args[place], other.args[place]
    one.update_arg(place, second)
    other.update_arg(place, first)


@fault("cut_stages", "verify_staged")
def a_parameter_is_saved_as_an_activation(staged: Any) -> None:
    graph = staged.stages[2].forward.module.graph
    weight = next(n for n in graph.nodes if n.name == "last_weight")
    loss, outputs, saved = graph.output_node().args[0]
    graph.output_node().args = ((loss, outputs, (*saved, weight)),)


@fault("cut_stages", "verify_staged")
def a_stage_takes_a_value_of_a_later_one(staged: Any) -> None:
    taken = staged.stages[1].forward
    taken.takes = tuple("add_2" if name == "add_1" else name for name in taken.takes)
    assert "add_2" in taken.takes and "add_2" in staged.stages[2].forward.gives


@fault("cut_stages", "program: gradient")
def gradients_stand_one_position_off(staged: Any) -> None:
    stage = staged.stages[1]
    stage.gradients = (*stage.gradients[:1], *stage.gradients[2:], stage.gradients[1])


@fault("cut_stages", "program: gradient")
def an_integer_of_microbatch_0_is_baked_in(staged: Any) -> None:
    module = staged.stages[2].backward.module
    elements = next(n for n in module.graph.nodes if n.op == "call_function" and n.name.startswith("mul") and 4 in n.args)
    elements.replace_all_uses_with(12)
    module.recompile()


@fault("lower_schedule", "program: gradient")
def an_accumulate_is_dropped(program: Any) -> None:
    total = nodes(program.graph, ops.accumulate, stage=1, phase="B")[0]
    total.replace_all_uses_with(total.args[0])


@fault("lower_schedule", "program: loss")
def microbatches_of_the_target_are_swapped(program: Any) -> None:
    one, other = nodes(program.graph, ops.microbatch, stage=2)[1:]
    one.kwargs, other.kwargs = other.kwargs, one.kwargs


@fault("lower_schedule", "program: buffer")
def the_write_of_a_buffer_is_lost(program: Any) -> None:
    program.graph.erase_node(nodes(program.graph, ops.write_buffers)[0])


@fault("lower_schedule", "program: buffer")
def a_forward_takes_the_buffers_from_before_the_step(program: Any) -> None:
    first, second, _ = nodes(program.graph, "stage1_forward")
    second.update_arg(1, first.args[1])


@fault("lower_schedule", "program: loss")
def a_loss_is_added_without_its_weight(program: Any) -> None:
    add = nodes(program.graph, ops.accumulate, phase="F")[0]
    add.update_arg(1, add.args[1].args[0])


@fault("lower_schedule", "program: gradient")
def a_backward_takes_the_loss_weight_of_another_microbatch(program: Any) -> None:
    first, second, _ = nodes(program.graph, "stage2_backward")
    second.update_arg(3, first.args[3])


@fault("lower_schedule", "program: gradient")
def saved_values_of_two_microbatches_are_swapped(program: Any) -> None:
    _, one, other = nodes(program.graph, "stage1_backward")
    swap_arguments(one, other, 1)


@fault("lower_schedule", "program: loss")
def a_stage_reads_the_skip_for_the_value_of_the_stage_before(program: Any) -> None:
    forward = nodes(program.graph, "stage2_forward")[1]
    forward.update_arg(1, forward.args[2])


@fault("insert_reductions", "program: gradient")
def a_tied_weight_is_not_reduced(program: Any) -> None:
    output = program.graph.output_node()
    output.args = ({rank: {**result, "reduced": {}} for rank, result in output.args[0].items()},)


@fault("insert_transfers", "verify_program")
def a_value_is_read_on_a_rank_that_it_was_not_sent_to(program: Any) -> None:
    transfer = nodes(program.graph, ops.transfer, microbatch=1)[0]
    transfer.replace_all_uses_with(transfer.args[0])


@fault("merge_transfers", "program: gradient")
def packed_values_are_taken_out_in_the_wrong_order(program: Any) -> None:
    one, other = nodes(program.graph, ops.unpack)[1].users
    swap_arguments(one, other, 1)


@fault("split_ranks", "verify_ranks")
def a_send_is_dropped(ranks: Any) -> None:
    ranks[1].graph.erase_node(nodes(ranks[1].graph, ops.send)[1])


@fault("split_ranks", "verify_ranks")
def a_receive_stands_before_the_send_that_it_waits_for(ranks: Any) -> None:
    nodes(ranks[0].graph, ops.send)[0].prepend(nodes(ranks[0].graph, ops.recv)[0])


@fault("split_ranks", "verify_ranks")
def gradients_of_two_microbatches_are_sent_in_the_wrong_order(ranks: Any) -> None:
    _, one, other = nodes(ranks[1].graph, ops.send, phase="B")
    other.append(one)


@fault("split_ranks", "ranks: gradient")
def a_gradient_is_sent_under_the_number_of_another_microbatch(ranks: Any) -> None:
    _, one, other = nodes(ranks[1].graph, ops.send, phase="B")
    other.append(one)
    one.meta, other.meta = other.meta, one.meta


@fault("split_ranks", "verify_ranks")
def a_receive_expects_another_type(ranks: Any) -> None:
    receive = nodes(ranks[2].graph, ops.recv)[0]
    receive.kwargs = {**receive.kwargs, "dtype": torch.float32}


@fault("split_ranks", "verify_ranks")
def a_rank_leaves_out_its_part_of_a_reduction(ranks: Any) -> None:
    reduce = nodes(ranks[2].graph, ops.all_reduce)[0]
    reduce.replace_all_uses_with(reduce.args[0])
    ranks[2].graph.erase_node(reduce)


@fault("split_ranks", "verify_ranks")
def a_reductions_values_stand_in_another_order_on_one_rank(ranks: Any) -> None:
    (reduction,) = nodes(ranks[2].graph, ops.all_reduce)
    reduction.args = (tuple(reversed(reduction.args[0])),)


@fault("reuse_memory", "ranks: gradient")
def the_first_gradient_is_added_to_in_place(rank: Any) -> None:
    if rank.rank == 0:
        nodes(rank.graph, ops.accumulate)[0].target = ops.accumulate_in_place


@fault("overlap_transfers", "verify_ranks")
def receives_are_started_in_another_order_than_they_are_sent(rank: Any) -> None:
    if rank.rank == 0:
        one, other = nodes(rank.graph, ops.start_recv)[:2]
        other.append(one)
