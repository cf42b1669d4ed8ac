"""Oracles and assertions: what plain PyTorch would have computed, and whether a pipeline computed it too.

The oracle is the plain loop over microbatches, written as a user would write it, on a deep copy of the model.
It knows nothing of traces, stages or schedules, so that it cannot share a fault with the compiler. It is not
fast, and it is no substitute for `Pipeline.verify`, which also says *where* a program first differs.

    expected = plain_step(model, args, kwargs, rows_of_microbatches=(2, 2, 2, 1))
    assert_close_by_tensor(actual.grad, expected.gradients["head.weight"], 1e-12, "head.weight")

Random models and whole random cases for property tests come from `pdcompiler.strategies`, re-exported here.
"""

import copy
import dataclasses
import difflib
import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pdcompiler.comparison import assert_close_by_tensor as assert_close_by_tensor
from pdcompiler.comparison import assert_same as assert_same
from pdcompiler.comparison import assert_same_parts, detached, leaves, map_structure
from pdcompiler.comparison import largest_difference as largest_difference
from pdcompiler.core.printer import show
from pdcompiler.random_model import Batch as Batch
from pdcompiler.random_model import ModelSpec as ModelSpec
from pdcompiler.random_model import RandomModel as RandomModel
from pdcompiler.strategies import Case as Case
from pdcompiler.strategies import cases as cases
from pdcompiler.strategies import features as features
from pdcompiler.strategies import microbatch_counts as microbatch_counts
from pdcompiler.strategies import partitions as partitions
from pdcompiler.strategies import random_models as random_models
from pdcompiler.strategies import row_counts as row_counts
from pdcompiler.strategies import schedules as schedules
from pdcompiler.strategies import specs as specs

LossFunction = Callable[[Any, Any], Tensor]
BatchDims = Mapping[str | int, int | None]  # argument name, position, or "target" -> the dim to split, None: whole


@dataclasses.dataclass(frozen=True)
class Observed:
    """What one training step gave: the loss, each microbatch's outputs, and what the model holds afterwards."""

    loss: Tensor
    outputs: list[Any]
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]


def plain_step(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    target: Any = None,
    loss_fn: LossFunction | None = None,
    rows_of_microbatches: Sequence[int],
    weights: Sequence[float] | None = None,
    batch_dims: BatchDims | None = None,
    training: bool = True,
) -> Observed:
    """The loop `sum_i w_i * loss_i`; w_i is the microbatch's share of the rows unless given.

    Works on a deep copy, without earlier gradients; a microbatch of weight 0 runs forward only. Modes that were
    set per submodule stay, unless the model as a whole is in the other mode.
    """
    replica = _replica(model, training)
    rows = sum(rows_of_microbatches)
    shares = [size / rows for size in rows_of_microbatches] if weights is None else list(weights)
    dims = _dims_by_name(model, batch_dims)
    inputs = _by_name(model, args, kwargs)
    own = "loss_target" if "target" in inputs else "target"  # the model may have a target of its own
    batch: dict[str, Any] = {**inputs, own: target}
    total: Tensor | None = None
    outputs = []
    start = 0
    for size, share in zip(rows_of_microbatches, shares, strict=True):
        part = _rows(batch, start, size, rows, dims)
        start += size
        given = replica(*list(part.values())[: len(args)], **{name: part[name] for name in kwargs})
        if share != 0:
            loss = share * loss_of(given, part[own], loss_fn)
            if loss.requires_grad:  # not so where every parameter is frozen
                loss.backward()  # type: ignore[no-untyped-call]
            total = loss.detach() if total is None else total + loss.detach()
        outputs.append(detached(given))
    return Observed(
        loss=torch.zeros(()) if total is None else total,
        outputs=outputs,
        gradients={name: parameter.grad for name, parameter in replica.named_parameters()},
        buffers=dict(replica.named_buffers()),
    )


