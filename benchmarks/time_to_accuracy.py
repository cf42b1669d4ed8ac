"""What do old weights cost in minibatches, and what do missing flushes save in time?

Two small models are really trained, on four ranks in one process, by the same optimizer under gpipe, 1f1b, pipedream, pipedream
with vertical sync and pipedream-2bw: a convolutional net on scikit-learn's digits (1,797 real images that ship with it), and a
byte-level GPT on real text (the reference manual that ships with Python). All see the same minibatches in the same order. What a
minibatch takes is simulated: the planner's own walk of the schedule on four GPUs of one server of the paper's cluster A, whose
speed these small models do not fill, so times say how schedules compare there and nothing of larger models.

    python benchmarks/time_to_accuracy.py [--minibatches 500] [--picture FILE.png] [--check]

`to target` is the first minibatch after which the mean of the last 20 losses is below the target. With --check it exits 1 where a
schedule does not reach it, or one without flushes takes longer to it, in simulated time, than gpipe. Needs scikit-learn, and
matplotlib for the picture: pip install -e '.[benchmarks]'
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from gpt import Gpt, token_loss
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import pdcompiler
from pdcompiler import Asynchronous

RANKS, MICROBATCHES, MEAN_OF = 4, 4, 20
MACHINE = "pipedream-a"
SCHEDULES: dict[str, Any] = {
    "gpipe": "gpipe",
    "1f1b": "1f1b",
    "pipedream": "pipedream",
    "vertical sync": Asynchronous("pipedream", vertical_sync=True),
    "pipedream-2bw": "pipedream-2bw",
}
WITH_FLUSHES = ("gpipe", "1f1b")


@dataclass(frozen=True)
class Task:
    """A model to train. batches: the same ones each time.   target: of the mean of the last losses.   right: the share of
    held-out examples that a trained model has right."""

    name: str
    make: Callable[[], nn.Module]
    batches: Callable[[int], Iterator[tuple[Tensor, Tensor]]]
    loss_fn: Callable[[Tensor, Tensor], Tensor]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    target: float
    right: Callable[[nn.Module], float]


def images() -> tuple[Tensor, Tensor]:
    """All digits, in a fixed random order: the last 297 are held out."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    return torch.tensor(digits.images, dtype=torch.float32)[order].unsqueeze(1) / 16, torch.tensor(digits.target)[order]


def digit_batches(count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """32 of the first 1,500."""
    generator, (pixels, labels) = torch.Generator().manual_seed(1), images()
    for _ in range(count):
        rows = torch.randint(1500, (32,), generator=generator)
        yield pixels[rows], labels[rows]


def digits_right(model: nn.Module) -> float:
    """Of the held-out ones."""
    pixels, labels = images()
    return float((model(pixels[1500:]).argmax(1) == labels[1500:]).float().mean())


def conv_net() -> nn.Module:
    """Four convolutions and a head."""
    widths = [1, 16, 16, 32, 32]
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, 10))


def text() -> Tensor:
    """As bytes; the last twentieth is held out."""
    whole = "\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    return torch.tensor(list(whole.encode()))


