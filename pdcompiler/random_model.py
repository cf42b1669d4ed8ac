"""Random models: small enough to run by the thousand, odd enough to hurt.

A model is built from a `ModelSpec`, plain frozen data, so that a failure shrinks feature by feature and prints as
text that builds the same model again. `pdcompiler.strategies` draws the specs.

These are not realistic models (those are in `tests/models.py`): they hold, close together, what pipelines get
wrong: skips, ties, buffers that change, unused and frozen parameters, late inputs, structured outputs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Kind = Literal["linear", "layernorm", "gated", "table", "dropout", "batchnorm", "counter", "running"]
Form = Literal["tensor", "scalar", "tuple", "dict", "dataclass"]  # what forward returns; "scalar": the loss alone
STATELESS: tuple[Kind, ...] = ("linear", "layernorm", "gated", "table", "dropout")
MUTATING: tuple[Kind, ...] = ("batchnorm", "counter", "running")
WIDTH, LENGTH, VOCABULARY = 4, 3, 11


@dataclass(frozen=True)
class Skip:
    """The output of block `source` joins the input of block `to`, at least two blocks later."""

    source: int
    to: int
    join: Literal["add", "concat"]


@dataclass(frozen=True)
class Tie:
    """Two blocks use one Linear module, or two modules hold one Parameter under two names."""

    first: int
    second: int
    shares: Literal["module", "parameter"]


@dataclass(frozen=True)
class Late:
    """The keyword input `late`, first read in block `block`."""

    block: int
    kind: Literal["float", "ids", "mask"]


@dataclass(frozen=True)
class ModelSpec:
    """All that distinguishes one random model from another; blocks are named `blocks.0`, `blocks.1`, ..."""

    blocks: tuple[Kind, ...]
    inputs: Literal["float", "ids"] = "float"
    output: Form = "tensor"
    loss_inside: bool = False
    skips: tuple[Skip, ...] = ()
    tie: Tie | None = None
    tied_head: bool = False  # the head's weight is the embedding's; with inputs "ids"
    frozen: tuple[int, ...] = ()  # blocks; with block 0 the inlet too
    unused: int | None = None  # the block with a parameter that nothing reads
    late: Late | None = None
    scale: float = 1.0  # a Python number among the keyword inputs, unless 1
    extras: tuple[int, ...] = ()  # blocks whose outputs the model returns too
    auxiliary: int | None = None  # the block that adds to the loss
    table_persistent: bool = True  # of the constant buffer that all "table" blocks read
    seed: int = 0


@dataclass
class RandomOutput:
    """The output of a model whose `output` is "dataclass"; unknown to torch's pytree, as users' own classes are."""

    logits: Tensor
    loss: Tensor | None
    extras: list[Tensor]
    auxiliary: Tensor | None
    blocks: int


@dataclass(frozen=True)
class Batch:
    """What one step of a user's training loop passes."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Tensor | None
    loss_fn: Callable[[Any, Any], Tensor] | None


class Body(nn.Module):
    """The inside of a block. Those that change a buffer make their output depend on it."""

    mean: Tensor
    count: Tensor

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.kind = kind
        if kind in ("linear", "gated"):
            self.linear = nn.Linear(WIDTH, WIDTH if kind == "linear" else 2 * WIDTH)
        elif kind in ("layernorm", "batchnorm"):
            self.norm = nn.LayerNorm(WIDTH) if kind == "layernorm" else nn.BatchNorm1d(WIDTH)
        elif kind == "running":
            self.register_buffer("mean", torch.ones(WIDTH))
        elif kind == "counter":
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, hidden: Tensor, table: Tensor) -> Tensor:
        result: Tensor
        if self.kind == "linear":
            result = torch.tanh(self.linear(hidden))
        elif self.kind == "layernorm":
            result = self.norm(hidden)
        elif self.kind == "gated":
            value, gate = self.linear(hidden).chunk(2, dim=-1)
            result = torch.tanh(value) * torch.sigmoid(gate)
        elif self.kind == "table":
            result = hidden * table
        elif self.kind == "dropout":
            result = F.dropout(hidden, 0.25, self.training)
        elif self.kind == "batchnorm":  # tanh: else a bias right before it would have a gradient of mere rounding
            result = self.norm(torch.tanh(hidden).transpose(1, 2)).transpose(1, 2)
        elif self.kind == "running":
            if self.training:
                self.mean.mul_(0.9).add_(hidden.detach().mean((0, 1)), alpha=0.1)
            result = hidden * self.mean
        else:
            if self.training:
                self.count.add_(1)
            result = hidden * (1 + self.count.to(hidden.dtype) / 8)
        return result


