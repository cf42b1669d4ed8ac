"""What an operator costs, told from a graph written by hand: those that no CPU trace has."""

from typing import Any

import pytest
import sympy
import torch
from torch import fx
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

from pdcompiler.core.flops import GATHERS, RULES, bytes_read_by, flops_of, kind_of
from pdcompiler.core.ir import ROWS, ValueType

aten = torch.ops.aten
QUERY, KEY, VALUE = (ROWS, 4, 6, 8), (ROWS, 4, 10, 8), (ROWS, 4, 10, 16)
RESULT = (ROWS, 4, 6, 16)


def call(target: Any, made: tuple[Any, ...], *args: Any) -> fx.Node:
    """A node that makes float32 values of one shape; tuples among the arguments are inputs of these shapes, lists are lists."""
    graph = fx.Graph()

    def placed(argument: Any) -> Any:
        if not isinstance(argument, tuple):
            return [placed(each) for each in argument] if isinstance(argument, list) else argument
        node = graph.placeholder(f"x{len(graph.nodes)}")
        node.meta["type"] = ValueType(argument, torch.float32)
        return node

    node = graph.call_function(target, tuple(map(placed, args)))
    node.meta["type"] = ValueType(made, torch.float32)
    return node


def at(shape: tuple[Any, ...], rows: int) -> list[int]:
    return [int(sympy.sympify(size).subs(ROWS, rows)) for size in shape]


@pytest.mark.parametrize("name", ["flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu"])
def test_attention_is_counted_as_torch_counts_it(name: str) -> None:
    forward = getattr(aten, f"_scaled_dot_product_{name}").default
    backward = getattr(aten, f"_scaled_dot_product_{name}_backward").default
    for rows in (2, 5):
        shapes = [at(shape, rows) for shape in (QUERY, KEY, VALUE)]
        count = flops_of(call(forward, RESULT, QUERY, KEY, VALUE)).subs(ROWS, rows)
        assert count == sdpa_flop_count(*shapes)
        count = flops_of(call(backward, QUERY, RESULT, QUERY, KEY, VALUE)).subs(ROWS, rows)
        assert count == sdpa_backward_flop_count(at(RESULT, rows), *shapes)


def test_the_flash_kernel_itself_has_the_heads_behind_the_sequence() -> None:
    query, key = (ROWS, 6, 4, 8), (ROWS, 10, 4, 8)
    count = flops_of(call(aten._flash_attention_forward.default, query, query, key, key, None, None, 6, 10, 0.0, False, False))
    assert count == 2 * 2 * (4 * 6 * 10 * 8) * ROWS


OPERATORS: dict[str, tuple[str, Any, fx.Node]] = {
    "matrix and vector": ("product", 2 * 6 * ROWS, call(aten.mv.default, (ROWS,), (ROWS, 6), (6,))),
    "two vectors": ("product", 2 * ROWS, call(aten.dot.default, (), (ROWS,), (ROWS,))),
    "products added": ("product", 2 * 3 * 6 * 8 * ROWS, call(aten.baddbmm.default, (3, ROWS, 8), (8,), (3, ROWS, 6), (3, 6, 8))),
    "products summed": ("product", 2 * 3 * 6 * 8 * ROWS, call(aten.addbmm.default, (ROWS, 8), (8,), (3, ROWS, 6), (3, 6, 8))),
    "distances": ("product", 3 * 6 * 10 * ROWS, call(aten._cdist_forward.default, (ROWS, 10), (ROWS, 6), (10, 6), 2.0, None)),
    "pooling": ("pooling", 9 * 2 * 4 * 4 * ROWS, call(aten.avg_pool2d.default, (ROWS, 2, 4, 4), (ROWS, 2, 12, 12), [3, 3])),
    "sum": ("reduction", 6 * ROWS, call(aten.sum.dim_IntList, (ROWS,), (ROWS, 6), [1])),
    "softmax": ("softmax", 5 * 6 * ROWS, call(aten._softmax.default, (ROWS, 6), (ROWS, 6), 1, False)),
    "norm": ("normalization", 8 * 6 * ROWS, call(aten.native_layer_norm.default, (ROWS, 6), (ROWS, 6), [6], (6,), (6,), 1e-5)),
    "tanh": ("elementwise", 6 * ROWS, call(aten.tanh.default, (ROWS, 6), (ROWS, 6))),
    "copy": ("movement", 0, call(aten.clone.default, (ROWS, 6), (ROWS, 6))),
    "scatter": ("movement", 6 * ROWS, call(aten.scatter_add.default, (ROWS, 6), (ROWS, 6), 0, (ROWS, 6), (ROWS, 6))),
    "view": ("view", None, call(aten.reshape.default, (6, ROWS), (ROWS, 6), [6, -1])),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATORS)
def test_kind_and_operations(name: str) -> None:
    kind, flops, node = OPERATORS[name]
    assert kind_of(node) == kind
    assert flops is None or sympy.simplify(flops_of(node) - flops) == 0


def test_what_is_read_is_what_lies_in_memory_and_each_input_once() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["type"] = ValueType((ROWS, 1), torch.float32)
    wide = graph.call_function(aten.expand.default, (x, [-1, 100]))
    wide.meta["type"] = ValueType((ROWS, 100), torch.float32)
    square = graph.call_function(aten.mul.Tensor, (wide, wide))
    square.meta["type"] = wide.meta["type"]
    assert bytes_read_by(square) == 4 * ROWS


def test_a_gather_reads_as_much_as_it_makes() -> None:
    assert bytes_read_by(call(aten.index_select.default, (ROWS, 6), (1000, 6), 0, (ROWS,))) == 4 * 6 * ROWS + 4 * ROWS


def test_every_rule_names_an_operator_of_torch() -> None:
    assert not [name for name in RULES if not (hasattr(aten, name) or hasattr(torch.ops.prims, name))]
    assert set(RULES) >= GATHERS
