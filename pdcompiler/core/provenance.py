"""Who made a node: the module call and the line of the user's source.

While a model is traced inside `provenance(root)`, every node carries in its metadata the path of the module whose forward
made it, the number of that call (a module may be called more than once), and the source line of the user's code; backward
nodes inherit them from the forward operation that caused them. Nothing stays behind: hooks and modes are removed, also when
the trace fails.

Not here: what is done with it (`ir.py` reads it, `cut_stages` stages by it, errors print it).
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.traceback import annotate, preserve_node_meta
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

TORCH = str(Path(torch.__file__).parent)
OURS = str(Path(__file__).parents[1])
CHECKPOINT = str(Path(TORCH) / "utils" / "checkpoint.py")
_METHODS = ("size", "dim", "stride", "numel", "storage_offset", "untyped_storage", "is_floating_point")
_PROPERTIES = ("shape", "ndim", "dtype", "device", "layout", "requires_grad", "is_leaf", "is_quantized", "is_sparse", "is_cuda")
LOOKS = {getattr(Tensor, name) for name in _METHODS} | {getattr(Tensor, name).__get__ for name in _PROPERTIES}
"""What looks at a tensor and makes no node: most of all calls, which need no line."""


@functools.cache
def _is_users(file: str) -> bool:
    return not file.startswith((TORCH, OURS, "<")) and file != contextlib.__file__


def _is_caller(frame: FrameType) -> bool:
    """Whether a frame is this package's, which calls the user's model: below it, there is nothing of the model's."""
    name = str(frame.f_globals.get("__name__", ""))
    return name.startswith("pdcompiler.") and name != __name__


def user_frame(frame: FrameType | None) -> tuple[str | None, bool]:
    """The innermost line of the user's code, as "file:line", and whether a torch.utils.checkpoint encloses it."""
    line, checkpointed = None, False
    while frame is not None and not _is_caller(frame):
        file = frame.f_code.co_filename
        if line is None and _is_users(file):
            line = f"{file}:{frame.f_lineno}"
        checkpointed = checkpointed or file == CHECKPOINT
        frame = frame.f_back
    return line, checkpointed


class SourceLines(TorchFunctionMode):
    """Every torch call of the user's code annotates the nodes it makes with its source line."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in LOOKS:
            return func(*args, **(kwargs or {}))
        line, checkpointed = user_frame(sys._getframe(1))
        note: dict[str, Any] = {} if line is None else {"source": line}
        if checkpointed:
            note["checkpoint"] = True
        with annotate(note):
            return func(*args, **(kwargs or {}))


def _annotated(path: str, number: int) -> contextlib.AbstractContextManager[None]:
    return annotate({"module": path, "call": number})


@contextlib.contextmanager
def module_calls(
    root: nn.Module, inside: Callable[[str, int], contextlib.AbstractContextManager[None]] = _annotated
) -> Iterator[None]:
    """Run each module's forward inside of what is made of its path and of the number of this call of it in one forward of root;
    left out: its nodes are annotated with both, as "module" and "call"."""
    paths: dict[int, str] = {}
    for path, module in root.named_modules():
        paths.setdefault(id(module), path)
    calls: Counter[str] = Counter()
    open_: list[contextlib.AbstractContextManager[None]] = []

    def enter(module: nn.Module, args: Any) -> None:
        path = paths.get(id(module))
        if path is None:
            return
        if module is root:
            calls.clear()
        open_.append(inside(path, calls[path]))
        open_[-1].__enter__()
        calls[path] += 1

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        if id(module) in paths and open_:
            open_.pop().__exit__(None, None, None)

    handles = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        while open_:
            open_.pop().__exit__(None, None, None)


@contextlib.contextmanager
def provenance(root: nn.Module) -> Iterator[None]:
    """Nodes made inside know their module call and source line; see the module's docstring."""
    with preserve_node_meta(), module_calls(root), SourceLines():
        yield
