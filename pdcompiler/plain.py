"""Plain PyTorch's answer: the loop over microbatches, written as a user would write it, on a deep copy of the model.

It knows nothing of traces, stages or schedules, so that it cannot share a fault with the compiler. `Pipeline.verify` and
`pdcompiler.testing` compare with it. Not here: anything fast.
"""

import contextlib
import copy
import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pdcompiler.comparison import detached, leaves, map_structure
from pdcompiler.plain_draws import seeded_draws

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
    seeds: Sequence[int] | None = None,
) -> Observed:
    """The loop `sum_i w_i * loss_i`; w_i is the microbatch's share of the rows unless given.

    seeds: of the microbatches, where the model shall draw as a pipeline's does; None: from torch's own generators.

    Works on a deep copy, without earlier gradients; a microbatch of weight 0 runs forward only. Modes that were
    set per submodule stay, unless the model as a whole is in the other mode.
    """
    copied = replica(model, training)
    rows = sum(rows_of_microbatches)
    shares = [size / rows for size in rows_of_microbatches] if weights is None else list(weights)
    dims = dims_by_name(model, batch_dims)
    inputs = _by_name(model, args, kwargs)
    own = "loss_target" if "target" in inputs else "target"  # the model may have a target of its own
    batch: dict[str, Any] = {**inputs, own: target}
    total: Tensor | None = None
    outputs = []
    start = 0
    for index, (size, share) in enumerate(zip(rows_of_microbatches, shares, strict=True)):
        part = _rows(batch, start, size, rows, dims)
        start += size
        with contextlib.nullcontext() if seeds is None else seeded_draws(copied, seeds[index]):
            given = copied(*list(part.values())[: len(args)], **{name: part[name] for name in kwargs})
            if share != 0:
                loss = share * loss_of(given, part[own], loss_fn)
                if loss.requires_grad:  # not so where every parameter is frozen
                    loss.backward()  # type: ignore[no-untyped-call]
                total = loss.detach() if total is None else total + loss.detach()
        outputs.append(detached(given))
    return Observed(
        loss=torch.zeros(()) if total is None else total,
        outputs=outputs,
        gradients={name: parameter.grad for name, parameter in copied.named_parameters()},
        buffers=dict(copied.named_buffers()),
    )


def plain_eval(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The outputs of a copy of the model in evaluation mode, on the whole batch at once."""
    with torch.no_grad():
        return detached(replica(model, training=False)(*detached(tuple(args)), **detached(dict(kwargs))))


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
    dims = dims_by_name(model, batch_dims)
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


def replica(model: nn.Module, training: bool) -> nn.Module:
    """A deep copy without gradients, in training or evaluation mode."""
    copied = copy.deepcopy(model)
    copied.zero_grad(set_to_none=True)
    return copied if copied.training == training else copied.train(training)


def _by_name(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Each argument, positional ones first, under the name that forward gives it."""
    return {**{_name(model, place): value for place, value in enumerate(args)}, **kwargs}


def dims_by_name(model: nn.Module, batch_dims: BatchDims | None) -> dict[str, int | None]:
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