def text_batches(count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """16 places of 64 bytes, each with the bytes behind it."""
    generator, known = torch.Generator().manual_seed(1), text()
    for _ in range(count):
        places = torch.randint(len(known) * 19 // 20 - 65, (16, 1), generator=generator)
        yield known[places + torch.arange(64)], known[places + torch.arange(1, 65)]


def bytes_right(model: nn.Module) -> float:
    """Of the held-out ones' first 16 x 256."""
    held = text()[-(len(text()) // 20) :]
    rows = held[: 16 * 256 + 1]
    return float((model(rows[:-1].view(16, 256)).argmax(-1) == rows[1:].view(16, 256)).float().mean())


TASKS = (
    Task("digits, convolutional net", conv_net, digit_batches, F.cross_entropy,
         lambda weights: torch.optim.SGD(weights, lr=0.02, momentum=0.9), 0.1, digits_right),
    Task("text, byte-level GPT", lambda: Gpt(64), text_batches, token_loss,
         lambda weights: torch.optim.AdamW(weights, lr=1e-3), 2.6, bytes_right),
)  # fmt: skip


@dataclass
class Curve:
    """seconds: simulated, of one minibatch.   warm_up: minibatches before the first has finished."""

    seconds: float
    warm_up: int
    losses: list[float] = field(default_factory=list)
    right: float = 0.0

    def mean(self, index: int) -> float:
        """Of the last losses up to one."""
        recent = self.losses[max(0, index + 1 - MEAN_OF) : index + 1]
        return sum(recent) / len(recent)

    def reached(self, target: float) -> int | None:
        """Minibatches until the mean of enough of them is below the target."""
        return next((i + 1 for i in range(MEAN_OF - 1, len(self.losses)) if self.mean(i) <= target), None)

    def time(self, minibatches: int) -> float:
        """Simulated seconds until so many have finished."""
        return (minibatches + self.warm_up) * self.seconds


def train(task: Task, schedule: str, count: int) -> Curve:
    """On all batches, by the planner's own partition for the schedule."""
    torch.manual_seed(0)
    model, (first, *_) = task.make(), task.batches(1)
    chosen = SCHEDULES[schedule]
    cuts_batch = schedule in (*WITH_FLUSHES, "pipedream-2bw")
    pipe = pdcompiler.compile(
        model, RANKS, example_args=first[:1], example_target=first[1], loss_fn=task.loss_fn, schedule=chosen,
        microbatches=MICROBATCHES if cuts_batch else None, machine=MACHINE, optimizer=task.optimizer,
    )  # fmt: skip
    found = {}
    for index, (inputs, target) in enumerate(track(task.batches(count), f"{task.name}, {schedule}", count, transient=True)):
        if schedule in WITH_FLUSHES:
            pipe.zero_grad()
        result = pipe.step(inputs, target=target)
        if schedule in WITH_FLUSHES:
            pipe.optimizer.step()
        if result is not None:
            found[index if result.index is None else result.index] = float(result.loss)
    found |= {result.index: float(result.loss) for result in pipe.drain()}
    curve = simulated(pipe, schedule)
    curve.losses = [found[index] for index in range(count)]
    with torch.no_grad():
        curve.right = task.right(model.eval())
    return curve


def simulated(pipe: pdcompiler.Pipeline, schedule: str) -> Curve:
    """What a minibatch takes on the machine: a step that flushes, a tick, or a batch of 2bw's ticks."""
    why = pipe.partition.explanation
    assert why is not None and why.walked is not None
    if schedule in WITH_FLUSHES:
        return Curve(why.walked, 0)
    ticks = why.depths[0] if why.depths else 0
    per_minibatch = MICROBATCHES if schedule == "pipedream-2bw" else 1
    return Curve(why.walked * per_minibatch, -(-ticks // per_minibatch))


def table(task: Task, curves: dict[str, Curve]) -> Table:
    """One line a schedule; ratios are to 1f1b."""
    columns = ("schedule", "last loss", "held out, right", "minibatches to target", "ms a minibatch", "s to target", "1f1b / it")
    made = Table(*columns, title=f"{task.name}, target {task.target}")
    base = curves["1f1b"].reached(task.target)
    for name, curve in curves.items():
        reached = curve.reached(task.target)
        seconds = None if reached is None else curve.time(reached)
        ratio = "" if seconds is None or base is None else f"{curves['1f1b'].time(base) / seconds:.2f}"
        made.add_row(
            name, f"{curve.mean(len(curve.losses) - 1):.3f}", f"{curve.right:.1%}", str(reached or "not reached"),
            f"{curve.seconds * 1e3:.2f}", "" if seconds is None else f"{seconds:.3f}", ratio,
        )  # fmt: skip
    return made


def draw(path: Path, found: dict[str, dict[str, Curve]]) -> None:
    """Loss against minibatches, and against simulated time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(found), 2, figsize=(11, 4 * len(found)), squeeze=False)
    for row, (task, curves) in zip(axes, found.items(), strict=True):
        for name, curve in curves.items():
            means = [curve.mean(index) for index in range(len(curve.losses))]
            row[0].plot(range(1, len(means) + 1), means, label=name)
            row[1].plot([curve.time(index + 1) for index in range(len(means))], means, label=name)
        row[0].set(title=task, xlabel="minibatches", ylabel=f"loss, mean of the last {MEAN_OF}", yscale="log")
        row[1].set(title=f"on four GPUs of {MACHINE}, simulated", xlabel="seconds", yscale="log")
        row[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Train, show, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minibatches", type=int, default=500)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    found, missed = dict[str, dict[str, Curve]](), list[str]()
    for task in TASKS:
        curves = {name: train(task, name, given.minibatches) for name in SCHEDULES}
        found[task.name] = curves
        Console(width=130).print(table(task, curves))
        missed += [f"{task.name}: {what}" for what in judged(task, curves)]
    if given.picture is not None:
        draw(given.picture, found)
    print("; ".join(missed) if missed else "every schedule reached the targets; without flushes sooner than gpipe")
    sys.exit(bool(missed) and given.check)


def judged(task: Task, curves: dict[str, Curve]) -> Iterator[str]:
    """What misses a bar."""
    gpipe = curves["gpipe"].reached(task.target)
    for name, curve in curves.items():
        reached = curve.reached(task.target)
        if reached is None:
            yield f"{name} did not reach {task.target}"
        elif gpipe is not None and name not in WITH_FLUSHES and curve.time(reached) > curves["gpipe"].time(gpipe):
            yield f"{name} took longer than gpipe"


if __name__ == "__main__":
    main()
