"""The levels a model passes through, as data: Trace, Stage, Program, RankProgram.

A level is an fx graph plus what its inputs and outputs mean; what is known of each node stands in `node_meta.py`. Passes rewrite
within a level, or turn one level into the next; `verify.py` says what each level may contain. The Partition stands in
`partition.py`, the Schedule in `schedule.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import sympy
from torch import fx, nn

from pdcompiler.core.node_meta import ModuleCall as ModuleCall
from pdcompiler.core.node_meta import cost_of as cost_of
from pdcompiler.core.node_meta import describe as describe
from pdcompiler.core.node_meta import is_backward as is_backward
from pdcompiler.core.node_meta import is_integer as is_integer
from pdcompiler.core.node_meta import module_of as module_of
from pdcompiler.core.node_meta import name_of as name_of
from pdcompiler.core.node_meta import order_of as order_of
from pdcompiler.core.node_meta import rank_of as rank_of
from pdcompiler.core.node_meta import source_of as source_of
from pdcompiler.core.node_meta import stage_of as stage_of
from pdcompiler.core.node_meta import type_of as type_of
from pdcompiler.core.node_meta import where as where
from pdcompiler.core.rewriting import eliminate_dead_code as eliminate_dead_code
from pdcompiler.core.rewriting import nodes_in as nodes_in
from pdcompiler.core.rewriting import replaced as replaced
from pdcompiler.core.schedule import Schedule
from pdcompiler.core.structure import Structure
from pdcompiler.core.value_type import ROWS as ROWS
from pdcompiler.core.value_type import Integer as Integer
from pdcompiler.core.value_type import ValueType as ValueType
from pdcompiler.core.value_type import evaluate as evaluate
from pdcompiler.core.value_type import has_data_dependent_shape as has_data_dependent_shape


@dataclass(frozen=True)
class Input:
    """What a placeholder of a trace is: kind "parameter", "buffer", "batch" (a model input or target), "loss_weight", "rows"
    or "seed"."""

    kind: str
    name: str


@dataclass(frozen=True)
class Output:
    """What an output of a trace is: kind "loss", "output" (named by its number), "gradient" or "buffer" (its new value)."""

    kind: str
    name: str


class Readable:
    """Prints as `core/printer.py` says."""

    def __str__(self) -> str:
        from pdcompiler.core.printer import show  # late: the printer reads the levels below

        return show(self)  # type: ignore[arg-type]


@dataclass
class Captured:
    """A joint graph as torch gives it, with the meaning of its placeholders and outputs (None: nobody needs it).

    symbol: torch's symbol of the rows, or None where the graph is for exactly `rows`.   left_out: outputs of unknown type.
    """

    module: fx.GraphModule
    inputs: list[Input]
    outputs: list[Output | None]
    result: Structure
    left_out: tuple[str, ...]
    canonical: Mapping[str, str]
    symbol: sympy.Symbol | None
    rows: int | None
    admits: Callable[[int], bool]


@dataclass
class Trace(Readable):
    """Loss, outputs, all gradients and buffer updates of one microbatch, as one graph.

    graph: placeholders carry their `Input` in `inputs`; the output node's argument is a tuple as long as `outputs`.
    constants: holds the tensors that `get_attr` nodes name.   rows: None where the graph is for any `admits`-ted number of
    rows (shapes contain ROWS), else the one number it is for.   result: structure of the model's outputs.
    output_dims: per output leaf the dimension that carries the rows, or None.   canonical: parameter and buffer names to
    the first name of the same tensor.   warnings: what the user should be told once.
    """

    graph: fx.Graph
    constants: nn.Module
    inputs: dict[str, Input]
    outputs: tuple[Output, ...]
    result: Structure
    output_dims: tuple[int | None, ...]
    canonical: Mapping[str, str]
    rows: int | None
    admits: Callable[[int], bool]
    warnings: tuple[str, ...] = ()

    def output_nodes(self) -> list[tuple[Output, fx.Node]]:
        """Each output with the node that makes it."""
        return list(zip(self.outputs, self.graph.output_node().args[0], strict=True))  # type: ignore[arg-type]


@dataclass
class Function:
    """A stage's forward or backward: a graph whose placeholders and outputs are named values.

    Names with a meaning of their own: weights, buffers, saved, kept, rows, loss_weight, seed among `takes`; saved, kept, buffers
    (the new values), gradients among `gives`. All others are values that cross stages, model inputs, the loss or outputs.
    """

    module: fx.GraphModule
    takes: tuple[str, ...]
    gives: tuple[str, ...]


@dataclass(frozen=True)
class BackwardParts:
    """A backward in two parts. input: gives the gradients of the stage's inputs, and `kept`.   weight: takes `kept`, gives
    `gradients`.   kept_bytes: of `kept`, for a microbatch.   plain_bytes: what it would be without a minimum cut."""

    input: Function
    weight: Function
    kept_bytes: float
    plain_bytes: float


@dataclass
class Stage(Readable):
    """A consecutive part of the model, for one trace: what it holds and what it computes.

    parameters, buffers: canonical names, the order of the `weights` and `buffers` tuples.   gradients: parameters in the
    order of backward's gradients.   written: the buffers that forward gives new values for.   batch: value names of model
    inputs to the batch's tensors.   types: of the values that it takes and gives.   parts: of the backward, where the schedule
    runs it in two and it falls apart.
    """

    index: int
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    forward: Function
    backward: Function | None
    gradients: tuple[str, ...]
    gradient_types: tuple[ValueType, ...]
    written: tuple[str, ...]
    batch: dict[str, str]
    types: dict[str, ValueType]
    parts: BackwardParts | None = None


@dataclass(frozen=True)
class Staged(Readable):
    """A trace cut into stages. loss, outputs: the names of the values that are the loss (None: there is none) and the leaves
    of the model's outputs.   result: as in the Trace."""

    stages: tuple[Stage, ...]
    loss: str | None
    outputs: tuple[str, ...]
    result: Structure


