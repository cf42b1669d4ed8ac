"""The optimizers of a process: one real torch.optim optimizer for each stage that it holds, seen as one.

Without flushes stages update at different times, so each has its own. Learning rate schedulers take the whole: its parameter
groups are those of all stages. A process whose stages have nothing to train has an optimizer that does nothing (torch refuses an
empty one). Not here: when a stage updates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from pdcompiler.core.errors import CompileError

MakeOptimizer: TypeAlias = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class StageOptimizers(torch.optim.Optimizer):
    """of_stage: those that there are. scales: of the learning rates of each stage; default 1."""

    def __init__(
        self, make: MakeOptimizer, parameters: Mapping[int, Sequence[nn.Parameter]], scales: Mapping[int, float] | None = None,
        by_program: bool = False,
    ) -> None:  # fmt: skip
        self.of_stage: dict[int, torch.optim.Optimizer] = {}
        self.by_program = by_program
        for stage, own in parameters.items():
            made = _made(make, own)
            if made is None:
                continue
            for group in made.param_groups:
                group["lr"] = group["lr"] * (scales or {}).get(stage, 1.0)
            self.of_stage[stage] = made
        self.defaults: dict[str, Any] = next((made.defaults for made in self.of_stage.values()), {})

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Of all stages, the optimizers' own: a change of a learning rate is a change there."""
        return [group for optimizer in self.of_stage.values() for group in optimizer.param_groups]

    @property
    def state(self) -> Any:  # type: ignore[override]
        """Of all stages, by parameter."""
        return {parameter: state for optimizer in self.of_stage.values() for parameter, state in optimizer.state.items()}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step all stages. Raises CompileError where the pipeline's programs do that."""
        if self.by_program:
            raise CompileError(
                "a schedule without flushes updates each stage inside pipe.step, when its gradients are there",
                ways_out=("leave optimizer.step() out",),
            )
        if closure is not None:
            raise CompileError("an optimizer over stages takes no closure", ways_out=("pipe.step(batch), then optimizer.step()",))
        for optimizer in self.of_stage.values():
            optimizer.step()

    def step_stage(self, stage: int) -> None:
        """Step one stage."""
        self._opt_called = True  # for learning rate schedulers, which want to come after a step
        if stage in self.of_stage:
            self.of_stage[stage].step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Of all stages."""
        for optimizer in self.of_stage.values():
            optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """By stage, each as its optimizer has it."""
        return {str(stage): optimizer.state_dict() for stage, optimizer in self.of_stage.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """The inverse of state_dict."""
        if state_dict.keys() != {str(stage) for stage in self.of_stage}:
            raise CompileError(f"the state is of stages {sorted(state_dict)}, this process has {sorted(map(str, self.of_stage))}")
        for stage, optimizer in self.of_stage.items():
            optimizer.load_state_dict(state_dict[str(stage)])

    def __repr__(self) -> str:
        return "\n".join(f"stage {stage}: {optimizer}" for stage, optimizer in self.of_stage.items()) or "nothing to train"


def whole_optimizer(make: MakeOptimizer, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Of all a process holds, for schedules that flush; one that does nothing where there is nothing to train."""
    return _made(make, parameters) or StageOptimizers(make, {})


def _made(make: MakeOptimizer, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer | None:
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    if not trainable:
        return None
    made = make(trainable)
    if not isinstance(made, torch.optim.Optimizer):
        raise CompileError(
            f"optimizer returned a {type(made).__name__}, expected a torch.optim.Optimizer",
            ways_out=("optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1)",),
        )
    return made
