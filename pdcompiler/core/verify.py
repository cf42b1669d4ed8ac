"""What each level may contain, one function a level, run after every pass.

A failure is a VerifyError: our fault, not the user's. Not here: the proof that rank programs never wait for ever
(`verify_ranks.py`).
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from pdcompiler.core import ops
from pdcompiler.core.errors import VerifyError
from pdcompiler.core.ir import (
    Function,
    Program,
    Stage,
    Staged,
    Trace,
    is_integer,
    rank_of,
)
from pdcompiler.core.values import is_view


def verify_trace(trace: Trace) -> None:
    """Every operation has a type; outputs are as many as their meanings; every placeholder has a meaning."""
    trace.graph.lint()
    for node in trace.graph.nodes:
        if node.op == "placeholder" and node.name not in trace.inputs:
            raise VerifyError(f"placeholder {node.name} has no meaning")
        if node.op == "call_function" and "type" not in node.meta:
            raise VerifyError(f"operation {node.name} has no type")
    given = trace.graph.output_node().args[0]
    if len(given) != len(trace.outputs):  # type: ignore[arg-type]
        raise VerifyError(f"{len(given)} outputs with {len(trace.outputs)} meanings")  # type: ignore[arg-type]


def verify_staged(staged: Staged) -> None:
    """Forwards read only earlier stages, backwards only later ones; saved values are no integers and share no weight's memory."""
    made: set[str] = set()
    for stage in staged.stages:
        _check_takes(stage, stage.forward, made, "forward")
        made.update(stage.forward.gives)
    gradients: set[str] = set()
    for stage in reversed(staged.stages):
        if stage.backward is not None:
            _check_takes(stage, stage.backward, gradients, "backward")
            if stage.parts is not None:
                _check_takes(stage, stage.parts.input, gradients, "backward for the inputs")
                _check_takes(stage, stage.parts.weight, {"kept"}, "backward for the weights")
            gradients.update(stage.backward.gives)
        _check_saved(stage)


def _check_takes(stage: Stage, function: Function, made: set[str], phase: str) -> None:
    own = {"weights", "buffers", "saved", "rows", "loss_weight", "seed", *stage.batch}
    missing = [name for name in function.takes if name not in own | made]
    if missing:
        raise VerifyError(f"stage {stage.index}'s {phase} takes {missing}, which nothing before it gives")
    placeholders = [node.target for node in function.module.graph.nodes if node.op == "placeholder"]
    if placeholders != list(function.takes):
        raise VerifyError(f"stage {stage.index}'s {phase} has placeholders {placeholders}, takes {function.takes}")


def _check_saved(stage: Stage) -> None:
    if "saved" not in stage.forward.gives:
        return
    given: Any = stage.forward.module.graph.output_node().args[0]
    for node in given[stage.forward.gives.index("saved")]:
        if is_integer(node):
            raise VerifyError(f"stage {stage.index} saves the integer {node.name}")
        if _shares_weights(node):
            raise VerifyError(f"stage {stage.index} saves {node.name}, which shares memory with a parameter or buffer")


def _shares_weights(node: fx.Node) -> bool:
    """Whether a value is a view, at any remove, of what is taken out of `weights` or `buffers`."""
    while is_view(node) and node.all_input_nodes:
        source = node.all_input_nodes[0]
        if node.target is operator.getitem and source.op == "placeholder":
            return source.target in ("weights", "buffers")
        node = source
    return False


def verify_program(program: Program) -> None:
    """Every node has a rank; from the first transfer on, no value is read on a rank that does not hold it; what is put by for a
    later program or taken back has a key of its own."""
    program.graph.lint()
    _check_keys(program)
    transfers = any(node.target is ops.transfer for node in program.graph.nodes)
    for node in program.graph.nodes:
        if "rank" not in node.meta:
            raise VerifyError(f"node {node.name} has no rank")
        if not transfers or node.op == "output" or node.target in (ops.transfer, ops.all_reduce):
            continue
        for source in node.all_input_nodes:
            shared = source.op == "placeholder" or source.target is ops.all_reduce
            if not shared and rank_of(source) != rank_of(node):
                raise VerifyError(f"{node.name} on rank {rank_of(node)} reads {source.name}, which is on rank {rank_of(source)}")


def _check_keys(program: Program) -> None:
    for word in (ops.stash, ops.restore):
        keys = [tuple(sorted(node.kwargs.items())) for node in program.graph.nodes if node.target is word]
        if twice := [key for key in keys if keys.count(key) > 1]:
            raise VerifyError(f"{word.__name__} of {dict(twice[0])} stands twice")
