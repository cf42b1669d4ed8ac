"""One model on a slow link between two hosts: the ways to train it that `against_data_parallel.py` compares, ready to take turns.

The link is made as slow as the ratio of communication to computation asks for; the planner's plans are for that link, with
costs profiled here. Not here: the hosts (`hosts.py`), the ratios (`cluster_a.py`), turns and tables.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from cluster_a import RATIOS
from hosts import HOSTS, limit, sent_bytes, unlimit
from paper_models import Case
from ranks import by_turns, seconds_of
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import pdcompiler
from pdcompiler.compiler import Request, fingerprint, trace_model
from pdcompiler.core.asynchronous import Asynchronous
from pdcompiler.core.batch import read_batch
from pdcompiler.core.explanation import Explanation
from pdcompiler.core.machine import Device, Machine
from pdcompiler.core.partition import Partition
from pdcompiler.core.plan import Training
from pdcompiler.passes.tracing.profile import apply_profile, profile_trace
from pdcompiler.plan_partition import plan_partition

BUCKETS_MB = (1.0, 4.0, 25.0)
MICROBATCHES = {"1f1b": (4, 8), "pipedream": (1,)}
"""Of all hosts' batches, of which the planner chooses; of one."""
TURN = 8
"""Hosts' batches in each turn."""
CORE = Device("core", 20e9, 8e9, math.inf)
"""For what a profile leaves open."""
LATENCY = 300e-6


@dataclass
class Contestant:
    """One way to train. turn: on TURN hosts' batches.   predicted: seconds of it, by the planner.   sent: bytes of each, by this
    host."""

    turn: Callable[[], None]
    plan: str
    predicted: float
    sent: list[int] = field(default_factory=list)

    def run(self) -> None:
        """What is timed."""
        before = sent_bytes()
        self.turn()
        self.sent.append(sent_bytes() - before)