class Block(nn.Module):
    """Joins the skips and the late input to what the block before gives, then applies the body."""

    def __init__(self, spec: ModelSpec, index: int) -> None:
        super().__init__()
        self.body = Body(spec.blocks[index])
        joins = [skip.join for skip in spec.skips if skip.to == index]
        self.merges = nn.ModuleList(
            nn.Linear(2 * WIDTH, WIDTH, bias=False) if join == "concat" else nn.Identity() for join in joins
        )
        if spec.late == Late(index, "ids"):
            self.late = nn.Embedding(VOCABULARY, WIDTH)
        if spec.unused == index:
            self.unused = nn.Parameter(torch.ones(WIDTH))

    def forward(self, hidden: Tensor, table: Tensor, skipped: list[Tensor], late: Tensor | None = None) -> Tensor:
        for merge, value in zip(self.merges, skipped, strict=True):
            concat = isinstance(merge, nn.Linear)
            hidden = merge(torch.cat([hidden, value], -1)) if concat else hidden + value
        if late is not None and late.dtype == torch.bool:
            hidden = hidden.masked_fill(~late.unsqueeze(-1), 0.0)
        elif late is not None:
            hidden = hidden + (late if late.is_floating_point() else self.late(late))
        result: Tensor = self.body(hidden, table)
        return result


class RandomModel(nn.Module):
    """A chain of blocks with what its spec adds; float64; the global random state is left alone."""

    table: Tensor

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(spec.seed)
            ids = spec.inputs == "ids"
            self.inlet = nn.Embedding(VOCABULARY, WIDTH) if ids else nn.Linear(WIDTH, WIDTH, bias=False)
            self.blocks = nn.ModuleList(Block(spec, index) for index in range(len(spec.blocks)))
            self.head = nn.Linear(WIDTH, VOCABULARY if ids else WIDTH)
            self.register_buffer("table", torch.randn(LENGTH, WIDTH), persistent=spec.table_persistent)
        self._tie(spec)
        for index in spec.frozen:
            self.blocks[index].requires_grad_(False)
        self.inlet.requires_grad_(0 not in spec.frozen)
        self.double()

    def _tie(self, spec: ModelSpec) -> None:
        if spec.tied_head:
            self.head.weight = self.inlet.weight
        if spec.tie is None:
            return
        first, second = (self.blocks[index].body for index in (spec.tie.first, spec.tie.second))
        assert isinstance(first, Body) and isinstance(second, Body)
        if spec.tie.shares == "module":
            second.linear = first.linear
        else:
            second.linear.weight = first.linear.weight

    def forward(
        self, inputs: Tensor, *, late: Tensor | None = None, labels: Tensor | None = None, scale: float = 1.0
    ) -> Any:
        hidden: Tensor = self.inlet(inputs) * scale
        values: list[Tensor] = []
        for index, block in enumerate(self.blocks):
            skipped = [values[skip.source] for skip in self.spec.skips if skip.to == index]
            is_late = self.spec.late is not None and self.spec.late.block == index
            hidden = block(hidden, self.table, skipped, late if is_late else None)
            values.append(hidden)
        return self._outputs(self.head(hidden), values, labels)

    def _outputs(self, logits: Tensor, values: list[Tensor], labels: Tensor | None) -> Any:
        spec = self.spec
        extras = [values[index] for index in spec.extras]
        auxiliary = None if spec.auxiliary is None else values[spec.auxiliary].square().mean() / 4
        loss = None if labels is None else loss_from(logits, auxiliary, labels)
        if spec.output == "dataclass":
            return RandomOutput(logits, loss, extras, auxiliary, len(self.blocks))
        if spec.output == "dict":
            named = {"logits": logits, "extras": extras, "auxiliary": auxiliary, "blocks": len(self.blocks)}
            return named if loss is None else {"loss": loss, **named}
        if spec.output == "tuple":
            return logits, (*extras,), auxiliary
        return logits if spec.output == "tensor" else loss

    def __repr__(self) -> str:
        return f"RandomModel({self.spec!r})"


def loss_from(logits: Tensor, auxiliary: Tensor | None, labels: Tensor) -> Tensor:
    """A mean over rows: cross-entropy for integer labels, squared error otherwise, plus the auxiliary loss."""
    wants_floats = labels.is_floating_point()
    main = F.mse_loss(logits, labels) if wants_floats else F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    return main if auxiliary is None else main + auxiliary


def outside_loss(outputs: Any, target: Any) -> Tensor:
    """The same loss as a user's `loss_fn(outputs, target)`, on whatever structure the model returns."""
    if isinstance(outputs, Tensor):
        return loss_from(outputs, None, target)
    if isinstance(outputs, tuple):
        return loss_from(outputs[0], outputs[2], target)
    if isinstance(outputs, dict):
        return loss_from(outputs["logits"], outputs["auxiliary"], target)
    return loss_from(outputs.logits, outputs.auxiliary, target)


def batch_for(spec: ModelSpec, rows: int, seed: int = 0) -> Batch:
    """A batch of `rows` rows for the models of this spec."""
    generator = torch.Generator().manual_seed(seed)

    def make(kind: Literal["float", "ids", "mask"]) -> Tensor:
        if kind == "float":
            return torch.randn(rows, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
        ids = torch.randint(VOCABULARY, (rows, LENGTH), generator=generator)
        return ids if kind == "ids" else ids % 4 > 0

    inputs, labels = make(spec.inputs), make(spec.inputs)
    kwargs: dict[str, Any] = {} if spec.late is None else {"late": make(spec.late.kind)}
    if spec.scale != 1.0:
        kwargs["scale"] = spec.scale
    if spec.loss_inside:
        return Batch((inputs,), {**kwargs, "labels": labels}, None, None)
    return Batch((inputs,), kwargs, labels, outside_loss)
