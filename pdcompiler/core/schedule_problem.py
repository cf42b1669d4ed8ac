"""What a schedule is to be found for: seconds and bytes of one microbatch on each stage, and the room of each rank. No torch.

A rank holds of a stage's microbatch

    from F until the end of B     saved      what the backward needs
    from then until W's end       kept       what of it the weights' gradients need: no more; nothing where the backward is whole

Not here: how a schedule is found (`passes/schedules/automatic.py`), and where the costs come from (`schedule_choice.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pdcompiler.core.errors import CompileError
from pdcompiler.core.schedule import Action, Schedule
from pdcompiler.core.timing import Timing, timing

Numbers = tuple[float, ...]

ROUNDING = 1 + 1e-9
"""Of sums of bytes that are no whole numbers."""


@dataclass(frozen=True)
class ScheduleProblem:
    """rank_of: the ranks of each stage; microbatch i runs on that of number i mod their number.   forward, backward, weight,
    forward_transfer, backward_transfer, reduce, overlap: as of `timing`; a stage of whose backward `weight` is nothing, or all,
    has whole backwards.   saved, kept: bytes, by stage.   room: bytes that each rank has for them; empty: there is no end of
    them."""

    rank_of: tuple[tuple[int, ...], ...]
    microbatches: int
    forward: Numbers
    backward: Numbers
    weight: Numbers
    forward_transfer: Numbers = ()
    backward_transfer: Numbers = ()
    reduce: Numbers = ()
    overlap: bool = True
    saved: Numbers = ()
    kept: Numbers = ()
    room: Numbers = ()

    def __post_init__(self) -> None:
        for name in ("forward", "backward", "weight", "reduce", "saved", "kept", "forward_transfer", "backward_transfer"):
            count = self.stages - 1 if name.endswith("transfer") else self.stages
            given = getattr(self, name) or (0.0,) * count
            if len(given) != count or not all(0 <= value < math.inf for value in given):
                raise CompileError(f"{name} is {given}, expected {count} numbers of at least 0")
            object.__setattr__(self, name, tuple(given))
        if any(kept > saved for kept, saved in zip(self.kept, self.saved, strict=True)):
            raise CompileError(f"kept is {self.kept}, more than saved: {self.saved}")
        if self.microbatches < max(map(len, self.rank_of)):
            raise CompileError(f"microbatches is {self.microbatches}, but a stage has {max(map(len, self.rank_of))} replicas")
        object.__setattr__(self, "room", tuple(self.room) or (math.inf,) * self.ranks)
        for rank, (least, room) in enumerate(zip(self.least_room(), self.room, strict=True)):
            if room * ROUNDING < least:
                raise CompileError(
                    f"rank {rank} has room for {room:.0f} bytes of what backwards need, "
                    f"and one microbatch alone needs {least:.0f} there under any schedule",
                    ways_out=(f"a machine with {least - room:.0f} bytes more", "smaller microbatches", "more ranks"),
                )

    @property
    def stages(self) -> int:
        """How many."""
        return len(self.rank_of)

    @property
    def ranks(self) -> int:
        """How many."""
        return 1 + max(max(ranks) for ranks in self.rank_of)

    def splits(self, stage: int) -> bool:
        """Whether a stage's backwards are in two parts."""
        return 0 < self.weight[stage] < self.backward[stage]

    def least_room(self) -> tuple[float, ...]:
        """Bytes of each rank without which no schedule can run: when the last forward of a microbatch on a rank is done, what
        all its stages saved is there."""
        return tuple(sum(self.saved[s] for s, ranks in enumerate(self.rank_of) if rank in ranks) for rank in range(self.ranks))

    def timing(self, schedule: Schedule) -> Timing:
        """How long a schedule takes, by the one timing model."""
        return timing(
            schedule, forward=self.forward, backward=self.backward, weight=self.weight, reduce=self.reduce, overlap=self.overlap,
            forward_transfer=self.forward_transfer, backward_transfer=self.backward_transfer,
        )  # fmt: skip

    def peaks(self, schedule: Schedule) -> tuple[float, ...]:
        """The most bytes that each rank holds at once."""
        return tuple(self._peak(actions, schedule) for actions in schedule.ranks)

    def fits(self, schedule: Schedule) -> bool:
        """Whether every rank has room for it."""
        return all(peak <= room * ROUNDING for peak, room in zip(self.peaks(schedule), self.room, strict=True))

    def _peak(self, actions: Sequence[Action], schedule: Schedule) -> float:
        held = most = 0.0
        for action in actions:
            stage, is_split = action.stage, (action.stage, action.microbatch) in schedule.split
            if action.phase == "F":
                held += self.saved[stage]
            elif action.phase == "B":
                held += (self.kept[stage] if is_split else 0.0) - self.saved[stage]
            else:
                held -= self.kept[stage]
            most = max(most, held)
        return most
