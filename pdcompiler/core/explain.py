"""What a user is told when the model cannot be traced: what it did, on which line of theirs, and the ways out.

torch's own messages speak of its insides (symbols, guards, functional graphs), so they are told apart by their words here. Not
here: what this project itself refuses.
"""

from __future__ import annotations

import re
import traceback

from torch import Tensor, nn

from pdcompiler.core.errors import CompileError
from pdcompiler.core.provenance import OURS, TORCH

VALUES = ("Unbacked", "data-dependent", "data dependent", ".numpy() is not supported", "SymFloat.__format__")
"""In torch's messages: that a value was asked for, which a trace does not have."""


def explain_failure(error: Exception, model: nn.Module) -> CompileError:
    """A CompileError for an exception that came out of tracing."""
    kind = type(error).__name__
    text = str(error).strip() or kind
    reason = text.splitlines()[0]
    if "DataDependent" in kind or any(word in text for word in VALUES):
        return CompileError(
            f"the model decides by the values of a tensor, which are not known when it is compiled ({kind}: {reason})",
            where=user_line(error),
            ways_out=(
                "compute with tensors: torch.where (both sides are computed) or torch.cond for a choice, no .item()",
                "decide outside of the model and pass the answer as a Python value: forward(x, flag=True)",
            ),
        )
    if "entirely functional graph" in text:
        operation = re.search(r"target=torch\.ops\.aten\.(\w+)", text)
        return CompileError(
            f"forward changes a tensor in place that is neither a parameter, nor a buffer, nor made in forward; "
            f"the operation is {operation[1] if operation else 'unknown'}, the tensor perhaps {_plain_tensors(model)}",
            ways_out=("register it: self.register_buffer(name, tensor)", "change a copy"),
        )
    return CompileError(f"the model cannot be traced: {kind}: {reason}", where=user_line(error))


def user_line(error: Exception) -> str | None:
    """The innermost line of the user's code in a traceback, as "file:line: text"."""
    passes = str(OURS).removesuffix("pdcompiler") + "passes"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((TORCH, OURS, passes, "<"))]
    return f"{frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else None


def _plain_tensors(model: nn.Module) -> str:
    """The tensors that modules hold as plain attributes, by path."""
    held = [(path, name, value) for path, module in model.named_modules() for name, value in vars(module).items()]
    return ", ".join(f"{path}.{name}".strip(".") for path, name, value in held if isinstance(value, Tensor)) or "a global one"
