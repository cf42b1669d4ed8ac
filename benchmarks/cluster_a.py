"""PipeDream's cluster A: how much data parallelism communicates there, and what the planner says of the paper's deployments.

Communication / computation of data parallelism, without overlap, for one round of a minibatch on each of n devices:

    communication   2 (n-1)/n x bytes of the parameters / 1.25e9 bytes per second      a ring over 10 Gbit/s, which a server's
                                                                                       devices share as one link each way
    computation     forward and backward of a minibatch                                of the paper's own profile, on a V100

    VGG-16    16 devices, batches of 64: 830 ms / 336 ms = 2.47      (the profile is of 128; half of it)
    GNMT-16   16 devices, batches of 64: 1666 ms / 520 ms = 3.20     (gnmt_large)
    AWD LM    no profile was published. It ran on 4 devices, a straight pipeline 4.25x as fast as data parallelism. No pipeline
              of 4 takes less than a round's computation for 4 minibatches, so communication that nothing hid was 3.25 of it.

What the paper reports against data parallelism on cluster A (Narayanan et al., PipeDream, SOSP 2019, table 1; quoted from memory
of it in the project's notes): VGG-16 5.28x, AWD LM 4.25x, in epoch time and in time to accuracy; GNMT-16 2.92x to accuracy, 2.34x
in epoch time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from rich.table import Table

from pdcompiler.core.graph_txt import Graph
from pdcompiler.core.machine import Machine
from pdcompiler.core.plan import Plan, PlannedStage, Training
from pdcompiler.core.workload import Value, Workload
from pdcompiler.passes.partition.evaluate import evaluate
from pdcompiler.planner import plan, straight_plan

DATA = Path(__file__).parents[2] / "shared" / "data" / "pipedream_profiles"
TRAINING = Training("pipedream", optimizer_bytes=0.0)
RATIOS = {"VGG-16": 2.47, "GNMT-16": 3.20, "AWD LM": 3.25}


@dataclass(frozen=True)
class Deployment:
    """One line of the paper's table. share: the paper's minibatch by the profile's.   replicas: of each stage; None: one, of as
    many stages as devices.   reported: how many times data parallelism's speed, and of what."""

    servers: int
    profile: str | None
    share: float
    replicas: tuple[int, ...] | None
    reported: str


DEPLOYMENTS = {
    "VGG-16": Deployment(4, "vgg16", 0.5, (15, 1), "5.28x (epoch and accuracy)"),
    "GNMT-16": Deployment(4, "gnmt_large", 1.0, None, "2.92x (accuracy; epoch 2.34x)"),
    "AWD LM": Deployment(1, None, 1.0, None, "4.25x (epoch and accuracy)"),
}


def workload(deployment: Deployment, folder: Path = DATA) -> Workload:
    """The profile, for minibatches of the paper's size."""
    whole = Graph.load(folder / f"{deployment.profile}.txt").to_workload()
    share = deployment.share
    values = tuple(Value(value.producer, value.consumers, value.bytes * share) for value in whole.values)
    return replace(
        whole, forward=whole.forward * share, backward=whole.backward * share, saved=whole.saved * share, values=values
    )  # fmt: skip


def derived_ratio(machine: Machine, layers: Workload) -> float:
    """As in the module's docstring."""
    devices = machine.world_size
    communication = 2 * (devices - 1) / devices * float(layers.parameters.sum()) / machine.link_bytes_per_second
    return communication / float(layers.seconds.sum())


def of_the_papers_kind(deployment: Deployment, layers: Workload, machine: Machine) -> Plan:
    """The best with its replicas, by the planner's costs."""
    if deployment.replicas is None:
        return straight_plan(layers, machine, TRAINING).plan
    first, last = deployment.replicas
    every = tuple(range(layers.layers))
    plans = [Plan((PlannedStage(every[:cut], first), PlannedStage(every[cut:], last))) for cut in every[1:]]
    return min(plans, key=lambda plan: evaluate(plan, layers, machine, TRAINING).seconds)


def predictions() -> Table:
    """The planner's plans for the paper's deployments, beside what it reports."""
    columns = ("model", "devices", "ratio", "planner's plan", "predicted", "paper's plan", "predicted", "reported")
    title = "cluster A: how many times as fast as data parallelism, by the planner on the paper's own profiles, and as reported"
    table = Table(*columns, title=title, title_justify="left")
    for name, deployment in DEPLOYMENTS.items():
        machine = Machine.load("pipedream-a").take(4 * deployment.servers)
        table.add_row(name, str(machine.world_size), *_predicted(name, deployment, machine), deployment.reported)
    return table


def _predicted(name: str, deployment: Deployment, machine: Machine) -> list[str]:
    config = "straight" if deployment.replicas is None else "-".join(map(str, deployment.replicas))
    if deployment.profile is None:
        return [f"{RATIOS[name]:.2f}, from its speed", "no profile was published", "", config, ""]
    if not (DATA / f"{deployment.profile}.txt").exists():
        return [f"{RATIOS[name]:.2f}", f"skipped: there is no {DATA / deployment.profile}.txt", "", config, ""]
    layers = workload(deployment)
    parallel = Plan((PlannedStage(tuple(range(layers.layers)), machine.world_size),))
    slowest = evaluate(parallel, layers, machine, TRAINING).seconds
    best, theirs = plan(layers, machine, TRAINING).plan, of_the_papers_kind(deployment, layers, machine)
    times = [f"{slowest / evaluate(found, layers, machine, TRAINING).seconds:.2f}x" for found in (best, theirs)]
    return [f"{derived_ratio(machine, layers):.2f}", str(best), times[0], config, times[1]]
