"""A rank's program is short, readable Python, and that Python runs: here with each rank in a thread, and queues as messages."""

import operator
import queue
import textwrap
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import pdcompiler
from pdcompiler.backends import reference
from pdcompiler.backends.codegen import generate
from pdcompiler.core import ops
from pdcompiler.core.ir import RankProgram
from pdcompiler.testing import assert_close_by_tensor
from tests.levels import FLOATS, TwoLayers, Writer

RANK_0 = """
    class Rank0(torch.nn.Module):
        def forward(self, x):
            pending_d_second_mm_0 = start_recv(frm=1, channel='1->0', shape=(2, 8), dtype=torch.float32)
            pending_d_second_mm_1 = start_recv(frm=1, channel='1->0', shape=(2, 8), dtype=torch.float32)
            pending_loss = start_recv(frm=1, channel='1->0', shape=(), dtype=torch.float32)
            stage0_weights = weights(stage=0, rank=0)
            x_0 = microbatch(x, start=0, stop=2, dim=0)
            tanh_0, saved_0 = self.stage0_forward(stage0_weights, x_0)
            send(tanh_0, to=1, channel='0->1');  tanh_0 = None
            x_1 = microbatch(x, start=2, stop=4, dim=0);  x = None
            tanh_1, saved_1 = self.stage0_forward(stage0_weights, x_1);  stage0_weights = None
            send(tanh_1, to=1, channel='0->1');  tanh_1 = None
            d_second_mm_0 = finish_recv(pending_d_second_mm_0);  pending_d_second_mm_0 = None
            (gradients_0,) = self.stage0_backward(saved_0, d_second_mm_0, x_0);  saved_0 = d_second_mm_0 = x_0 = None
            d_second_mm_1 = finish_recv(pending_d_second_mm_1);  pending_d_second_mm_1 = None
            (gradients_1,) = self.stage0_backward(saved_1, d_second_mm_1, x_1);  saved_1 = d_second_mm_1 = x_1 = None
            stage0_gradients = accumulate(gradients_0, gradients_1);  gradients_0 = gradients_1 = None
            loss = finish_recv(pending_loss);  pending_loss = None
            return {'loss': loss, 'gradients': {0: stage0_gradients}}

        class stage0_forward(torch.nn.Module):
            def forward(self, weights, x):
                first_weight = weights[0]
                first_bias = weights[1];  weights = None
                first_t_1 = torch.ops.aten.t.default(first_weight);  first_weight = None
                first_addmm = torch.ops.aten.addmm.default(first_bias, x, first_t_1);  first_bias = x = first_t_1 = None
                tanh = torch.ops.aten.tanh.default(first_addmm);  first_addmm = None
                return (tanh, (tanh,))

        class stage0_backward(torch.nn.Module):
            def forward(self, saved, d_second_mm, x):
                tanh = saved[0];  saved = None
                d_tanh_backward = torch.ops.aten.tanh_backward.default(d_second_mm, tanh);  d_second_mm = tanh = None
                d_first_t = torch.ops.aten.t.default(d_tanh_backward)
                d_first_mm = torch.ops.aten.mm.default(d_first_t, x);  d_first_t = x = None
                d_first_sum = torch.ops.aten.sum.dim_IntList(d_tanh_backward, [0], True);  d_tanh_backward = None
                d_first_view = torch.ops.aten.reshape.default(d_first_sum, [8]);  d_first_sum = None
                return ((d_first_mm, d_first_view),)
"""
RANK_1 = """
    class Rank1(torch.nn.Module):
        def forward(self, target, loss_weights):
            pending_tanh_0 = start_recv(frm=0, channel='0->1', shape=(2, 8), dtype=torch.float32)
            pending_tanh_1 = start_recv(frm=0, channel='0->1', shape=(2, 8), dtype=torch.float32)
            stage1_weights = weights(stage=1, rank=1)
            target_0 = microbatch(target, start=0, stop=2, dim=0)
            tanh_0 = finish_recv(pending_tanh_0);  pending_tanh_0 = None
            loss_0, _, saved_0 = self.stage1_forward(stage1_weights, tanh_0, target_0);  tanh_0 = _ = None
            loss_weight_0 = loss_weights[0]
            weighted_loss_0 = loss_0 * loss_weight_0;  loss_0 = None
            d_second_mm_0, gradients_0 = self.stage1_backward(stage1_weights, saved_0, loss_weight_0, target_0);  saved_0 = loss_weight_0 = target_0 = None
            send(d_second_mm_0, to=0, channel='1->0');  d_second_mm_0 = None
            target_1 = microbatch(target, start=2, stop=4, dim=0);  target = None
            tanh_1 = finish_recv(pending_tanh_1);  pending_tanh_1 = None
            loss_1, _, saved_1 = self.stage1_forward(stage1_weights, tanh_1, target_1);  tanh_1 = _ = None
            loss_weight_1 = loss_weights[1];  loss_weights = None
            weighted_loss_1 = loss_1 * loss_weight_1;  loss_1 = None
            loss = accumulate(weighted_loss_0, weighted_loss_1);  weighted_loss_0 = weighted_loss_1 = None
            d_second_mm_1, gradients_1 = self.stage1_backward(stage1_weights, saved_1, loss_weight_1, target_1);  stage1_weights = saved_1 = loss_weight_1 = target_1 = None
            send(d_second_mm_1, to=0, channel='1->0');  d_second_mm_1 = None
            stage1_gradients = accumulate(gradients_0, gradients_1);  gradients_0 = gradients_1 = None
            send(loss, to=0, channel='1->0')
            return {'loss': loss, 'gradients': {1: stage1_gradients}}
"""  # noqa: E501


