"""Remove stashes that are taken back in the same program: what remains is what really has to be kept.

    before                                                 after
    stash(saved_0, "saved", stage=1, minibatch=0)          gradients_0 = stage1_backward(saved_0)
    saved = restore("saved", stage=1, minibatch=0)
    gradients_0 = stage1_backward(saved)

Compilers call it store-to-load forwarding. A value that was made on another rank is forwarded too; `insert_transfers` then sends
it as usual.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from pdcompiler.core import ops
from pdcompiler.core.ir import Program

Key = tuple[Any, ...]


def forward_stashes(program: Program) -> Program:
    """See the module's docstring."""
    kept: dict[Key, fx.Node] = {}
    for node in list(program.graph.nodes):
        if node.target is ops.stash:
            kept[key_of(node)] = node
        elif node.target is ops.restore and key_of(node) in kept:
            stash = kept.pop(key_of(node))
            node.replace_all_uses_with(stash.args[0])
            program.graph.erase_node(node)
            program.graph.erase_node(stash)
    return program


def key_of(node: fx.Node) -> Key:
    """What a stash and its restore have in common."""
    return tuple(node.kwargs[name] for name in ("kind", "stage", "minibatch", "rank"))
