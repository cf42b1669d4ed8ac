"""`pipe.verify`: every rank in this process against plain PyTorch, and where a program first differs.

The step's own rank programs run through the reference backend on copies of weights and buffers, so nothing of the user's changes.
What they give is compared, tensor by tensor, with the plain loop over the same microbatches (`plain.py`). Where a gradient or the
loss differs, the trace is run beside the program, node by node, and the first value that differs is named.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from pdcompiler.backends import reference
from pdcompiler.comparison import largest_difference
from pdcompiler.core.errors import VerifyError
from pdcompiler.core.ir import Input, Program, RankProgram, Step, Trace, name_of, where
from pdcompiler.core.partition import Partition
from pdcompiler.plain import Observed


@dataclass(frozen=True)
class Report:
    """What was compared. differences: per tensor ("loss", "gradient of ...", "buffer ...") max|a - b| / max|b|."""

    differences: dict[str, float]
    tolerance: float

    def worst(self) -> tuple[str, float]:
        """The tensor that differs most, relative to its largest element."""
        return max(self.differences.items(), key=lambda item: item[1])

    def __str__(self) -> str:
        name, difference = self.worst()
        count = len(self.differences)
        return f"{count} tensors equal plain PyTorch within {self.tolerance:g}; the worst, {name}: {difference:.1e}"


@dataclass
class Copies:
    """Weights and buffers of the whole model, by name, as they were; and a Memory of a program over them."""

    tensors: dict[str, Tensor]

    def memory(self, program: Program, partition: Partition) -> reference.Memory:
        """What the words `weights` and `buffers` stand for."""
        return reference.Memory(
            lambda stage, rank: tuple(self.tensors[name] for name in partition.stages[stage].parameters),
            lambda stage, rank: tuple(self.tensors[name] for name in program.buffer_names[stage]),
        )


def run_copies(
    program: Program, ranks: Sequence[RankProgram], partition: Partition, inputs: Mapping[str, Any], copies: Copies
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients by name, of all ranks."""
    results = reference.run_ranks(ranks, inputs, copies.memory(program, partition))
    gradients: dict[str, Tensor] = {}
    for result in results:
        for stage, values in result.get("gradients", {}).items():
            gradients |= dict(zip(program.gradient_names[stage], values, strict=True))
    for result in results:
        gradients |= result.get("reduced", {})
    return results[-1]["loss"], gradients


def compare(loss: Tensor, gradients: Mapping[str, Tensor], copies: Copies, expected: Observed, tolerance: float) -> Report:
    """The differences from the plain loop; raises VerifyError where one is above the tolerance."""
    pairs: dict[str, tuple[Tensor | None, Tensor | None]] = {"loss": (loss, expected.loss)}
    pairs |= {f"gradient of {name}": (gradients.get(name), value) for name, value in expected.gradients.items()}
    pairs |= {f"buffer {name}": (copies.tensors[name], value) for name, value in expected.buffers.items()}
    differences = {}
    for name, (actual, wanted) in pairs.items():
        if (actual is None) != (wanted is None):
            raise VerifyError(f"{name}: plain PyTorch has {'none' if wanted is None else 'one'}, the program the opposite")
        if actual is not None and wanted is not None:
            largest = float(wanted.abs().max()) if wanted.numel() else 0.0
            difference = largest_difference(actual, wanted)
            differences[name] = difference / largest if largest else difference
    report = Report(differences, tolerance)
    name, worst = report.worst()
    if not worst <= tolerance:
        raise VerifyError(f"{name} differs from plain PyTorch by {worst:.3g} of its largest element, allowed is {tolerance:g}")
    return report


def first_difference(
    program: Program, trace: Trace, partition: Partition, step: Step, inputs: Mapping[str, Any], copies: Copies, tolerance: float
) -> str | None:
    """Run the trace and the program side by side for microbatch 0; the first value that differs, with its module and line."""
    seen: dict[str, Any] = {}
    batch = dict(zip(step.dims, inputs.values(), strict=False))

    def observe(node: fx.Node, value: Any) -> None:
        seen.setdefault(name_of(node), value)

    def given(meaning: Input) -> Any:
        first = step.microbatches[0]
        if meaning.kind in ("parameter", "buffer"):
            return copies.tensors[trace.canonical[meaning.name]]
        if meaning.kind == "batch":
            value, dim = batch[meaning.name], step.dims[meaning.name]
            return value if dim is None else reference.microbatch(value, start=first.start, stop=first.stop, dim=dim)
        return first.rows if meaning.kind == "rows" else inputs[f"{meaning.kind}s"][0]

    values = reference.run_trace(trace, given)
    reference.run_program(program, inputs, copies.memory(program, partition), observe)
    for node, value in values.items():
        other = seen.get(f"{node.name}_0")
        if not isinstance(value, Tensor) or not isinstance(other, Tensor):
            continue
        largest = float(value.abs().max()) if value.numel() else 0.0
        if value.shape != other.shape or not largest_difference(other, value) <= tolerance * max(largest, 1e-300):
            return f"{node.name}, made at {where(node)}"
    return None
