"""Read a captured joint graph into our own Trace.

    before                                            after
    %primals_7 : BufferAOTInput(...)                  mlp_0_weight, x, rows, ... named by what they are
    %sym_size_int = sym_size(x, 0)                    gone: integers are arithmetic on the one placeholder `rows`
    %mul_20 = mul(sym_size_int, 4)                    mul = rows * 4
    %addmm_1 = addmm(...)  meta: torch's              mlp_0_addmm = addmm(...)  meta: ours (core/ir.py), in words
    %detach_1 = detach(addmm_1)                       gone: without autograd it is the identity
    %view = view(x, [...])                            reshape(x, [...]), for any memory layout
    %t_1 = t(t(x))                                    gone: it is x, in shape and in layout

Nodes are named after the module that made them (`d_` before those of the backward), what nobody reads is dropped, and what a
user must know is found: gradients that a custom Function injects whatever the loss, marks of torch.utils.checkpoint.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn

from pdcompiler.core.errors import CompileError
from pdcompiler.core.ir import RESERVED, ROWS, Captured, Input, ModuleCall, Output, Trace, ValueType, is_backward, type_of, where
from pdcompiler.core.names import identifier
from pdcompiler.core.values import is_view

aten = torch.ops.aten
VIEWS = (aten.view.default, aten._unsafe_view.default)
"""Recorded for memory layouts that may be others at run time: received values are row-major, and fake kernels err about
strides (native_batch_norm's does). A reshape means the same and takes any layout."""
SUMS = (aten.add.Tensor, aten.sub.Tensor)
PRODUCTS = (aten.mul.Tensor, aten.mm.default, aten.bmm.default)
IDENTITIES = (aten.detach.default, aten.alias.default)
SWAPS = (aten.t.default, aten.transpose.int)
"""Each undoes itself. Autograd has a weight's gradient go through three."""
ARITHMETIC: dict[str, Callable[..., Any]] = {
    "Add": operator.add, "Mul": operator.mul, "FloorDiv": operator.floordiv, "Mod": operator.mod, "PythonMod": operator.mod,
    "IntTrueDiv": operator.truediv, "FloatTrueDiv": operator.truediv, "ToFloat": float, "FloatPow": operator.pow,
    "Max": max, "Min": min,
}  # fmt: skip
"""By the names of sympy's and torch's classes: what takes two numbers is applied from left to right."""


def read_trace(captured: Captured) -> Trace:
    """See the module's docstring."""
    reader = _Reader(captured)
    outputs, nodes = reader.copy()
    graph = reader.graph
    for output, node in zip(outputs, nodes, strict=True):
        if output.kind == "loss" and node.op == "call_function":
            node._rename("loss")
    graph.output(tuple(nodes))
    graph.eliminate_dead_code()
    dims = tuple(_row_dim(node) for output, node in zip(outputs, nodes, strict=True) if output.kind == "output")
    return Trace(
        graph, reader.constants, reader.inputs, tuple(outputs), captured.result, dims, captured.canonical,
        captured.rows, captured.admits, _warnings(captured, graph, outputs),
    )


class _Reader:
    """One walk over the captured graph."""

    def __init__(self, captured: Captured) -> None:
        self.captured = captured
        self.graph = fx.Graph()
        self.constants = nn.Module()
        self.inputs: dict[str, Input] = {}
        self.copies: dict[fx.Node, Any] = {}
        self.integers: dict[sympy.Expr, fx.Node] = {}

    def copy(self) -> tuple[list[Output], list[fx.Node]]:
        nodes = list(self.captured.module.graph.nodes)
        placeholders = [node for node in nodes if node.op == "placeholder"]
        for node, meaning in zip(placeholders, self.captured.inputs, strict=True):
            self.copies[node] = self._placeholder(meaning, self._type(node.meta["val"]))
        if self.captured.symbol is not None:
            self.integers[ROWS] = self._placeholder(Input("rows", "rows"), ROWS)
        for node in nodes:
            if node.op in ("call_function", "get_attr"):
                self.copies[node] = self._copy(node)
        leaves = self.captured.module.graph.output_node().args[0]
        found = [(o, self.copies[n]) for o, n in zip(self.captured.outputs, leaves, strict=True)  # type: ignore[arg-type]
                 if o is not None and n is not None]
        return [output for output, _ in found], [node for _, node in found]

    def _placeholder(self, meaning: Input, type: Any) -> fx.Node:
        name = identifier(meaning.name, RESERVED if meaning.kind in ("parameter", "buffer", "batch") else ())
        node = self.graph.placeholder(name)
        node.meta.update(type=type, backward=meaning.kind == "loss_weight")
        self.inputs[node.name] = meaning
        return node

    def _copy(self, node: fx.Node) -> Any:
        if node.target in IDENTITIES:
            return self.copies[node.all_input_nodes[0]]
        if node.target in SWAPS and (swapped := self._swapped(node)) is not None:
            return swapped
        if node.target is aten.copy.default and (made := self._copied_whole(node)) is not None:
            return made
        type = self._type(node.meta.get("val"))
        if isinstance(type, (int, float, bool)):
            return type
        if isinstance(type, sympy.Basic) and type.free_symbols == {ROWS}:
            return self._integer(type)
        if node.op == "get_attr":
            value = getattr(self.captured.module, str(node.target))
            if not isinstance(value, Tensor):
                raise _held_object(node, value)
            self.constants.register_buffer(str(node.target), value)
            type = ValueType(tuple(value.shape), value.dtype, str(value.device))
        return self._node(node, type)

    def _swapped(self, node: fx.Node) -> fx.Node | None:
        """What is swapped twice."""
        first = node.args[0]
        is_same = isinstance(first, fx.Node) and (first.target, *first.args[1:]) == (node.target, *node.args[1:])
        return self.copies[first.args[0]] if is_same else None  # type: ignore[union-attr, index]

    def _copied_whole(self, node: fx.Node) -> fx.Node | None:
        """The value that a copy writes over a tensor of the same type: `self.buf = self.buf + 1` reads the old one just once."""
        made: Any = self.copies.get(node.args[1])  # type: ignore[arg-type]
        is_own = isinstance(made, fx.Node) and made.op == "call_function" and not is_view(made)
        return made if is_own and type_of(made) == self._type(node.meta.get("val")) else None

    def _node(self, node: fx.Node, type: Any) -> fx.Node:
        custom = node.meta.get("custom", {})
        path = str(custom.get("module", "")).removeprefix("model").removeprefix(".")
        backward = node.meta.get("partitioner_tag") == "is_backward"
        operation = str(node.target).split(".")[-2] if "." in str(node.target) else getattr(node.target, "__name__", "value")
        name = ("d_" if backward else "") + identifier(f"{path}_{operation.strip('_')}")
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: self.copies[n])
        target = aten.reshape.default if node.target in VIEWS else node.target
        copy = self.graph.create_node(node.op, target, args, kwargs, name=name)
        copy.meta.update(
            module=ModuleCall(path, int(custom.get("call", 0))), source=custom.get("source"), backward=backward,
            seq_nr=node.meta.get("seq_nr"), type=type, order=_order(node.meta.get("val")),
            checkpoint=bool(custom.get("checkpoint", False)),
        )
        return copy

    def _integer(self, expression: sympy.Expr) -> Any:
        """An integer, or a number made of integers, as arithmetic on `rows`."""
        if expression.is_Number:
            return int(expression) if expression.is_Integer else float(expression)
        if expression not in self.integers:
            operation = ARITHMETIC.get(type(expression).__name__)
            parts = [self._integer(part) for part in expression.args]
            if isinstance(expression, sympy.Pow) and expression.exp.is_Integer and expression.exp > 0:
                operation = operator.pow
            if operation is None:
                raise CompileError(f"the model computes with the number of rows in a way that is not supported: {expression}")
            node = parts[0]
            for further in [[part] for part in parts[1:]] or [[]]:
                node = self.graph.call_function(operation, (node, *further))
                node.meta.update(type=expression, module=ModuleCall(""), backward=False)
            self.integers[expression] = node
        return self.integers[expression]

    def _type(self, value: Any) -> Any:
        """A fake value as ValueType (tensors), tuple (of types) or sympy expression (integers), in the symbol ROWS."""
        if isinstance(value, Tensor):
            shape = tuple(self._type(size) for size in value.shape)
            return ValueType(shape, value.dtype, str(value.device))
        if isinstance(value, (tuple, list)):
            return tuple(self._type(item) for item in value)
        if hasattr(value, "node"):  # SymInt, SymFloat, SymBool
            expression = value.node.expr
            if self.captured.symbol is not None:
                expression = expression.subs(self.captured.symbol, ROWS)
            return int(expression) if expression.is_Integer else expression
        return value


