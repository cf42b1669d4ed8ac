"""What do torch.distributed.pipelining and we give where users reported faults, beside plain PyTorch?

Each case of CASES.md that was reproduced on the peer is one number (a gradient's size, a count of rows, ...), computed by plain
PyTorch in one process, and by both tools on two ranks of gloo with the same model and inputs. A tool that raises shows the error.

    python benchmarks/correctness_against_peer.py [--case 13 ...] [--check]

With --check it exits 1 where our number is not plain PyTorch's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import begin
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, SplitPoint, pipeline
from torch.nn import functional as F

import pdcompiler

RANKS, MICROBATCHES, LIMIT = 2, 4, 120
Loss = Callable[[Any, Any], Tensor]


def seeded(build: Callable[[], Any]) -> Any:
    """The same weights each time, float64."""
    torch.manual_seed(0)
    return build().double()


def drawn(*shape: int, seed: int = 1) -> Tensor:
    """Normal numbers, the same each time."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Runner:
    """One way to train a model of two modules in a row, a rank each. who: "plain", "peer" or "ours"."""

    def __init__(self, who: str, model: nn.Sequential, loss_fn: Loss = F.mse_loss, loss_weight: Any = "rows") -> None:
        self.who, self.model, self.loss_fn = who, model, loss_fn
        if who == "plain":
            return
        rank, ranks = dist.get_rank(), dist.get_world_size()
        if who == "ours":
            self.pipe = pdcompiler.compile(
                model, ranks, loss_fn=loss_fn, microbatches=MICROBATCHES, partition=["1"] if ranks == RANKS else None,
                loss_weight=loss_weight,
            )  # fmt: skip
            return
        stage = PipelineStage(model[rank] if ranks == RANKS else model, rank, ranks, torch.device("cpu"))
        self.schedule = Schedule1F1B(stage, n_microbatches=MICROBATCHES, loss_fn=loss_fn)
        self.forward_only = ScheduleGPipe(stage, n_microbatches=MICROBATCHES)

    def parameters(self) -> list[nn.Parameter]:
        """Of this process."""
        if self.who == "ours":
            return list(self.pipe.parameters())
        part = self.model[dist.get_rank()] if self.who == "peer" and dist.get_world_size() == RANKS else self.model
        return list(part.parameters())

    def step(self, x: Tensor, target: Tensor) -> float:
        """A training step; the loss, where this rank has it."""
        if self.who == "ours":
            result = self.pipe.step(x, target=target)
            return float(result.loss)  # type: ignore[union-attr, arg-type]
        if self.who == "plain":
            loss = self.loss_fn(self.model(x), target)
            loss.backward()  # type: ignore[no-untyped-call]
            return float(loss.detach())
        losses: list[Tensor] = []
        first, last = dist.get_rank() == 0, dist.get_rank() == dist.get_world_size() - 1
        self.schedule.step(*((x,) if first else ()), **({"target": target, "losses": losses} if last else {}))
        return float(torch.stack(losses).mean()) if last else math.nan

    def evaluate(self, x: Tensor) -> Tensor | None:
        """The outputs, where this rank has them."""
        if self.who == "ours":
            return self.pipe.eval_step(x).outputs  # type: ignore[no-any-return]
        if self.who == "plain":
            return self.model(x)  # type: ignore[no-any-return]
        return self.forward_only.step(*((x,) if dist.get_rank() == 0 else ()))  # type: ignore[no-any-return]

    def gradient_size(self) -> float:
        """The 2-norm of all ranks' gradients together."""
        size = sum((parameter.grad**2).sum() for parameter in self.parameters() if parameter.grad is not None)
        total = torch.as_tensor(size, dtype=torch.float64)
        if dist.is_initialized():
            dist.all_reduce(total)
        return float(total) ** 0.5


def mlp() -> Any:
    return seeded(lambda: nn.Sequential(nn.Sequential(nn.Linear(6, 6), nn.Tanh()), nn.Sequential(nn.Linear(6, 6), nn.Tanh())))


def two_steps_without_zeroing(who: str) -> float:
    """Case 1: the gradient after two steps by that after one."""
    runner = Runner(who, mlp())
    runner.step(drawn(8, 6), drawn(8, 6, seed=2))
    once = runner.gradient_size()
    runner.step(drawn(8, 6), drawn(8, 6, seed=2))
    return runner.gradient_size() / once


class Embeds(nn.Module):
    """Looks up rows."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


class Scores(Embeds):
    """Scores against the same rows."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden @ self.weight.t()


