"""The user's model, from `module:function`, and its example batch, with memory on the device where they are to run.

A model on the meta device gets random weights where it is to be measured: what operations take doesn't depend on values. They
are drawn so that values neither grow nor vanish (numbers that are almost zero are slow on many CPUs). Not here: tracing.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from pdcompiler.core.batch import Batch, read_batch
from pdcompiler.core.errors import CompileError
from pdcompiler.core.explanation import amount
from pdcompiler.core.measure import memory_of_computer

MODEL = "module:function; the function returns (model, example keyword arguments)"
CPU = torch.device("cpu")


def load(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """The model and the example batch that the user's function returns."""
    path, _, function = name.partition(":")
    sys.path.insert(0, "")
    try:
        made = getattr(importlib.import_module(path), function)()
        model, kwargs = made
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise CompileError(
            f"{name!r} gives no model: {type(error).__name__}: {error}",
            ways_out=("module:function, where function() returns (model, {argument: tensor})",),
        ) from error
    finally:
        sys.path.pop(0)
    if not isinstance(model, nn.Module) or not isinstance(kwargs, dict):
        raise CompileError(f"{name!r} returns {type(model).__name__} and {type(kwargs).__name__}, expected a model and a dict")
    return model, kwargs


def read_example(model: nn.Module, kwargs: dict[str, Any], device: torch.device | None) -> Batch:
    """The example as a batch on a device (None: where it is). What is on the meta device becomes zeros, which are
    valid indices."""
    batch = read_batch(model, (), kwargs, None, None)

    def moved(tensor: Tensor) -> Tensor:
        if tensor.is_meta:
            return torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
        return tensor if device is None else tensor.to(device)

    return replace(batch, tensors={name: moved(tensor) for name, tensor in batch.tensors.items()})


def parse_device(name: str) -> torch.device:
    """A device that can be measured, and is there."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise CompileError(f"--device is {name!r}: {str(error).splitlines()[0]}", ways_out=("cpu", "cuda")) from error
    _check_kind(device)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise CompileError(f"--device is {name!r}, this computer has {torch.cuda.device_count()} such", ways_out=("cpu",))
    return device


def _check_kind(device: torch.device) -> None:
    if device.type not in ("cpu", "cuda"):
        raise CompileError(f"there is no clock for device {str(device)!r}", ways_out=("--device cpu", "--device cuda"))


def to_device(model: nn.Module, device: torch.device | None) -> torch.device:
    """Move the model to the device (None: where most of it is, or the CPU) and give memory to what is on the meta device.
    Raises CompileError where its weights are larger than the device's memory."""
    tensors = {tensor for tensor in (*model.parameters(), *model.buffers())}
    device = device or next((tensor.device for tensor in tensors if not tensor.is_meta), CPU)
    _check_kind(device)
    needed = sum(tensor.nbytes for tensor in tensors)
    there = memory_of_computer() if device.type == "cpu" else torch.cuda.mem_get_info(device)[1]
    if needed > there:
        raise CompileError(
            f"the model's parameters and buffers need {amount(needed)}B, {device} has {amount(there)}B",
            ways_out=("profile it with fewer layers, pdcompiler fit --toml, and plan the whole with --machine",),
        )
    give_memory(model, device)
    model.to(device)
    return device


def is_on_meta(model: nn.Module) -> bool:
    """Whether any of its parameters or buffers has no memory."""
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def give_memory(model: nn.Module, device: torch.device) -> None:
    """Random values for what is on the meta device; tied parameters stay tied."""
    made: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None and tensor.is_meta:
                    if tensor not in made:
                        made[tensor] = _drawn(tensor, device)
                    held[name] = made[tensor]  # type: ignore[assignment]


def _drawn(tensor: Tensor, device: torch.device) -> Tensor:
    """Matrices with variance 1 / fan-in; ones elsewhere (masks let pass); zeros for whole numbers, which may be indices."""
    values = torch.ones(tensor.shape, dtype=tensor.dtype, device=device)
    if not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool):
        values.zero_()
    elif tensor.dim() > 1 and tensor.dtype != torch.bool:
        values.normal_(0.0, (tensor.shape[0] / max(tensor.numel(), 1)) ** 0.5)
    return nn.Parameter(values, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values
