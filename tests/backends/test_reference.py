"""The reference backend defines the words: pure ones by value, messages by order, and what can't go on says where it stands."""

import operator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from pdcompiler.backends.reference import (
    Memory,
    accumulate,
    accumulate_in_place,
    microbatch,
    pack,
    run_program,
    run_ranks,
    unpack,
)
from pdcompiler.core import ops
from pdcompiler.core.errors import DeadlockError
from pdcompiler.core.ir import Program, RankProgram
from pdcompiler.core.schedule import Schedule
from pdcompiler.passes.program.insert_transfers import insert_transfers
from pdcompiler.passes.program.split_ranks import split_ranks
from pdcompiler.passes.ranks.overlap_transfers import overlap_transfers
from pdcompiler.testing import assert_close_by_tensor, assert_same
from tests.levels import TwoLayers, Writer, lowered, two_layers_staged

ONE_F_ONE_B = Schedule.parse("F0 F1 B0 B1\nF0 B0 F1 B1")
EMPTY = Memory(lambda stage, rank: (), lambda stage, rank: ())


# Pure words


def test_microbatch_is_contiguous_along_any_dimension() -> None:
    value = torch.arange(12).view(3, 4)
    part = microbatch(value, start=1, stop=3, dim=1)
    assert part.is_contiguous() and part.tolist() == [[1, 2], [5, 6], [9, 10]]


def test_sums_of_tensors_and_of_tuples() -> None:
    one, two = torch.ones(2), torch.full((2,), 2.0)
    total = accumulate((one, two), (two, two))
    assert [value.tolist() for value in total] == [[3.0, 3.0], [4.0, 4.0]] and one.tolist() == [1.0, 1.0]
    assert accumulate_in_place(total, (one, one)) is total and total[0].tolist() == [4.0, 4.0]
    assert accumulate(one, two).tolist() == [3.0, 3.0] and accumulate_in_place(one, two) is one
    assert accumulate((), ()) == () == accumulate_in_place((), ())


def test_unpacked_values_share_no_memory() -> None:
    packed = pack([torch.tensor([1, 2]), torch.tensor([True]), torch.tensor(0.5)])
    values = unpack(packed, types=(((2,), torch.int64), ((1,), torch.bool), ((), torch.float32)))
    assert [value.tolist() for value in values] == [[1, 2], [True], 0.5]
    packed.zero_()
    assert [value.tolist() for value in values] == [[1, 2], [True], 0.5]


# Programs


def two_layers() -> tuple[TwoLayers, Program, dict[str, Tensor], Memory]:
    torch.manual_seed(0)
    model = TwoLayers()
    parameters = {0: ("first.weight", "first.bias"), 1: ("second.weight", "second.bias")}
    memory = Memory(lambda stage, _: tuple(model.get_parameter(n).detach() for n in parameters[stage]), lambda stage, _: ())
    inputs = {"x": torch.randn(4, 4), "target": torch.randn(4, 3), "loss_weights": torch.tensor([0.5, 0.5])}
    return model, insert_transfers(lowered(two_layers_staged(), ONE_F_ONE_B, outputs="all")), inputs, memory


def test_the_global_program_is_the_model() -> None:
    model, program, inputs, memory = two_layers()
    outputs = model(inputs["x"])
    loss = F.mse_loss(outputs, inputs["target"])
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    results = run_program(program, inputs, memory)
    for rank in range(2):
        assert_close_by_tensor(results[rank]["loss"], loss.detach(), 1e-6, "loss")
        assert_close_by_tensor(torch.cat(results[rank]["outputs"][0]), outputs.detach(), 1e-6, "outputs")
        assert_same(results[rank]["gradients"][rank], gradients[2 * rank : 2 * rank + 2], 1e-6, f"gradients of stage {rank}")


@pytest.mark.parametrize("window", [None, 1, 3])
def test_the_ranks_programs_are_the_global_program(window: int | None) -> None:
    _, program, inputs, memory = two_layers()
    expected = run_program(program, inputs, memory)
    ranks = split_ranks(program)
    if window is not None:
        ranks = tuple(overlap_transfers(rank, {"0->1": window, "1->0": window}) for rank in ranks)
    for rank, result in enumerate(run_ranks(ranks, inputs, memory)):
        assert_same(result, expected[rank], 0.0, f"rank {rank}")


def test_a_sum_over_ranks_is_given_to_each_of_them() -> None:
    writer = Writer()
    x = writer.input("x")
    parts = (writer.call(torch.relu, x, name="part"), writer.call(torch.neg, x, rank=1, name="part"))
    sums = writer.call(ops.all_reduce, parts, name="sums", type=None, ranks=(0, 1))
    results = {rank: {"loss": writer.call(operator.getitem, sums, rank, rank=rank, name="own")} for rank in range(2)}
    program = writer.program(results)
    inputs = {"x": torch.tensor([2.0, -3.0])}
    for given in (run_program(program, inputs, EMPTY), dict(enumerate(run_ranks(split_ranks(program), inputs, EMPTY)))):
        assert [given[rank]["loss"].tolist() for rank in range(2)] == [[0.0, 3.0]] * 2


def test_buffers_get_their_new_values_and_those_left_alone_are_not_copied() -> None:
    held = (torch.zeros(2), torch.ones(2))
    memory = Memory(lambda stage, rank: (), lambda stage, rank: held)
    version = held[1]._version
    memory.write_buffers((torch.full((2,), 7.0), held[1]), stage=0, rank=0)
    assert held[0].tolist() == [7.0, 7.0] and held[1]._version == version


# What can't go on


def ranks_that(*words: tuple[Any, dict[str, Any]]) -> list[RankProgram]:
    """One word for each rank."""
    programs = []
    for rank, (word, options) in enumerate(words):
        graph = fx.Graph()
        graph.create_node("call_function", word, (), options, name="h")
        graph.output({})
        programs.append(RankProgram(rank, graph, nn.Module()))
    return programs


def test_ranks_that_wait_for_ever_say_where() -> None:
    what = {"shape": (2,), "dtype": torch.float32}
    programs = ranks_that((ops.recv, {"frm": 1, "channel": "1->0", **what}), (ops.recv, {"frm": 0, "channel": "0->1", **what}))
    with pytest.raises(DeadlockError) as stuck:
        run_ranks(programs, {}, EMPTY)
    assert str(stuck.value).splitlines() == [
        "rank 0 waits at recv(frm=1, channel='1->0', shape=(2,), dtype=float32)",
        "rank 1 waits at recv(frm=0, channel='0->1', shape=(2,), dtype=float32)",
    ]


def test_an_error_in_a_stage_passes_through() -> None:
    writer = Writer(1)
    program = writer.program({0: {"loss": writer.call(torch.mm, writer.input("x"), 3, name="y")}})
    with pytest.raises(TypeError, match="mm"):
        run_program(program, {"x": torch.zeros(2, 2)}, EMPTY)
