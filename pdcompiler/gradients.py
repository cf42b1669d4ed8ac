"""Give parameters their gradients through autograd itself, so that hooks fire, once a step, and `.grad` is added to.

    plain autograd                                           here
    what a backward makes becomes `.grad` as it is           so does a gradient whose memory nothing else holds; one that shares
                                                             its memory (a view of an activation, of a weight) is copied

Not here: how gradients come to be (`compiler.py`), nor their norm (`clipping.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pdcompiler.core.storage import is_alone


class Give(torch.autograd.Function):
    """Nothing forwards; backwards, the gradients that it was given, which it lets go of: torch copies those that are held."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        given = (None, *ctx.gradients)
        ctx.gradients.clear()
        return given


def add_gradients(parameters: Mapping[str, nn.Parameter], gradients: Mapping[str, Tensor], own: Iterable[str] = ()) -> None:
    """gradients: handed over, the caller uses them no more.   own: those that are known to share memory with nothing, though
    they may be parts of one storage."""
    known = set(own)
    if gradients:
        given = [value.detach() if name in known or is_alone(value) else value for name, value in gradients.items()]
        with torch.enable_grad():
            source = Give.apply(given, *(parameters[name] for name in gradients))  # type: ignore[no-untyped-call]
        source.backward()
