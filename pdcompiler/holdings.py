"""What this process holds of the model: parameters and buffers of its ranks' stages, under the model's own names.

A model on the meta device gets memory for these alone, filled by `init` or by load_state_dict. Not here: gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pdcompiler.core.errors import CompileError
from pdcompiler.core.partition import Partition

Initialize = Callable[[str, Tensor], None]


class Holdings:
    """Tensors by canonical name. The parameters are the model's own objects, unless the model is on the meta device."""

    def __init__(self, model: nn.Module, loss_fn: Any, device: torch.device | None, init: Initialize | None) -> None:
        self.model = model
        self.device = device
        self.init = init
        self.extra = loss_fn if isinstance(loss_fn, nn.Module) else None
        self.parameters: dict[str, nn.Parameter] = {}
        self.buffers: dict[str, Tensor] = {}
        self.unfilled: set[str] = set()
        self.elsewhere: set[str] = set()
        """Buffers that a stage of another process writes: what is here may be old, and is given to nobody."""
        self.persistent = set(model.state_dict())

    def hold(self, partition: Partition, stages: Iterable[int]) -> None:
        """Take the parameters of the given stages, and all buffers of the model (they are small, and any stage may read one)."""
        names = {name for stage in stages for name in partition.stages[stage].parameters}
        for name, parameter in self.model.named_parameters():
            if name in names:
                self.parameters[name] = self._held(name, parameter)  # type: ignore[assignment]
        for name, buffer in self.model.named_buffers():
            self.buffers[name] = self._held(name, buffer)
        if self.extra is not None:
            self.buffers |= {f"loss_fn.{name}": buffer for name, buffer in self.extra.named_buffers()}

    def _held(self, name: str, tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor
        if (known := self.parameters.get(name, self.buffers.get(name))) is not None:
            return known
        memory = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=self.device)
        held = nn.Parameter(memory, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else memory
        if self.init is None:
            self.unfilled.add(name)
        else:
            with torch.no_grad():
                self.init(name, held)
        return held

    def sizes(self) -> dict[str, int]:
        """Bytes of every parameter and buffer of the model and its loss, held here or elsewhere."""
        named = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        if self.extra is not None:
            named |= {f"loss_fn.{name}": buffer for name, buffer in self.extra.named_buffers()}
        return {name: tensor.numel() * tensor.element_size() for name, tensor in named.items()}

    def tensors(self, names: Iterable[str]) -> tuple[Tensor, ...]:
        """The tensors of these names, without autograd. Raises CompileError where one was never filled."""
        wanted = list(names)
        if not self.unfilled.isdisjoint(wanted):
            missing = sorted(self.unfilled)
            some = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
            raise CompileError(
                f"{len(missing)} tensors of a model on the meta device have no values: {some}",
                ways_out=("pipe.load_state_dict(state)", "compile(..., init=function of (name, tensor))"),
            )
        return tuple((self.parameters[name] if name in self.parameters else self.buffers[name]).detach() for name in wanted)

    def state_dict(self) -> dict[str, Tensor]:
        """What is held, under every name that the model's own state_dict has for it."""
        first = self._first_names()
        held = {**self.parameters, **self.newest_buffers()}
        return {name: held[first[name]].detach() for name in self.model.state_dict() if first.get(name) in held}

    def newest_buffers(self) -> dict[str, Tensor]:
        """The buffers whose values here are the newest there are."""
        return {name: buffer for name, buffer in self.buffers.items() if name not in self.elsewhere}

    def load_state_dict(self, state: Mapping[str, Tensor], strict: bool = True) -> None:
        """Copy values in by name. Raises CompileError, before anything is changed, for missing or unexpected names or shapes."""
        first = self._first_names()
        held: dict[str, Tensor] = {**self.parameters, **self.buffers}
        wanted = {name for name in self.persistent if first.get(name) in held}
        missing = sorted(name for name in wanted - state.keys() if first[name] not in self.elsewhere)
        unexpected = sorted(state.keys() - self.persistent)
        wrong = [
            f"{name}: {list(state[name].shape)} for {list(held[first[name]].shape)}"
            for name in sorted(wanted & state.keys()) if state[name].shape != held[first[name]].shape
        ]
        if wrong or (strict and (missing or unexpected)):
            found = {"missing": missing, "unexpected": unexpected, "shapes": wrong}
            lines = [f"{kind}: {names}" for kind, names in found.items() if names]
            raise CompileError("the state is for another model\n  " + "\n  ".join(lines))
        with torch.no_grad():
            for name in wanted & state.keys():
                held[first[name]].copy_(state[name])
                self.unfilled.discard(first[name])

    def _first_names(self) -> dict[str, str]:
        first: dict[int, str] = {}
        named = [*self.model.named_parameters(remove_duplicate=False), *self.model.named_buffers(remove_duplicate=False)]
        return {name: first.setdefault(id(tensor), name) for name, tensor in named}