def tied_weights_drift(who: str) -> float:
    """Case 2: after 10 steps of AdamW, the largest difference between the two holders of a tied weight."""
    weight = nn.Parameter(drawn(9, 6))
    model = nn.Sequential(Embeds(weight), Scores(weight))
    runner = Runner(who, model, lambda scores, ids: F.cross_entropy(scores, ids))
    ids = torch.arange(8)
    optimizer: torch.optim.Optimizer | None = None
    for _ in range(10):
        runner.step(ids, ids.roll(1))
        optimizer = optimizer or torch.optim.AdamW(runner.parameters(), lr=0.1)
        optimizer.step()
        optimizer.zero_grad()
    held = runner.parameters()[0].detach().clone()
    if not dist.is_initialized():
        return 0.0
    both = [torch.empty_like(held) for _ in range(RANKS)]
    dist.all_gather(both, held)
    return float((both[0] - both[1]).abs().max())


def clipped_norm(who: str) -> float:
    """Case 10: the gradient norm that clipping gives on rank 0."""
    runner = Runner(who, mlp(), lambda outputs, target: 100 * F.mse_loss(outputs, target))
    runner.step(drawn(8, 6), drawn(8, 6, seed=2))
    if who == "ours":
        return float(runner.pipe.clip_grad_norm_(1.0))
    return float(nn.utils.clip_grad_norm_(runner.parameters(), 1.0))


def ignored_targets(who: str) -> float:
    """Case 11: the gradient, where targets are ignored unevenly."""
    target = torch.arange(8) % 6
    target[:3] = -100
    loss: Loss = lambda outputs, labels: F.cross_entropy(outputs, labels, ignore_index=-100)  # noqa: E731
    runner = Runner(who, mlp(), loss, loss_weight=lambda batch: (batch["target"] != -100).sum())
    runner.step(drawn(8, 6), target)
    return runner.gradient_size()


class Straight(torch.autograd.Function):
    """Rounds forwards; backwards, the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.round(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0]


class Rounds(nn.Module):
    """A Linear whose outputs are rounded."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return Straight.apply(self.linear(x))  # type: ignore[no-untyped-call, no-any-return]


def custom_backward(who: str) -> float:
    """Case 12b: the gradient of a straight-through estimator's layer, cut by each tool's own tracer."""
    model = seeded(lambda: nn.Sequential(Rounds(), nn.Linear(6, 6)))
    x, target = drawn(8, 6), drawn(8, 6, seed=2)
    if who != "peer":
        runner = Runner(who, model)
        runner.step(x, target)
        held = dict(runner.pipe.named_parameters() if who == "ours" else model.named_parameters())
        weight = held["0.linear.weight"].grad if "0.linear.weight" in held else None
    else:
        cut = pipeline(model, mb_args=(x[:2],), split_spec={"1": SplitPoint.BEGINNING})
        stage = cut.build_stage(dist.get_rank(), torch.device("cpu"))
        schedule = ScheduleGPipe(stage, n_microbatches=MICROBATCHES, loss_fn=F.mse_loss)
        schedule.step(*((x,) if dist.get_rank() == 0 else ()), **({"target": target} if dist.get_rank() == 1 else {}))
        weight = dict(stage.submod.named_parameters())["0.linear.weight"].grad if dist.get_rank() == 0 else None
    return 0.0 if weight is None else float(weight.norm())


def seven_rows(who: str) -> float:
    """Case 13: output rows of 7 rows in 4 microbatches."""
    outputs = Runner(who, mlp()).evaluate(drawn(7, 6))
    return math.nan if outputs is None else float(len(outputs))


def smaller_batch_later(who: str) -> float:
    """Case 14: the sum of the outputs of 4 rows, after a batch of 8."""
    runner = Runner(who, mlp())
    runner.evaluate(drawn(8, 6))
    outputs = runner.evaluate(drawn(4, 6, seed=3))
    return math.nan if outputs is None else float(outputs.detach().sum())


class Turns(nn.Module):
    """Gives a transposed view."""

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(len(x), 2, 3).transpose(1, 2)


