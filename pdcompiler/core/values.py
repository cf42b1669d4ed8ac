"""Of what a value of a trace is made: of weights alone, of the batch alone, or of both (an activation).

Activations cross stages. What depends on weights alone is derived again from the weight version at hand and is never saved or
sent; what depends on the batch alone (masks, position ids, rotary tables) can be computed by every rank, since every rank has
the batch. Not here: what is done about it (`partition`, `localize_cheap_values`).
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from pdcompiler.core.ir import Trace, has_data_dependent_shape, is_backward, type_of

aten = torch.ops.aten
MORE_VIEWS = (aten._unsafe_view.default, aten.detach.default, operator.getitem)


def is_view(node: fx.Node) -> bool:
    """Whether a node's result shares its input's storage: torch says so in the operator's schema."""
    if node.op != "call_function":
        return False
    if node.target in MORE_VIEWS:
        return True
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.returns:
        return False
    first = schema.returns[0].alias_info
    return first is not None and not first.is_write


def is_random(node: fx.Node) -> bool:
    """Whether two runs of a node differ: it draws from a random generator (attention does, if it drops anything)."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    given = dict(zip((argument.name for argument in node.target._schema.arguments), node.args, strict=False)) | node.kwargs  # type: ignore[union-attr]
    return "attention" not in str(node.target) or given.get("dropout_p") not in (None, 0.0)


def is_product(node: fx.Node) -> bool:
    """Whether a node multiplies matrices, and so takes long."""
    return any(word in str(node.target) for word in ("mm", "convolution", "attention"))


class Origins:
    """The forward nodes of a trace by what they are made of. Placeholders and constants are in neither set.

    batch_values: of model inputs, rows, constants and buffers that nothing writes; no parameter, nothing random.
    weight_values: of parameters, buffers that nothing writes, constants; nothing of the batch, nothing random.
    parameter_values: those of the weight_values that are made of a parameter and are not just views of it.
    """

    def __init__(self, trace: Trace) -> None:
        written = {trace.canonical[o.name] for o in trace.outputs if o.kind == "buffer"}
        roots: dict[fx.Node, str] = {}
        self.batch_values: set[fx.Node] = set()
        self.weight_values: set[fx.Node] = set()
        self.parameter_values: set[fx.Node] = set()
        for node in trace.graph.nodes:
            if node.op == "placeholder":
                meaning = trace.inputs[node.name]
                is_written = meaning.kind == "buffer" and trace.canonical[meaning.name] in written
                kinds = {"parameter": "w", "buffer": "x" if is_written else "u", "batch": "b", "rows": "", "loss_weight": "x"}
                roots[node] = kinds[meaning.kind]
            elif node.op == "get_attr":
                roots[node] = ""
            elif node.op == "call_function":
                roots[node] = self._classify(node, roots)

    def _classify(self, node: fx.Node, roots: dict[fx.Node, str]) -> str:
        made_of = set("".join(roots[i] for i in node.all_input_nodes))
        if is_random(node) or is_backward(node) or "x" in made_of or {"w", "b"} <= made_of:
            return "x"
        if "w" in made_of or made_of == {"u"}:
            self.weight_values.add(node)
            if "w" in made_of and not (is_view(node) and not any(i in self.parameter_values for i in node.all_input_nodes)):
                self.parameter_values.add(node)
        else:
            self.batch_values.add(node)
        return "".join(made_of)


def readers_of(parameter: fx.Node) -> list[fx.Node]:
    """The operations that read a parameter, through views of it."""
    found: list[fx.Node] = []
    for user in parameter.users:
        found += readers_of(user) if is_view(user) else [user]
    return found


def inseparable(trace: Trace) -> list[tuple[str, list[fx.Node]]]:
    """Forward operations that one stage must hold, with why: what reads a buffer that forward writes, with what makes its new
    value; a value of data-dependent shape with what reads it."""
    forward = dict.fromkeys(node for node in trace.graph.nodes if node.op == "call_function" and not is_backward(node))
    written: dict[str, list[fx.Node]] = {}
    for output, node in trace.output_nodes():
        if output.kind == "buffer" and node in forward:
            written[trace.canonical[output.name]] = [node]
    for placeholder in trace.graph.find_nodes(op="placeholder"):
        meaning = trace.inputs[placeholder.name]
        if meaning.kind == "buffer" and trace.canonical[meaning.name] in written:
            written[trace.canonical[meaning.name]] += [user for user in placeholder.users if user in forward]
    groups = [(f"the update of buffer {name} and what reads it", nodes) for name, nodes in written.items()]
    for node in forward:
        if has_data_dependent_shape(type_of(node)):
            readers = [user for user in node.users if user in forward]
            groups.append(("a value whose shape depends on data and what reads it", [node, *readers]))
    return groups
