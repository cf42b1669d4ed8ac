"""What one microbatch computes: the model's outputs and its loss.

`Whole` is the function that is traced: tensors in, (loss, detached outputs) out. `find_loss` says where the loss of a model
is. Both are also what plain PyTorch is asked for when a pipeline is verified. Not here: weights of losses, or microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pdcompiler.core.batch import Batch
from pdcompiler.core.errors import CompileError
from pdcompiler.core.structure import Structure, flatten

LossFunction = Callable[[Any, Any], Tensor]


@dataclass
class Found:
    """What a forward was seen to return: the structure of the outputs, whether there is a loss, values left out."""

    structure: Structure | None = None
    has_loss: bool = False
    left_out: list[str] = field(default_factory=list)


class Whole(nn.Module):
    """The model with its loss: tensors in, (loss, detached outputs) out. Remembers the structure of the outputs."""

    def __init__(self, model: nn.Module, loss_fn: LossFunction | None, batch: Batch) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn
        self.batch = batch
        self.found = Found()

    def canonical(self) -> dict[str, str]:
        """Every name of a parameter or buffer to the first name of the same tensor (in the model's own names)."""
        first: dict[int, str] = {}
        named = [*self.named_parameters(remove_duplicate=False), *self.named_buffers(remove_duplicate=False)]
        return {(own := name.removeprefix("model.")): first.setdefault(id(tensor), own) for name, tensor in named}

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """One microbatch. Buffers that forward reassigns are turned into in-place updates of the old ones."""
        args, kwargs, target = self.batch.structure.rebuild(tensors)
        before = {name: buffer for name, buffer in self.model.named_buffers()}
        outputs = self.model(*args, **kwargs)
        _write_back(self.model, before)
        loss = self._loss(outputs, target)
        self.found.left_out.clear()
        leaves, self.found.structure = flatten(outputs, "", self._leave_out)
        self.found.has_loss = loss is not None
        detached = [leaf.detach() for leaf in leaves.values()]
        return (*detached,) if loss is None else (loss, *detached)

    def _leave_out(self, name: str, value: Any) -> None:
        """Values of unknown types (a cache object) are None in the outputs; the user is warned."""
        self.found.left_out.append(f"{name} ({type(value).__name__})")

    def _loss(self, outputs: Any, target: Any) -> Tensor | None:
        loss = find_loss(outputs, target, self.loss_fn)
        if loss is None:
            if torch.is_grad_enabled():
                what = f"a tensor of shape {_shape(outputs)}" if isinstance(outputs, Tensor) else f"a {type(outputs).__name__}"
                raise CompileError(
                    f"no loss to be found in the model's output, {what}",
                    ways_out=(
                        "compile with loss_fn=, a function of (outputs, target)",
                        "let the model return its loss (a Hugging Face model does so when it is given labels)",
                    ),
                )
            return None
        if not isinstance(loss, Tensor):
            raise CompileError(
                f"the loss is a {type(loss).__name__}, a training step needs a tensor of one number",
                ways_out=("compute it from the outputs with torch",),
            )
        if loss.dim() and not (loss.dim() == 1 and loss.shape[0] == 1):
            raise CompileError(
                f"the loss has shape {_shape(loss)}, a training step needs one number", ways_out=("return its mean or sum",)
            )
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise CompileError(
                "the loss does not depend on any trainable parameter",
                ways_out=("check for detach, no_grad and frozen parameters",),
            )
        if loss.requires_grad:
            _check_leaves(loss)
        return loss.reshape(()) if loss.dim() else loss


def find_loss(outputs: Any, target: Any, loss_fn: LossFunction | None) -> Tensor | None:
    """loss_fn(outputs, target) where both are given; else outputs.loss, outputs["loss"] or a scalar output; else None."""
    if loss_fn is not None:
        return None if target is None and not torch.is_grad_enabled() else loss_fn(outputs, target)
    if isinstance(outputs, Tensor):
        return outputs if outputs.dim() == 0 else None
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    return loss if isinstance(loss, Tensor) else None


def _check_leaves(loss: Tensor) -> None:
    """Plain PyTorch gives a gradient to every trainable tensor that the loss depends on; here one that the traced modules do not
    own (a closure's: it alone is an ordinary tensor while they are traced) would get none, silently."""
    seen, todo = {loss.grad_fn}, [loss.grad_fn]
    while todo:
        function: Any = todo.pop()
        leaf = getattr(function, "variable", None)
        if isinstance(leaf, Tensor) and type(leaf) in (Tensor, nn.Parameter):
            raise CompileError(
                f"the loss depends on a trainable tensor of shape {_shape(leaf)} that is no parameter of the model",
                ways_out=("make it a parameter of one of the model's modules", "freeze or detach it"),
            )
        following = [f for f, _ in getattr(function, "next_functions", ()) if f is not None and f not in seen]
        seen.update(following)
        todo += following


def _write_back(model: nn.Module, before: dict[str, Tensor]) -> None:
    """`self.buf = self.buf + 1` becomes an update in place of the old buffer, which then is an output of the graph."""
    for name, buffer in model.named_buffers():
        old = before.get(name)
        if old is None or old is buffer:
            continue
        if old.shape != buffer.shape or old.dtype != buffer.dtype:
            raise CompileError(
                f"forward replaces buffer {name}, {_shape(old)} {old.dtype}, by one of {_shape(buffer)} {buffer.dtype}",
                ways_out=("keep its shape and dtype",),
            )
        old.copy_(buffer)
        path, _, last = name.rpartition(".")
        model.get_submodule(path)._buffers[last] = old


def _shape(tensor: Tensor) -> str:
    return f"[{', '.join(str(size) if isinstance(size, int) else 'rows' for size in tensor.shape)}]"
