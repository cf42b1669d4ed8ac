"""Let every random operation draw from a seed of its own.

    before                                   after
    %x                                       %x, %seed
    noise = bernoulli(x, 0.9)                noise = seeded(bernoulli, seed, "h.0.drop#0/0", x, 0.9)

The place says which module call draws, and which of that call's draws it is: it is the same in every partition and every trace
of the model. Not here: how a seed is drawn from (`core/random_ops.py`), and the seeds of microbatches.
"""

from __future__ import annotations

from collections import Counter

from torch import fx

from pdcompiler.core.ir import Input, ModuleCall, Trace, module_of
from pdcompiler.core.random_ops import seeded
from pdcompiler.core.values import is_random


def seed_random_ops(trace: Trace) -> Trace:
    """See the module's docstring."""
    drawing = [node for node in trace.graph.nodes if is_random(node)]
    if not drawing:
        return trace
    seed = _placeholder(trace)
    draws = Counter[ModuleCall]()
    for node in drawing:
        call = module_of(node)
        node.args = (node.target, seed, f"{call.path}#{call.number}/{draws[call]}", *node.args)
        node.target = seeded
        draws[call] += 1
    return trace


def _placeholder(trace: Trace) -> fx.Node:
    last = [node for node in trace.graph.nodes if node.op == "placeholder"][-1]
    with trace.graph.inserting_after(last):
        seed = trace.graph.placeholder("seed")
    seed.meta.update(type=None, backward=False)
    trace.inputs[seed.name] = Input("seed", "seed")
    return seed