@dataclass(frozen=True)
class Microbatch:
    """Rows start to stop of the batch, and the functions that compute them. counts: whether its loss and gradients do."""

    start: int
    stop: int
    staged: Staged
    counts: bool = True

    @property
    def rows(self) -> int:
        """How many rows."""
        return self.stop - self.start


@dataclass(frozen=True)
class Step:
    """What one call computes. dims: per tensor of the batch the dimension of the rows, or None.   outputs: "none", "last"
    (on the last stage's rank) or "all" (on every rank)."""

    microbatches: tuple[Microbatch, ...]
    dims: Mapping[str, int | None]
    outputs: str = "none"


RESERVED = ("weights", "buffers", "saved", "kept", "rows", "loss_weight", "loss_weights", "seed", "seeds", "gradients", "self")
"""Names that a value of the model may not have, see Function."""


@dataclass
class Program(Readable):
    """The step of all ranks as one graph. Every node has a rank; nodes stand in one global order.

    Placeholders are the batch's tensors, in its order, `loss_weights`, and where the model draws `seeds`, an integer for each
    microbatch; the output is a dict from rank to that rank's results:
    {"loss": value, "gradients": {stage: tuple}, "reduced": {parameter: value}, "outputs": [leaf: [microbatch: value]]},
    of a tick without flushes {"losses": [value]}.
    root: holds the stage functions that `call_module` nodes name.   schedule: None for a tick.   gradient_names,
    buffer_names: per stage, of its tuple of gradients and of its tuple of buffers.   gradient_types: by parameter.
    summed: the parameters whose gradients are summed over ranks.
    """

    graph: fx.Graph
    root: nn.Module
    ranks: int
    schedule: Schedule | None
    gradient_names: dict[int, tuple[str, ...]]
    gradient_types: dict[str, ValueType]
    buffer_names: dict[int, tuple[str, ...]]
    summed: frozenset[str] = frozenset()


@dataclass
class RankProgram(Readable):
    """What one rank runs: the projection of the Program onto it, with messages in place of transfers."""

    rank: int
    graph: fx.Graph
    root: nn.Module
