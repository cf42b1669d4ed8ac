"""Random models and whole test cases for hypothesis; the models themselves are in `pdcompiler.random_model`.

Each feature is drawn by a coin of its own, so that none is rare: `features` names those of a spec or case, for a
test to count with `hypothesis.event`. This is the one module that needs hypothesis; there are no assertions in it.
"""

from dataclasses import dataclass, replace
from typing import Literal

from hypothesis import strategies as st
from torch import nn

from pdcompiler.random_model import (
    MUTATING,
    STATELESS,
    Batch,
    Form,
    Late,
    ModelSpec,
    RandomModel,
    Skip,
    Tie,
    batch_for,
)

OFTEN = st.sampled_from((False, True, True))  # hypothesis repeats and simplifies, so that a fair coin gives a third


@st.composite
def specs(draw: st.DrawFn) -> ModelSpec:
    """Any random model. Each feature has its own coin; tied blocks are Linear, so they and the mutating one differ."""
    count = draw(st.integers(3, 8))
    block = st.integers(0, count - 1)
    blocks = [draw(st.sampled_from(STATELESS)) for _ in range(count)]
    places = draw(st.permutations(range(count)))
    tie = None
    if draw(OFTEN):
        first, second = sorted(places[:2])
        blocks[first] = blocks[second] = "linear"
        tie = Tie(first, second, draw(st.sampled_from(("module", "parameter"))))
    if draw(OFTEN):
        blocks[places[2]] = draw(st.sampled_from(MUTATING))
    inputs: Literal["float", "ids"] = draw(st.sampled_from(("float", "ids")))
    output: Form = draw(st.sampled_from(("tensor", "scalar", "tuple", "dict", "dataclass")))
    structured = output not in ("tensor", "scalar")
    chosen = st.lists(block, min_size=1, max_size=2, unique=True).map(lambda found: tuple(sorted(found)))
    return ModelSpec(
        blocks=tuple(blocks),
        inputs=inputs,
        output=output,
        loss_inside=output == "scalar" or (output in ("dict", "dataclass") and draw(st.booleans())),
        skips=draw(_skips(count)) if draw(OFTEN) else (),
        tie=tie,
        tied_head=inputs == "ids" and draw(st.booleans()),
        frozen=draw(chosen) if draw(st.booleans()) else (),
        unused=draw(block) if draw(OFTEN) else None,
        late=draw(st.none() | st.builds(Late, block, st.sampled_from(("float", "ids", "mask")))),
        scale=draw(st.sampled_from((1.0, 0.5))),
        extras=draw(chosen) if structured and draw(st.booleans()) else (),
        auxiliary=draw(block) if draw(OFTEN) and output != "tensor" else None,
        table_persistent=draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
    )


@st.composite
def _skips(draw: st.DrawFn, count: int) -> tuple[Skip, ...]:
    skips = []
    for _ in range(draw(st.integers(1, 2))):
        source = draw(st.integers(0, count - 3))
        skips.append(Skip(source, draw(st.integers(source + 2, count - 1)), draw(st.sampled_from(("add", "concat")))))
    return tuple(skips)


@st.composite
def random_models(draw: st.DrawFn) -> tuple[RandomModel, Batch]:
    """A random model and a batch for it."""
    spec = draw(specs())
    return RandomModel(spec), batch_for(spec, draw(row_counts()), draw(st.integers(0, 1000)))


def partitions(model: nn.Module | ModelSpec) -> st.SearchStrategy[list[str]]:
    """Module paths at which stages 1, 2, ... begin: none to three blocks of the model, in order."""
    count = len(model.blocks)  # type: ignore[arg-type]
    begins = st.permutations(range(1, count))
    return st.builds(
        lambda cuts, order: [f"blocks.{i}" for i in sorted(order[:cuts])],
        st.sampled_from((0, 1, 1, 2, 2, 3, 3)),
        begins,
    )


def schedules() -> st.SearchStrategy[str]:
    """Names of flushing schedules."""
    return st.sampled_from(("gpipe", "1f1b"))


def microbatch_counts() -> st.SearchStrategy[int]:
    """How many microbatches are asked for."""
    return st.integers(1, 6)


def row_counts() -> st.SearchStrategy[int]:
    """Rows of a whole batch, also fewer than microbatches."""
    return st.integers(1, 9)


@dataclass(frozen=True)
class Case:
    """A model, a batch, and how to run them."""

    spec: ModelSpec
    partition: tuple[str, ...]
    schedule: str
    microbatches: int
    rows: int
    batch_seed: int = 0

    @property
    def world_size(self) -> int:
        return len(self.partition) + 1

    @property
    def uneven(self) -> bool:
        return self.rows > self.microbatches and self.rows % self.microbatches != 0

    def model(self) -> RandomModel:
        return RandomModel(self.spec)

    def batch(self) -> Batch:
        return batch_for(self.spec, self.rows, self.batch_seed)


@dataclass(frozen=True)
class Run:
    """A training run. steps: of each, the rows of its batches, whose gradients are added.   clip: the largest norm, or None."""

    case: Case
    steps: tuple[tuple[int, ...], ...]
    clip: float | None

    def batch(self, step: int, number: int) -> Batch:
        return batch_for(self.case.spec, self.steps[step][number], self.case.batch_seed + 10 * step + number)


@st.composite
def training_runs(draw: st.DrawFn) -> Run:
    """Two or three steps of one or two batches, whose rows change; any named schedule of one stage a rank."""
    case = replace(draw(cases()), schedule=draw(st.sampled_from(("gpipe", "1f1b", "zb-h1", "zb-h2"))))
    rows = st.one_of(st.just(case.rows), row_counts())
    steps = draw(st.lists(st.lists(rows, min_size=1, max_size=2).map(tuple), min_size=2, max_size=3).map(tuple))
    return Run(case, steps, draw(st.sampled_from((None, 0.1, 10.0))))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A whole case; microbatches are uneven in nearly half of them."""
    spec = draw(specs())
    if draw(OFTEN):
        microbatches = draw(st.integers(2, 6))
        rows = draw(st.sampled_from([r for r in range(microbatches + 1, 13) if r % microbatches]))
    else:
        microbatches, rows = draw(microbatch_counts()), draw(row_counts())
    partition = tuple(draw(partitions(spec)))
    return Case(spec, partition, draw(schedules()), microbatches, rows, draw(st.integers(0, 1000)))


def features(of: ModelSpec | Case) -> frozenset[str]:
    """What a spec or case contains, in words for `hypothesis.event`."""
    spec = of.spec if isinstance(of, Case) else of
    present = {
        "skip": bool(spec.skips),
        "concat": any(skip.join == "concat" for skip in spec.skips),
        "tied weight": spec.tie is not None or spec.tied_head,
        "dropout": "dropout" in spec.blocks,
        "mutated buffer": any(kind in MUTATING for kind in spec.blocks),
        "shared constant buffer": spec.blocks.count("table") > 1,
        "unused parameter": spec.unused is not None,
        "frozen": bool(spec.frozen),
        "late input": spec.late is not None,
        "auxiliary loss": spec.auxiliary is not None,
        "extra outputs": bool(spec.extras),
        "loss inside": spec.loss_inside,
        "ids": spec.inputs == "ids",
        f"output {spec.output}": True,
        "uneven rows": isinstance(of, Case) and of.uneven,
        "several stages": isinstance(of, Case) and of.world_size > 1,
        "fewer rows than microbatches": isinstance(of, Case) and of.rows < of.microbatches,
    }
    return frozenset(name for name, there in present.items() if there)
