"""A schedule without flushes as the user asks for it; the ticks that it becomes are in `ticks.py`.

    compile(model, 4, schedule="pipedream", optimizer=...)
    compile(model, 4, schedule=Asynchronous("pipedream", vertical_sync=True), optimizer=...)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdcompiler.core.errors import CompileError
from pdcompiler.core.ticks import Ticks, pipedream_depths

NAMES = ("pipedream", "pipedream-2bw")


@dataclass(frozen=True)
class Asynchronous:
    """name: "pipedream" (Narayanan et al., SOSP 2019: each minibatch's backward on the weights of its forward) or "pipedream-2bw"
    (ICML 2021: two versions, all stages one batch behind).   depths: how many minibatches later each stage's backward runs;
    None: PipeDream's. Deeper ones cost staleness and memory and may be faster where replicas are unequal.   vertical_sync: a
    minibatch is on weights of the same age on all stages.   scale_learning_rate: of each stage by its replicas over those of the
    first, as PipeDream does, so that with SGD every minibatch counts equally."""

    name: str = "pipedream"
    depths: tuple[int, ...] | None = None
    vertical_sync: bool = False
    scale_learning_rate: bool = False

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise CompileError(f"there is no schedule without flushes named {self.name!r}", ways_out=NAMES)

    def depths_for(self, replicas: Sequence[int]) -> tuple[int, ...]:
        """Those given, or PipeDream's."""
        return pipedream_depths(replicas) if self.depths is None else tuple(self.depths)

    def ticks(self, replicas: Sequence[int], microbatches: int | None) -> Ticks:
        """Of stages with so many replicas. microbatches: of an update, with pipedream-2bw. Raises CompileError where the depths
        are not legal, or the microbatches too few."""
        batch = microbatches if self.name == "pipedream-2bw" else None
        return Ticks(tuple(replicas), self.depths_for(replicas), batch, self.vertical_sync)
