"""A plan: which layers are a stage, on how many replicas, and what that takes. Data; no search, no torch.

    Plan                       stages 0, 1, ..., each with its layers and replicas; perhaps the whole pipeline several times
    devices                    ... the last stage stands on the machine's last devices, the one before it right before them
    Training                   what is planned for: the schedule, its microbatches, the optimizer

For two servers of two devices and replicas 3 and 1:   [ stage 0 | stage 0 ] [ stage 0 | stage 1 ]

Not here: what a plan costs (`passes/partition/evaluate.py`), and what a Partition says to the compiler (`partition.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pdcompiler.core.errors import CompileError

SCHEDULE_KINDS = {"gpipe": 0, "1f1b": 1, "pipedream": 2, "pipedream-2bw": 3}
"""How the planner's kernels know a schedule."""
FLUSHING = ("gpipe", "1f1b")


@dataclass(frozen=True)
class Training:
    """What is planned for. microbatches: of one step (pipedream-2bw: of one update; pipedream: has none).
    optimizer_bytes: of state per byte of parameters (Adam 2, SGD with momentum 1, plain SGD 0).   gradient_bytes: of gradients
    per byte of parameters.   reduce_factor: an all-reduce of n bytes over r replicas moves factor * (r-1)/r * n per replica
    (a ring: 2; PipeDream's optimizer counts 4).   recompute: whether a stage may recompute its forward to save memory."""

    schedule: str = "1f1b"
    microbatches: int = 8
    optimizer_bytes: float = 2.0
    gradient_bytes: float = 1.0
    reduce_factor: float = 2.0
    recompute: bool = False

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULE_KINDS:
            raise CompileError(f"the planner knows no schedule {self.schedule!r}", ways_out=(f"one of {sorted(SCHEDULE_KINDS)}",))
        if self.microbatches < 1:
            raise CompileError(f"microbatches is {self.microbatches}, expected 1 or more")
        for name in ("optimizer_bytes", "gradient_bytes", "reduce_factor"):
            if not getattr(self, name) >= 0:
                raise CompileError(f"{name} is {getattr(self, name)}, expected 0 or more")

    @property
    def flushes(self) -> bool:
        """Whether all backward work is done before an update."""
        return self.schedule in FLUSHING

    def of_one(self, pipelines: int) -> Training:
        """What the busiest of some pipelines is planned for: its part of the microbatches."""
        return replace(self, microbatches=-(-self.microbatches // pipelines))

    def share(self, replicas: int) -> float:
        """The part of the microbatches that the busiest of some replicas runs."""
        if self.schedule == "pipedream":
            return 1 / replicas
        return self.own(replicas) / self.microbatches

    def own(self, replicas: int) -> int:
        """The microbatches that the busiest of some replicas runs, of a step."""
        return -(-self.microbatches // replicas)

    def once(self, replicas: int, seconds: float) -> float:
        """What each of them takes there, for a stage that takes so long per microbatch."""
        return seconds / self.share(replicas)

    def held(self, replicas: int, seconds: float) -> float:
        """How long such a stage holds up a step with a flush: all its microbatches but one."""
        return (self.own(replicas) - 1) * self.once(replicas, seconds)

    def most_replicas(self, devices: int) -> int:
        """Of a stage in a pipeline of so many devices: each gets a microbatch of every step."""
        return devices if self.schedule == "pipedream" else min(devices, self.microbatches)

    def in_flight(self, replicas: int, downstream: int) -> int:
        """Microbatches whose saved values a replica holds at once. downstream: devices of all later stages."""
        warm = -(-downstream // replicas) + 1  # PipeDream's NOAM: ceil((replicas + downstream) / replicas)
        own = self.own(replicas)
        return {"gpipe": own, "1f1b": min(warm, own)}.get(self.schedule, warm)

    def versions(self, replicas: int, downstream: int) -> int:
        """Weight versions that a replica holds at once."""
        if self.schedule == "pipedream":
            return self.in_flight(replicas, downstream)
        return 2 if self.schedule == "pipedream-2bw" else 1


@dataclass(frozen=True)
class PlannedStage:
    """layers: numbers in the Workload.   recompute: whether backward runs the forward again instead of saving its values."""

    layers: tuple[int, ...]
    replicas: int = 1
    recompute: bool = False


@dataclass(frozen=True)
class Plan:
    """stages: in the model's order.   pipelines: how often the whole is replicated, each over its own devices."""

    stages: tuple[PlannedStage, ...]
    pipelines: int = 1

    @property
    def devices(self) -> int:
        """How many it uses."""
        return self.pipelines * sum(stage.replicas for stage in self.stages)

    def downstream(self, index: int) -> int:
        """Devices of the stages after one, in one pipeline."""
        return sum(stage.replicas for stage in self.stages[index + 1 :])

    def __str__(self) -> str:
        """PipeDream's notation: replicas of each stage, joined by '-'."""
        text = "-".join(str(stage.replicas) for stage in self.stages)
        return text if self.pipelines == 1 else f"{self.pipelines} x ({text})"


@dataclass(frozen=True)
class Choice:
    """A stage as a search finds it. pair: which of the Spans."""

    pair: int
    replicas: int
    recompute: bool


@dataclass(frozen=True)
class StageCost:
    """What evaluate() finds for one stage: seconds per microbatch of one pipeline, bytes per device.

    compute: forward and backward of one microbatch on one replica.   entering, leaving: the borders' transfers, both ways.
    reduce: all gradients of one flush or round.   seconds: the stage's time per microbatch, all of these shared out.
    forward: the part of compute that runs forward, without what is recomputed."""

    compute: float
    entering: float
    leaving: float
    reduce: float
    seconds: float
    weights: float
    gradients: float
    optimizer: float
    saved: float
    working: float
    in_flight: int
    versions: int
    forward: float = 0.0

    @property
    def memory(self) -> float:
        """Bytes per device."""
        return self.weights + self.gradients + self.optimizer + self.saved + self.working


@dataclass(frozen=True)
class Evaluation:
    """What a plan takes. seconds: of a step (flushing: of all its microbatches; else of one microbatch in steady state).
    fits: whether every stage's memory is there."""

    seconds: float
    stages: tuple[StageCost, ...]
    fits: bool

    @property
    def bottleneck(self) -> int:
        """The slowest stage."""
        return max(range(len(self.stages)), key=lambda index: self.stages[index].seconds)
