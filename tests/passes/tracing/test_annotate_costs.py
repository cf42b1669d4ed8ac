"""Costs in rows: products are counted as torch's own FlopCounterMode counts them, forward and backward, for any rows."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from pdcompiler.core.cost import FIELDS, Cost, CostTable, total_cost
from pdcompiler.core.flops import kind_of
from pdcompiler.core.ir import ROWS, Trace, cost_of, is_backward
from pdcompiler.plain import loss_of
from tests.levels import trace_of
from tests.models import ZOO

FLOAT = 4
COUNTED = ("product", "convolution", "attention")
SLOW_TO_TRACE = ("t5", "whisper", "mixtral", "gnmt", "llama", "awd_lm", "bert", "vit", "gpt2", "resnet", "unet", "vgg16")


class Attention(nn.Module):
    """Two heads; F.scaled_dot_product_attention."""

    def __init__(self) -> None:
        super().__init__()
        self.projections, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.projections(x).chunk(3, -1))
        result: Tensor = self.out(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))
        return result


class Recurrent(nn.Module):
    """An LSTM, its hidden states alone."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 6, batch_first=True, num_layers=2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.lstm(x)[0]
        return result


MODELS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "linear": (nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3, bias=False)), (6,)),
    "linear over a sequence": (nn.Linear(6, 8), (3, 6)),
    "convolution": (nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 6, 3, stride=2, dilation=2)), (2, 9, 9)),
    "convolution along one dimension": (nn.Conv1d(2, 4, 3), (2, 9)),
    "transposed convolution": (nn.Sequential(nn.ConvTranspose2d(2, 4, 2, stride=2), nn.Conv2d(4, 3, 1)), (2, 5, 5)),
    "attention": (Attention(), (7, 8)),
    "lstm": (Recurrent(), (3, 4)),
}

aten = torch.ops.aten
ON_CPU = {  # torch's own formulas, which it applies to the CUDA kernels of attention alone
    aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda g, q, k, v, *_, **__: sdpa_backward_flop_count(g, q, k, v),
}


def square_mean(outputs: Tensor, target: Any) -> Tensor:
    return outputs.square().mean()


def counted_by_torch(model: nn.Module, args: Any, kwargs: Any, target: Any, loss_fn: Any) -> tuple[Counter[str], Counter[str]]:
    """Forward and backward of one batch: operations by operator."""
    found: list[Counter[str]] = []
    with FlopCounterMode(display=False, custom_mapping=ON_CPU) as forward:
        loss = loss_of(model(*args, **kwargs), target, loss_fn)
    with FlopCounterMode(display=False, custom_mapping=ON_CPU) as backward:
        loss.backward()
    model.zero_grad(set_to_none=True)
    for mode in (forward, backward):
        counts = mode.get_flop_counts().get("Global", {})
        found.append(Counter({operator.__name__: int(count) for operator, count in counts.items()}))
    return found[0], found[1]


def counted_by_us(trace: Trace, rows: int, backward: bool) -> Counter[str]:
    found: Counter[str] = Counter()
    for node in trace.graph.nodes:
        if kind_of(node) in COUNTED and is_backward(node) == backward:
            found[node.target._opname] += int(cost_of(node).at(rows).flops)
    return found


@pytest.mark.parametrize("name", MODELS)
def test_products_are_counted_as_torch_counts_them(name: str) -> None:
    model, shape = MODELS[name]
    model.double()  # in float32 a CPU runs an LSTM as one operation, which torch does not count
    trace = trace_of(model, torch.zeros(2, *shape, dtype=torch.float64), target=None, loss_fn=square_mean, rows=13)
    for rows in (11, 4):
        forward, backward = counted_by_torch(model, (torch.zeros(rows, *shape).double(),), {}, None, square_mean)
        assert forward and (counted_by_us(trace, rows, False), counted_by_us(trace, rows, True)) == (forward, backward)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.full] * (n in SLOW_TO_TRACE)) for n in ZOO])
def test_every_model_is_counted_as_torch_counts_it(name: str) -> None:
    example = ZOO[name]()
    options = {"target": example.target, "loss_fn": example.loss_fn, "rows": 29, **example.kwargs}
    trace = trace_of(example.model, *example.args, **options)
    assert trace.rows is None
    for rows in (3, 8):
        args = tuple(tensor[:rows] for tensor in example.args)
        kwargs = {key: tensor[:rows] for key, tensor in example.kwargs.items()}
        target = None if example.target is None else example.target[:rows]
        forward, backward = counted_by_torch(example.model, args, kwargs, target, example.loss_fn)
        assert forward and (counted_by_us(trace, rows, False), counted_by_us(trace, rows, True)) == (forward, backward)
    whole = total_cost(map(cost_of, trace.graph.nodes))
    assert whole.notes == ()
    assert whole.parameter_bytes == sum(p.nbytes for p in example.model.parameters())


def test_a_grouped_convolution_costs_its_groups_in_each_of_the_three_products() -> None:
    """(torch counts the gradient of the weight as if there were one group.)"""
    trace = trace_of(nn.Conv2d(4, 6, 3, groups=2), torch.zeros(2, 4, 5, 5).requires_grad_(), loss_fn=square_mean, rows=13)
    one = 2 * (6 * 3 * 3) * (2 * 3 * 3)
    forward, backward = counted_by_us(trace, 1, False), counted_by_us(trace, 1, True)
    assert (forward.total(), backward.total()) == (one, one)  # nothing needs the input's gradient