def _held_object(node: fx.Node, value: Any) -> CompileError:
    """Of what is no tensor, a generator above all: what it gives would depend on the order in which stages ask it."""
    custom = next(iter(node.users)).meta.get("custom", {})
    ways_out = ("leave generator= out; compile(..., seed=) makes what is drawn reproducible",)
    return CompileError(
        f"an operation takes a {type(value).__name__} that the model holds", where=custom.get("source"),
        ways_out=ways_out if isinstance(value, torch.Generator) else ("give it tensors alone",),
    )  # fmt: skip


def _example(number: Any) -> Any:
    """An integer of a fake tensor, by its example value."""
    return number.node.hint if hasattr(number, "node") else number


def _order(value: Any) -> tuple[int, ...] | None:
    """The dimensions of a tensor from the largest stride to the smallest (0: of an expanded one), see `ir.order_of`."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return None
    sizes, strides = ([_example(n) for n in numbers] for numbers in (value.shape, value.stride()))
    if None in sizes or None in strides:  # the shape depends on data: such a value does not cross stages
        return None
    single = [dim for dim, size in enumerate(sizes) if size == 1]
    others = sorted((dim for dim in range(len(sizes)) if dim not in single), key=lambda dim: -(strides[dim] or float("inf")))
    return None if others == sorted(others) else (*single, *others)


def _row_dim(node: fx.Node) -> int | None:
    """The dimension of an output that carries the rows; -1 where more than one does, so that it can't be joined."""
    type = type_of(node)
    dims = [i for i, size in enumerate(type.shape) if isinstance(size, sympy.Basic) and ROWS in size.free_symbols]
    return None if not dims else dims[0] if len(dims) == 1 else -1