def sgd(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """With small steps, since what is learned is not measured."""
    return torch.optim.SGD(parameters, lr=1e-4)


class Trial:
    """One model on a link of its own. data, target: of one batch of each host, the same in all turns."""

    def __init__(self, name: str, case: Case) -> None:
        torch.manual_seed(0)
        self.case, self.model, self.ratio = case, case.make(), RATIOS[name]
        self.data, self.target = case.batch(HOSTS * case.rows)
        self.nbytes = sum(parameter.nbytes for parameter in self.model.parameters())
        unlimit()
        self.compute = self.compute_seconds()
        self.bandwidth = self.communicated() / (self.ratio * self.compute)
        limit(self.bandwidth)
        self.machine = Machine.flat(
            HOSTS, bytes_per_second=self.bandwidth, latency_seconds=LATENCY, device=CORE, overlap=True, name="hosts"
        )  # fmt: skip

    def batches(self, tensor: Tensor) -> Sequence[Tensor]:
        """Each host's."""
        return tensor.chunk(HOSTS)

    def communicated(self) -> float:
        """Bytes that a ring of all hosts' gradients moves on each."""
        return self.nbytes * 2 * (HOSTS - 1) / HOSTS

    def ratio_now(self) -> float:
        """Of communication to computation, measured again: it has moved where other work shares the cores."""
        return self.communicated() / self.bandwidth / self.compute_seconds()

    def compute_seconds(self) -> float:
        """Of forward and backward of a host's batch, on both at once."""
        model, rank = copy.deepcopy(self.model), dist.get_rank()
        rows, target = self.batches(self.data)[rank], self.batches(self.target)[rank]
        return statistics.median([seconds_of(lambda: self.case.loss_fn(model(rows), target).backward()) for _ in range(9)][2:])

    def plan(self, schedule: str) -> Partition:
        """The planner's, with costs profiled here, on both hosts at once; both take rank 0's."""
        found: list[Any] = [min((self._plan(schedule, count) for count in MICROBATCHES[schedule]), key=predicted)]
        dist.broadcast_object_list(found)
        partition: Partition = found[0]
        if partition.devices != HOSTS:
            raise SystemExit(f"the planner leaves a host without work: {partition}")
        return partition

    def _plan(self, schedule: str, microbatches: int) -> Partition:
        training = Training(schedule, microbatches, optimizer_bytes=0.0)
        rows = self.case.rows * (1 if schedule == "pipedream" else HOSTS) // training.microbatches
        request = Request(self.model, HOSTS, self.case.loss_fn, self.machine, None, True, None, None, training)
        batch, name = read_batch(self.model, (self.data,), {}, self.target, None), fingerprint(self.model)
        trace = trace_model(request, batch, rows=rows, symbolic=False, gradients=True)
        dist.barrier()
        profile = profile_trace(trace, self.model, batch, rows=rows, fingerprint=name, loss_fn=self.case.loss_fn)
        apply_profile(trace, profile=profile, device=CORE, fingerprint=name)
        return plan_partition(request, trace, [rows], rows * training.microbatches)

    def flushing(self, partition: Partition) -> Contestant:
        """1f1b: all hosts' batches together, cut into microbatches."""
        model = copy.deepcopy(self.model)
        pipe = pdcompiler.compile(
            model, HOSTS, example_args=(self.data,), example_target=self.target, loss_fn=self.case.loss_fn,
            schedule="1f1b", microbatches=why(partition).microbatches, partition=partition, machine=self.machine,
        )  # fmt: skip
        optimizer = sgd(list(pipe.parameters()))

        def turn() -> None:
            for _ in range(TURN // HOSTS):
                pipe.zero_grad()
                pipe.step(self.data, target=self.target)
                optimizer.step()

        plan = f"{plan_of(partition)}, {why(partition).microbatches} microbatches"
        return Contestant(turn, plan, predicted(partition) * TURN / HOSTS)

    def asynchronous(self, partition: Partition) -> tuple[Contestant, pdcompiler.Pipeline]:
        """pipedream, at the planner's depths: a host's batch after the other."""
        data, target = self.batches(self.data), self.batches(self.target)
        pipe = pdcompiler.compile(
            copy.deepcopy(self.model), HOSTS, example_args=(data[0],), example_target=target[0], loss_fn=self.case.loss_fn,
            schedule=Asynchronous(depths=why(partition).depths), optimizer=sgd, partition=partition, machine=self.machine,
        )  # fmt: skip

        def turn() -> None:
            for number in range(TURN):
                pipe.step(data[number % HOSTS], target=target[number % HOSTS])

        return Contestant(turn, f"{plan_of(partition)}, depths {why(partition).depths}", predicted(partition) * TURN), pipe

    def data_parallel(self, bucket_mb: float, seconds: float) -> Contestant:
        """DistributedDataParallel with buckets of at most so many megabytes. seconds: of a host's batch, by the planner."""
        model, rank = DistributedDataParallel(copy.deepcopy(self.model), bucket_cap_mb=bucket_mb), dist.get_rank()
        rows, target = self.batches(self.data)[rank], self.batches(self.target)[rank]
        optimizer = sgd(list(model.parameters()))

        def turn() -> None:
            for _ in range(TURN // HOSTS):
                optimizer.zero_grad()
                self.case.loss_fn(model(rows), target).backward()  # type: ignore[no-untyped-call]
                optimizer.step()

        return Contestant(turn, f"buckets of {bucket_mb:g} MB", seconds * TURN)

    def tuned(self, seconds: float) -> Contestant:
        """With the buckets that are the fastest of a few."""
        tried = {f"{size}": self.data_parallel(size, seconds) for size in BUCKETS_MB}
        taken = by_turns({name: contestant.run for name, contestant in tried.items()}, 3, warm_up=1)
        medians = [statistics.median(values) for values in taken.values()]
        found: list[Any] = [min(zip(medians, tried, strict=True))[1]]
        dist.broadcast_object_list(found)
        best = tried[found[0]]
        best.sent.clear()
        return best


def plan_of(partition: Partition) -> str:
    """Replicas of each stage, and where the later ones begin."""
    replicas = "-".join(str(stage.replicas) for stage in partition.stages)
    begins = [next((str(call) for call in stage.calls), "?") for stage in partition.stages[1:]]
    return f"{replicas} at {', '.join(begins)}" if begins else replicas


def predicted(partition: Partition) -> float:
    """Seconds of a step; pipedream: of a minibatch."""
    walked = why(partition).walked
    assert walked is not None
    return walked


def why(partition: Partition) -> Explanation:
    """The planner's reasons."""
    assert partition.explanation is not None
    return partition.explanation