def test_an_lstm_that_is_one_operation_counts_as_the_loop_over_its_steps() -> None:
    def flops(dtype: torch.dtype) -> tuple[set[str], list[float]]:
        trace = trace_of(Recurrent().to(dtype), torch.zeros(2, 3, 4, dtype=dtype), loss_fn=square_mean, rows=13)
        wanted = [node for node in trace.graph.nodes if kind_of(node) in ("product", "recurrent")]
        sides = [total_cost(cost_of(node) for node in wanted if is_backward(node) == side) for side in (False, True)]
        return {kind_of(node) for node in wanted}, [side.at(10).flops for side in sides]

    (fused_kinds, fused), (loop_kinds, loop) = flops(torch.float32), flops(torch.float64)
    assert (fused_kinds, loop_kinds) == ({"recurrent"}, {"product"})
    nobody_reads = 2 * 10 * 24 * (3 * 4 + 2 * 6)  # gradients of the first layer's input, of both layers' first states
    assert fused == [loop[0], loop[1] + nobody_reads]


def test_other_operations_cost_their_elements_and_bytes_and_views_nothing() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return torch.tanh(x + y).flatten(1).transpose(0, 1)

    trace = trace_of(Model(), torch.zeros(3, 4, 5), torch.zeros(3, 4, 5), rows=7, gradients=False)
    costs = {node.name: cost_of(node) for node in trace.graph.nodes if node.op == "call_function"}
    size = 80 * ROWS
    assert costs["add"] == Cost(20 * ROWS, 2 * size, size, size, operations=1)
    assert costs["tanh"] == Cost(20 * ROWS, size, size, size, operations=1)
    assert all(cost in (Cost(), Cost(output_bytes=size)) for name, cost in costs.items() if name not in ("add", "tanh"))
    assert len(costs) > 2


def test_a_lookup_reads_the_rows_that_it_gathers_and_its_backward_fills_the_table() -> None:
    trace = trace_of(nn.Embedding(100, 6), torch.zeros(2, 3, dtype=torch.int64), loss_fn=square_mean, rows=13)
    embedding = next(node for node in trace.graph.nodes if kind_of(node) == "embedding")
    gathered, indices = 3 * 6 * FLOAT * ROWS, 3 * 8 * ROWS
    assert cost_of(embedding) == Cost(
        0, gathered + indices, gathered, gathered, saved_bytes=gathered, parameter_bytes=600 * FLOAT, operations=1
    )
    backward = next(cost_of(node) for node in trace.graph.nodes if "embedding_dense_backward" in node.name)
    assert backward.bytes_written == 600 * FLOAT and backward.bytes_read == gathered + indices


class TwoReaders(nn.Module):
    """Its weight is read twice, the second time through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(torch.sigmoid(x @ self.weight).unsqueeze(1).squeeze(1) @ self.weight.t())


def test_saved_is_what_the_backward_reads_be_it_through_views_and_each_parameter_counts_once() -> None:
    trace = trace_of(TwoReaders(), torch.zeros(2, 6), loss_fn=square_mean, rows=13)
    forward = [node for node in trace.graph.nodes if node.op == "call_function" and not is_backward(node)]
    size = 6 * FLOAT * ROWS
    saved = {node.name: cost_of(node).saved_bytes for node in forward if cost_of(node).saved_bytes != 0}
    assert saved == {"sigmoid": size, "tanh": size}
    read = {node.name: cost_of(node).parameter_bytes for node in trace.graph.nodes if cost_of(node).parameter_bytes != 0}
    assert read == {"mm": 36 * FLOAT}


def test_saved_bytes_are_those_that_autograd_saves() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3))
    own = {tensor.untyped_storage().data_ptr() for tensor in model.parameters()}
    x, rows = torch.ones(5, 6), 5
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(x).square().mean()
    del storages[x.untyped_storage().data_ptr()]  # the batch is there anyway
    trace = trace_of(model, torch.zeros(2, 6), loss_fn=square_mean, rows=13)
    expected = sum(size for place, size in storages.items() if place not in own)
    assert loss.requires_grad and total_cost(map(cost_of, trace.graph.nodes)).at(rows).saved_bytes == expected


def test_an_operator_that_nobody_knows_costs_its_bytes_and_is_noted_once() -> None:
    with torch.library._scoped_library("costs_test", "DEF") as library:
        library.define("double(Tensor x) -> Tensor")
        library.impl("double", lambda x: 2 * x, "CompositeExplicitAutograd")
        library.impl("double", torch.empty_like, "Meta")

        class Model(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                double = torch.ops.costs_test.double
                result: Tensor = double(double(x))
                return result

        trace = trace_of(Model(), torch.zeros(3, 4), rows=7, gradients=False)
        whole = total_cost(map(cost_of, trace.graph.nodes))
        assert (whole.flops, whole.bytes, whole.operations) == (0, 64 * ROWS, 2)
        assert whole.notes == ("costs_test.double.default: not known, priced by its bytes alone",)


def test_law_the_costs_of_the_stages_add_up_to_that_of_the_trace() -> None:
    example = ZOO["unet"]()
    trace = trace_of(example.model, *example.args, target=example.target, loss_fn=example.loss_fn, rows=29)
    nodes = list(trace.graph.nodes)
    costs = [cost_of(node) for node in nodes]
    whole, table = total_cost(costs), CostTable(costs)
    for cut in range(0, len(nodes), 10):
        assert total_cost(costs[:cut]) + total_cost(costs[cut:]) == whole
    for rows in (1, 7):
        assert table.at(rows).sum(0).tolist() == [getattr(whole.at(rows), name) for name in FIELDS]
    forward, backward = (total_cost(cost_of(n) for n in nodes if is_backward(n) == side) for side in (False, True))
    assert forward + backward == whole and backward.saved_bytes == 0 and backward.parameter_bytes == 0