def plain_eval(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The outputs of a copy of the model in evaluation mode, on the whole batch at once."""
    with torch.no_grad():
        return detached(_replica(model, training=False)(*detached(tuple(args)), **detached(dict(kwargs))))


def loss_of(outputs: Any, target: Any, loss_fn: LossFunction | None) -> Tensor:
    """`loss_fn(outputs, target)`, or the model's own loss: outputs["loss"], outputs.loss, or a scalar output."""
    if loss_fn is not None:
        return loss_fn(outputs, target)
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", outputs)
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        raise TypeError(f"no scalar loss in outputs of type {type(outputs).__name__}: give loss_fn")
    return loss


def split_rows(rows: int, microbatches: int) -> tuple[int, ...]:
    """Rows of each microbatch, as `torch.tensor_split`; empty ones are dropped. (7, 4) -> (2, 2, 2, 1)."""
    sizes = [rows // microbatches + (index < rows % microbatches) for index in range(microbatches)]
    return tuple(size for size in sizes if size > 0)


def rows_of(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], batch_dims: BatchDims | None = None
) -> int:
    """Rows of the batch: the split dim of its first tensor."""
    dims = _dims_by_name(model, batch_dims)
    for name, value in _by_name(model, args, kwargs).items():
        dim = dims.get(name, 0)
        for leaf in leaves(value):
            if isinstance(leaf, Tensor) and dim is not None and leaf.dim() > dim:
                return leaf.size(dim)
    raise ValueError("no tensor among the arguments carries the batch's rows")


def join_outputs(outputs: Sequence[Any], whole: Any, weights: Sequence[float]) -> Any:
    """Outputs of microbatches as one: rows joined along the dim in which `whole`, of the whole batch, is longer.

    What has no such dim: floating scalars are weighted means, anything else must agree over the microbatches.
    """

    def join(path: str, whole_leaf: Any, *parts: Any) -> Any:
        if not isinstance(whole_leaf, Tensor):
            assert all(part == parts[0] for part in parts), f"{path}: {parts} over microbatches"
            return parts[0]
        longer = [dim for dim, size in enumerate(parts[0].shape) if size != whole_leaf.size(dim)]
        if longer:
            return torch.cat(parts, longer[0])
        if whole_leaf.dim() == 0 and whole_leaf.is_floating_point():
            shares = [(weight / sum(weights), part) for weight, part in zip(weights, parts, strict=True) if weight]
            return torch.stack([share * part for share, part in shares]).sum(0)
        assert all(torch.equal(part, parts[0]) for part in parts), f"{path}: differs over microbatches, has no rows"
        return parts[0]

    return outputs[0] if len(outputs) == 1 else map_structure(join, whole, *outputs)


def assert_transparent(
    model: nn.Module,
    *args: Any,
    target: Any = None,
    loss_fn: LossFunction | None = None,
    world_size: int = 2,
    schedule: Any = "1f1b",
    microbatches: int = 4,
    partition: Any = None,
    tolerance: float = 1e-12,
    batch_dims: BatchDims | None = None,
    outputs: bool = True,
    **kwargs: Any,
) -> None:
    """Compile a copy of the model, take one step in this process, and compare everything with the plain loop."""
    import pdcompiler  # here, since the package may import this module

    sizes = split_rows(rows_of(model, args, kwargs, batch_dims), microbatches)
    expected = plain_step(
        model, args, kwargs, target=target, loss_fn=loss_fn, rows_of_microbatches=sizes, batch_dims=batch_dims,
        training=model.training,
    )  # fmt: skip
    pipe: Any = pdcompiler.compile(
        copy.deepcopy(model), world_size, example_args=args, example_kwargs=kwargs, loss_fn=loss_fn,
        schedule=schedule, microbatches=microbatches, partition=partition,
        batch_dims=_dims_by_name(model, batch_dims),
    )  # fmt: skip
    result = pipe.step(*args, target=target, outputs="all" if outputs else "none", **kwargs)
    assert_close_by_tensor(result.loss.detach(), expected.loss, tolerance, "loss")
    if outputs:
        with torch.no_grad():
            whole = _replica(model, model.training)(*detached(args), **detached(kwargs))
        assert_same(result.outputs, join_outputs(expected.outputs, whole, sizes), tolerance, "outputs")
    _assert_same_model(pipe, model, expected, tolerance)


def assert_shows(level: Any, text: str) -> None:
    """A level (Trace, Stage, Program, RankProgram, fx.Graph) prints as this text, whatever the text's indentation."""
    __tracebackhide__ = True
    actual, expected = show(level), textwrap.dedent(text).strip()
    if actual != expected:
        lines = difflib.unified_diff(expected.splitlines(), actual.splitlines(), "expected", "actual", lineterm="", n=2)
        raise AssertionError("\n".join(["the text differs", *lines, "", "actual:", actual]))


def _assert_same_model(pipe: Any, model: nn.Module, expected: Observed, tolerance: float) -> None:
    """Gradients, buffers and the untouched weights, all under the model's own names."""
    parameters, buffers, state = dict(pipe.named_parameters()), dict(pipe.named_buffers()), pipe.state_dict()
    assert_same_parts("parameters", sorted(expected.gradients), sorted(parameters))
    assert_same_parts("buffers", sorted(expected.buffers), sorted(buffers))
    assert_same_parts("state_dict", sorted(model.state_dict()), sorted(state))
    for name, gradient in expected.gradients.items():
        assert_close_by_tensor(parameters[name].grad, gradient, tolerance, f"gradient of {name}")
    for name, buffer in expected.buffers.items():
        assert_close_by_tensor(buffers[name], buffer, tolerance, f"buffer {name}")
    for name, value in model.state_dict().items():
        assert_close_by_tensor(state[name].detach(), expected.buffers.get(name, value), tolerance, f"state {name}")


def _replica(model: nn.Module, training: bool) -> nn.Module:
    replica = copy.deepcopy(model)
    replica.zero_grad(set_to_none=True)
    return replica if replica.training == training else replica.train(training)


def _by_name(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Each argument, positional ones first, under the name that forward gives it."""
    return {**{_name(model, place): value for place, value in enumerate(args)}, **kwargs}


def _dims_by_name(model: nn.Module, batch_dims: BatchDims | None) -> dict[str, int | None]:
    return {_name(model, key) if isinstance(key, int) else key: dim for key, dim in (batch_dims or {}).items()}


def _name(model: nn.Module, place: int) -> str:
    parameters = list(inspect.signature(model.forward).parameters.values())
    plain = [each.name for each in parameters if each.kind == inspect.Parameter.POSITIONAL_OR_KEYWORD]
    return plain[place] if place < len(plain) else f"{place}"


def _rows(batch: dict[str, Any], start: int, size: int, rows: int, dims: dict[str, int | None]) -> dict[str, Any]:
    """The same arguments with `size` rows from `start`; copies, so that the caller's are safe from in-place ops."""

    def cut(value: Any, dim: int | None) -> Any:
        splits = dim is not None and value.dim() > dim and value.size(dim) == rows
        part = value.detach().narrow(dim, start, size) if splits else value.detach()
        return part.clone().requires_grad_(value.requires_grad)

    def cut_argument(name: str, argument: Any) -> Any:
        dim = dims.get(name, 0)
        return map_structure(lambda _, leaf: cut(leaf, dim) if isinstance(leaf, Tensor) else leaf, argument)

    return {name: cut_argument(name, argument) for name, argument in batch.items()}