def two_layers() -> pdcompiler.Pipeline:
    return pdcompiler.compile(
        TwoLayers(), 2, example_args=(torch.zeros(4, 4),), example_target=torch.zeros(4, dtype=torch.int64),
        loss_fn=F.cross_entropy, microbatches=2, partition=["second"],
    )  # fmt: skip


def test_the_two_stages_of_a_small_model_read_like_this() -> None:
    pipe = two_layers()
    assert shown(pipe.ranks[0]) == textwrap.dedent(RANK_0).strip()
    assert shown(pipe.ranks[1]).split("\n\n")[0] == textwrap.dedent(RANK_1).strip()


def shown(module: fx.GraphModule) -> str:
    text = module.print_readable(print_output=False)
    return "\n".join(line.rstrip() for line in text.splitlines()).strip()


def test_without_a_backend_it_says_that_it_needs_one() -> None:
    with pytest.raises(RuntimeError, match="start_recv has no meaning by itself: run the program through a backend"):
        two_layers().ranks[0](torch.zeros(4, 4))


NAMES = (*ops.VOCABULARY, "rows", "saved", "loss_weight", "loss_weights", "gradients", "self_", "torch", "print", "None_", "loss")


@pytest.mark.parametrize("names", [("x", "x_0"), ("x_1", "x"), NAMES])
def test_the_generated_code_runs_whatever_the_inputs_are_called(names: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    model = Named(names)
    tensors = {name: torch.randn(5, 4) for name in names}
    model(**tensors).square().mean().backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    pipe = pdcompiler.compile(
        model, 2, example_kwargs=tensors, example_target=torch.zeros(5, 4), loss_fn=F.mse_loss, microbatches=2, partition=["last"]
    )
    results = run_generated(pipe, [*tensors.values(), torch.zeros(5, 4)], torch.tensor([0.6, 0.4]))
    for rank, result in enumerate(results):
        for name, gradient in zip(pipe.program.gradient_names[rank], result["gradients"][rank], strict=True):
            assert_close_by_tensor(gradient, expected[name], 1e-6, name)


class Named(nn.Module):
    """The sum of its inputs, whatever they are called, through two layers."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        self.names = names
        self.start, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, **tensors: Tensor) -> Tensor:
        total = sum(tensors[name] for name in self.names)
        result: Tensor = self.last(torch.tanh(self.start(total)))
        return result


def run_generated(pipe: pdcompiler.Pipeline, tensors: list[Tensor], loss_weights: Tensor) -> list[Any]:
    """Each rank's generated module in a thread of its own."""
    compiled = pipe.runner.latest
    assert compiled is not None
    memory = pipe.runner.memory(compiled.program)
    channels: dict[str, queue.Queue[Tensor]] = defaultdict(queue.Queue)
    meaning = {
        **reference.PURE,
        ops.weights: lambda *, stage, rank: memory.weights(stage, rank),
        ops.send: lambda value, *, to, channel: channels[channel].put(value),
        ops.start_recv: lambda *, channel, **_: channel,
        ops.finish_recv: lambda channel: channels[channel].get(timeout=20),
    }
    names = [str(node.target) for node in compiled.program.graph.nodes if node.op == "placeholder"]
    inputs = dict(zip(names, [*tensors, loss_weights], strict=True))

    def run(program: RankProgram) -> Any:
        wanted = [str(node.target) for node in program.graph.nodes if node.op == "placeholder"]
        with torch.no_grad():
            return generate(program, meaning)(*(inputs[name] for name in wanted))

    with ThreadPoolExecutor() as pool:
        return list(pool.map(run, compiled.ranks))


def test_a_call_is_left_whole_where_something_else_reads_it() -> None:
    """Results that are taken out later, out of order, or twice are all still there."""
    writer = Writer(1)
    function = fx.symbolic_trace(Pair())
    writer.root.add_module("stage0_forward", function)
    x = writer.input("x")
    call = writer.call("stage0_forward", x)
    second = writer.call(operator.getitem, call, 1, name="second", type=FLOATS)
    double = writer.call(ops.accumulate, second, second, name="double")
    first = writer.call(operator.getitem, call, 0, name="first")
    program = writer.program({0: {"loss": writer.call(ops.accumulate, double, first, name="total")}})
    module = generate(RankProgram(0, program.graph, program.root), reference.PURE)
    program.graph.lint()
    assert module(torch.ones(2))[0]["loss"].tolist() == [7.0, 7.0]


class Pair(nn.Module):
    """Two results."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x + x + x