class Weighs(nn.Module):
    """Weighs each place on its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(6.0).reshape(3, 2))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def a_transposed_boundary(who: str) -> float:
    """Case 19: the loss, where the value that crosses is a transposed view."""
    model = seeded(lambda: nn.Sequential(nn.Sequential(nn.Linear(6, 6), Turns()), Weighs()))
    return Runner(who, model).step(drawn(8, 6), drawn(8, 3, 2, seed=2))


def under_autocast(who: str) -> float:
    """Case 21: the loss under bfloat16 autocast, after a step without it (plain PyTorch: a loop over microbatches)."""
    runner = Runner(who, mlp().float())
    x, target = drawn(8, 6).float(), torch.zeros(8, 6)
    runner.step(x, target)
    with torch.autocast("cpu", torch.bfloat16):
        if who == "plain":
            parts = zip(x.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True)
            return sum(runner.step(*part) / MICROBATCHES for part in parts)
        return runner.step(x, target)


def batches_tracked(who: str) -> float:
    """Case 23: what a BatchNorm has counted after a step of 4 microbatches (plain PyTorch: a loop over them)."""
    model = seeded(lambda: nn.Sequential(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)), nn.Linear(6, 6)))
    x, target = drawn(8, 6), drawn(8, 6, seed=2)
    if who == "plain":
        for part, wanted in zip(x.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
            F.mse_loss(model(part), wanted).backward()  # type: ignore[no-untyped-call]
    else:
        Runner(who, model).step(x, target)
    return float(model[0][1].num_batches_tracked)


def dropout_loss(who: str) -> float:
    """Case 24: the loss with dropout; must be the same on one rank and on two."""
    part = lambda: nn.Sequential(nn.Linear(6, 6), nn.Dropout())  # noqa: E731
    model = seeded(lambda: nn.Sequential(part(), part()))
    torch.manual_seed(0)
    return Runner(who, model).step(drawn(8, 6), drawn(8, 6, seed=2))


def compiled_twice(who: str) -> float:
    """Case 25: the sum of the model's own outputs, after it was compiled twice."""
    model = seeded(lambda: nn.Sequential(Rounds(), nn.Linear(6, 6)))
    x = drawn(8, 6)
    for _ in range(2):
        if who == "peer":
            pipeline(model, mb_args=(x[:2],), split_spec={"1": SplitPoint.BEGINNING})
        elif who == "ours":
            Runner(who, model).step(x, drawn(8, 6, seed=2))
    return float(model(x).detach().sum())


CASES: dict[str, tuple[str, Callable[[str], float]]] = {
    "1": ("gradient after two steps / after one", two_steps_without_zeroing),
    "2": ("drift of a tied weight's holders", tied_weights_drift),
    "10": ("norm that clipping gives", clipped_norm),
    "11": ("gradient, targets ignored unevenly", ignored_targets),
    "12b": ("gradient through a straight-through estimator", custom_backward),
    "13": ("output rows of 7 in 4 microbatches", seven_rows),
    "14": ("outputs of 4 rows after a batch of 8", smaller_batch_later),
    "19": ("loss over a transposed boundary", a_transposed_boundary),
    "21": ("loss under bfloat16 autocast", under_autocast),
    "23": ("batches that BatchNorm counted", batches_tracked),
    "24": ("loss with dropout, 2 ranks / 1 rank", dropout_loss),
    "25": ("outputs after compiling twice", compiled_twice),
}


def launched(case: str, who: str, ranks: int) -> str | float:
    """A case on so many ranks: the number that the first rank with one gives, or the first error."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), __file__]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.Popen(
            [*command, "--one", case, who, folder], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        try:
            done.wait(LIMIT)
        except subprocess.TimeoutExpired:
            os.killpg(done.pid, 9)
            return f"nothing after {LIMIT} s"
        found = [json.loads(path.read_text()) for path in sorted(Path(folder).iterdir())]
    numbers = [value for value in found if isinstance(value, float) and not math.isnan(value)]
    errors = [value for value in found if isinstance(value, str)]
    return (errors or numbers or ["no rank says anything"])[0]


def one(case: str, who: str, folder: str) -> None:
    """This rank's part of a case."""
    begin(100, pinned=False)
    try:
        value: Any = CASES[case][1](who)
    except BaseException as error:
        value = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    Path(folder, str(dist.get_rank())).write_text(json.dumps(value))
    with contextlib.suppress(Exception):
        dist.barrier()


def numbers(case: str) -> list[Any]:
    """Plain PyTorch's, the peer's, ours."""
    if case != "24":
        return [CASES[case][1]("plain"), *(launched(case, who, RANKS) for who in ("peer", "ours"))]
    found: list[Any] = [1.0]
    for who in ("peer", "ours"):
        alone, both = launched(case, who, 1), launched(case, who, RANKS)
        found.append(both / alone if isinstance(alone, float) and isinstance(both, float) else [alone, both])
    return found


def shown(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)[:70]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one:
        one(*options.one)
        return 0
    table, wrong = Table("case", "what", "plain PyTorch", "torch.distributed.pipelining", "ours"), list[str]()
    for case in options.case:
        plain, peer, own = numbers(case)
        tolerance = 1e-6 if case == "21" else 1e-9  # the one in float32
        if not (isinstance(own, float) and abs(own - plain) <= tolerance * max(1.0, abs(plain))):
            wrong.append(case)
        table.add_row(case, CASES[case][0], *map(shown, (plain, peer, own)))
    Console(width=150).print(table)
    print(f"cases in which our number is not plain PyTorch's: {', '.join(wrong) or 'none'}")
    return 1 if options.check and wrong else 0


if __name__ == "__main__":
    sys.exit(main())
