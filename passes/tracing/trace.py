"""Record loss and all gradients of one microbatch as one graph, from the real autograd engine.

The model is wrapped as (loss, detached outputs) and recorded on fake tensors by AOT autograd's joint export *of the eager
module itself*, so custom autograd Functions, no_grad, detach, autocast, tied and frozen parameters mean what they mean in
plain PyTorch. (torch.export is no way to this: it drops the backward of a custom Function, silently.)

This is the one file that touches torch's private API: aot_export_joint_with_descriptors, FakeTensorMode, ShapeEnv and the
exporting flags. What it returns is ours alone (`core/ir.py`). Nothing of the user's is changed: attributes of every module,
random state and hooks are as before.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import is_dataclass
from types import SimpleNamespace
from typing import Any

import numpy
import sympy
import torch
import torch.compiler
from torch import Tensor, fx, nn
from torch._dynamo.source import ConstantSource
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from pdcompiler.core.batch import Batch
from pdcompiler.core.errors import CompileError
from pdcompiler.core.explain import explain_failure
from pdcompiler.core.ir import Captured, Input, Output
from pdcompiler.core.loss import LossFunction, Whole
from pdcompiler.core.provenance import provenance


def capture_joint(
    model: nn.Module,
    batch: Batch,
    *,
    rows: int,
    symbolic: bool,
    gradients: bool,
    loss_fn: LossFunction | None = None,
    device: torch.device | None = None,
) -> Captured:
    """Trace a microbatch of `rows` rows; with `symbolic`, for any number of rows that the result admits.

    gradients: whether the backward is part of it (it is left out where no parameter is trainable).   device: where a model
    on the meta device will live.   Raises CompileError, with the user's source line, where the model cannot be traced.
    """
    whole = Whole(model, loss_fn, batch)
    shapes = ShapeEnv(duck_shape=True)
    mode = FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True)
    inputs = [_fake_input(mode, name, t, batch.dims[name], rows, symbolic) for name, t in batch.tensors.items()]
    trainable = gradients and any(p.requires_grad for p in model.parameters())
    with untouched(whole), contextlib.ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(trainable))
        stack.enter_context(_exporting())
        if device is not None:
            _meta_to_fake(whole, mode, device)
        try:
            with provenance(whole), mode, _sparing(), _no_numbers_drawn():
                captured = aot_export_joint_with_descriptors(stack, whole, tuple(inputs))
        except CompileError:
            raise
        except Exception as error:
            raise explain_failure(error, model) from error
        symbol = _row_symbol(inputs, batch)
        return _captured(captured.graph_module, whole, batch, shapes, symbol, rows)


@contextlib.contextmanager
def _no_numbers_drawn() -> Iterator[None]:
    """Raise CompileError where a forward draws from Python's or numpy's generator: the trace would have one number for ever."""
    before = random.getstate(), str(numpy.random.get_state())
    yield
    after = random.getstate(), str(numpy.random.get_state())
    for name, one, other in zip(("Python's random", "numpy"), before, after, strict=True):
        if one != other:
            raise CompileError(
                f"the model's forward draws numbers from {name}: a compiled step would use the same ones each time",
                ways_out=("draw with torch, as torch.rand(())", "draw outside, and give the number as an input"),
            )


def _fake_input(mode: FakeTensorMode, name: str, tensor: Tensor, dim: int | None, rows: int, symbolic: bool) -> Tensor:
    sizes = [rows if i == dim else size for i, size in enumerate(tensor.shape)]
    example = torch.empty(sizes, dtype=tensor.dtype, device=tensor.device)
    dynamic = [DimDynamic.DUCK if symbolic and i == dim else DimDynamic.STATIC for i in range(tensor.dim())]
    context: Any = StatelessSymbolicContext(dynamic_sizes=dynamic)
    return mode.from_tensor(example, symbolic_context=context, source=ConstantSource(name))


def _row_symbol(inputs: list[Tensor], batch: Batch) -> sympy.Symbol | None:
    for tensor, dim in zip(inputs, batch.dims.values(), strict=True):
        size: Any = None if dim is None else tensor.shape[dim]
        if isinstance(size, torch.SymInt):
            return size.node.expr if isinstance(size.node.expr, sympy.Symbol) else None
    return None


def _meta_to_fake(whole: nn.Module, mode: FakeTensorMode, device: torch.device) -> None:
    """Parameters and buffers on the meta device are traced as if they were on `device`; put back by `untouched`."""
    made: dict[int, Tensor] = {}
    for module in whole.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is None or not tensor.is_meta:
                    continue
                if id(tensor) not in made:
                    with mode:
                        fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
                        is_parameter = held is module._parameters
                        made[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if is_parameter else fake
                held[name] = made[id(tensor)]  # type: ignore[assignment]


@contextlib.contextmanager
def untouched(root: nn.Module) -> Iterator[None]:
    """Whatever runs inside, the attributes of every module and all random state are as before afterwards."""
    kept = [(module, dict(module.__dict__)) for module in root.modules()]
    held: dict[int, tuple[Any, Any]] = {}
    lifted = {id(tensor) for tensor in (*root.parameters(), *root.buffers())}  # inputs of the trace: never written
    for _, attributes in kept:
        _keep(attributes.values(), held, lifted)
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    states = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        for module, attributes in kept:
            module.__dict__.clear()
            module.__dict__.update(attributes)
        for box, content in held.values():
            _put_back(box, content)
        random.setstate(states[0])
        numpy.random.set_state(states[1])
        torch.set_rng_state(states[2])
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)


def _keep(values: Iterable[Any], held: dict[int, tuple[Any, Any]], lifted: set[int]) -> None:
    """Copies, by identity, of what forward might change: containers, fields of plain data objects, tensors; also inside each."""
    for value in values:
        is_data = is_dataclass(value) and not isinstance(value, type)
        box = vars(value) if (is_data and hasattr(value, "__dict__")) or isinstance(value, SimpleNamespace) else value
        if id(box) in held or id(box) in lifted:
            continue
        if isinstance(box, Tensor) and not box.is_meta:
            held[id(box)] = (box, (box._version, box.detach().clone()))
        elif isinstance(box, (dict, list, set, deque)):
            held[id(box)] = (box, box.copy())
        if isinstance(box, (dict, list, set, deque, tuple)):
            _keep(list(box.values() if isinstance(box, dict) else box), held, lifted)


def _put_back(box: Any, content: Any) -> None:
    if isinstance(box, Tensor):
        version, values = content
        if box._version != version:
            box.detach().copy_(values)
        return
    box.clear()
    (box.update if isinstance(box, (dict, set)) else box.extend)(content)


@contextlib.contextmanager
def _exporting() -> Iterator[None]:
    """Hugging Face models take data-dependent short cuts unless they believe they are being exported."""
    before = torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag
    torch.compiler._is_compiling_flag = torch.compiler._is_exporting_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag = before


@contextlib.contextmanager
def _sparing() -> Iterator[None]:
    """Without what a trace does not need: graphs as Python source, and collecting garbage of which there is little."""
    collects = gc.isenabled()
    gc.disable()
    try:
        with _use_lazy_graph_module(True):
            yield
    finally:
        if collects:
            gc.enable()


def _captured(
    module: fx.GraphModule, whole: Whole, batch: Batch, shapes: ShapeEnv, symbol: sympy.Symbol | None, rows: int
) -> Captured:
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    names = list(batch.tensors)
    inputs = [_input(node.meta["desc"], names) for node in placeholders]
    output = module.graph.output_node()
    has_loss = whole.found.has_loss
    outputs = [_output(described, has_loss, names) for described in output.meta["desc"]]
    assert whole.found.structure is not None
    return Captured(
        module, inputs, outputs, whole.found.structure, tuple(whole.found.left_out), whole.canonical(), symbol,
        rows if symbol is None else None, _admission(shapes, symbol, rows),
    )


def _name(target: str) -> str:
    """The name in the user's model: without the wrapper's part."""
    return target.removeprefix("model.")


def _input(described: Any, names: list[str]) -> Input:
    kind = type(described).__name__
    if kind == "ParamAOTInput":
        return Input("parameter", _name(described.target))
    if kind == "BufferAOTInput":
        return Input("buffer", _name(described.target))
    if kind == "PlainAOTInput":
        return Input("batch", names[described.idx])
    if kind == "TangentAOTInput" and type(described.output).__name__ == "PlainAOTOutput" and described.output.idx == 0:
        return Input("loss_weight", "loss_weight")
    if kind == "TangentAOTInput" and type(described.output).__name__ == "InputMutationAOTOutput":
        raise _mutation(described.output.mutated_input, names)
    raise CompileError(f"the model's inputs have a form that is not supported: {described}")


def _mutation(mutated: Any, names: list[str]) -> CompileError:
    """What is changed in place and may not be (a buffer only by a value that has a gradient)."""
    if type(mutated).__name__ == "BufferAOTInput":
        buffer = f"forward writes a value that has a gradient to buffer {_name(mutated.target)}"
        return CompileError(buffer, ways_out=("write its detach()", "write it under torch.no_grad()"))
    is_parameter = type(mutated).__name__ == "ParamAOTInput"
    what = f"parameter {_name(mutated.target)}" if is_parameter else f"input {names[mutated.idx]}"
    ways_out = ("change a copy", "do it after the step, outside of forward")
    return CompileError(f"forward changes the {what} in place", ways_out=ways_out)


def _output(described: Any, has_loss: bool, names: list[str]) -> Output | None:
    """What an output of the joint graph is; None for the gradients of what needs none."""
    if described is None:
        return None
    kind = type(described).__name__
    if kind == "PlainAOTOutput":
        index = described.idx - has_loss
        return Output("loss", "loss") if index < 0 else Output("output", str(index))
    if kind == "GradAOTOutput" and type(described.grad_of).__name__ == "ParamAOTInput":
        return Output("gradient", _name(described.grad_of.target))
    if kind == "InputMutationAOTOutput":
        if type(described.mutated_input).__name__ == "BufferAOTInput":
            return Output("buffer", _name(described.mutated_input.target))
        raise _mutation(described.mutated_input, names)
    raise CompileError(f"the model's outputs have a form that is not supported: {described}")


def _admission(shapes: ShapeEnv, symbol: sympy.Symbol | None, rows: int) -> Callable[[int], bool]:
    """For which numbers of rows the trace is right: the guards that its symbol carries, and its range (2 and more)."""
    if symbol is None:
        return lambda r: r == rows
    guards = [guard.expr for guard in shapes.guards]
    bounds = shapes.var_to_range[symbol]

    @functools.cache
    def admits(r: int) -> bool:
        if r < 2 or not bounds.lower <= r <= bounds.upper:
            return False
        return all(bool(guard.subs(symbol, r)) for guard in guards)

    return admits