def _warnings(captured: Captured, graph: fx.Graph, outputs: Sequence[Output]) -> tuple[str, ...]:
    left_out = captured.left_out
    found = [f"the output {name} is of a type that can't leave the pipeline; it is None in the outputs" for name in left_out]
    injected = next(iter(_injected_gradients(graph, outputs)), None)
    if injected is not None:
        found.append(
            f"a gradient that does not depend on the loss enters the backward at {where(injected)}: it is added once per "
            "microbatch and not scaled by the microbatch's weight, as in a plain loop over microbatches"
        )
    if any(node.meta.get("checkpoint") for node in graph.nodes):
        found.append("torch.utils.checkpoint inside the model: values are right, but its activations are kept, not recomputed")
    return tuple(found)


def _injected_gradients(graph: fx.Graph, outputs: Sequence[Output]) -> list[fx.Node]:
    """Where gradients begin that do not depend on the loss's weight: they are added to ones that do, or are a parameter's."""
    depends: set[fx.Node] = {n for n in graph.nodes if n.op == "placeholder" and n.meta.get("backward")}
    zeros: set[fx.Node] = set()
    found: list[fx.Node] = []
    for node in graph.nodes:
        inputs = node.all_input_nodes
        if node.op == "call_function" and _is_zero(node, zeros):
            zeros.add(node)
        elif node.op == "call_function" and any(i in depends for i in inputs):
            depends.add(node)
            if node.target in SUMS and is_backward(node):
                found += [i for i in inputs if i not in depends | zeros]
    given: Any = graph.output_node().args[0]
    gradients = [node for output, node in zip(outputs, given, strict=True) if output.kind == "gradient"]
    return [_origin(node) for node in (*found, *gradients) if node not in depends | zeros]


def _is_zero(node: fx.Node, zeros: set[fx.Node]) -> bool:
    """Whether a value is zero by its making: zeros themselves, and what a backward, which is linear, makes of them."""
    if "zeros" in str(node.target) or ("full" in str(node.target) and node.args[1:2] == (0,)):
        return True
    if not is_backward(node) or not node.args:
        return False
    factors = node.args[:2] if node.target in PRODUCTS else node.args[:1]
    return all(i in zeros for i in node.all_input_nodes) if node.target in SUMS else any(f in zeros for f in factors)


def _origin(node: fx.Node) -> fx.Node:
    """The backward operation that a gradient goes back to."""
    while before := [i for i in node.all_input_nodes if is_backward(i)]:
        node = before[0]
    return node
