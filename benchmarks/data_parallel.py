"""How fast is one stage with a replica on each rank, against DistributedDataParallel?

That is data parallelism, by the path of all other pipelines: each rank runs its own microbatch, gradients are summed in buckets.
Two ranks on gloo, one thread pinned to one core each; both zero their gradients before each step. Equal gradients are checked
first. Then pairs of steps alternate in one run; the ratio is DistributedDataParallel's time by ours: above 1, ours is faster.

    python benchmarks/data_parallel.py [--pairs 45] [--model GPT ...] [--check]

With --check it exits 1 where the median of the paired ratios is below 0.95 for a model.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from gpt import Gpt, token_loss
from ranks import begin, by_turns, is_rank, paired_ratio, run_on_ranks, spread
from rich.table import Table
from small_models import ResNet, images, sentences
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import pdcompiler

RANKS, BAR = 2, 0.95


@dataclass(frozen=True)
class Case:
    """A model with the batch of all ranks."""

    make: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    loss_fn: Callable[[Tensor, Tensor], Tensor]


def mlp() -> nn.Module:
    """Nearly all parameters, hardly any activations."""
    widths = [256, 1024, 1024, 1024, 1024, 10]
    layers = [nn.Sequential(nn.Linear(*pair), nn.ReLU()) for pair in itertools.pairwise(widths)]
    return nn.Sequential(*layers)


def vectors(rows: int) -> tuple[Tensor, Tensor]:
    """Data and classes for all ranks."""
    return torch.randn(rows, 256), torch.randint(10, (rows,))


CASES = {
    "GPT": Case(lambda: Gpt(128), lambda: sentences(1, 64), token_loss),
    "ResNet": Case(lambda: ResNet(16), lambda: images(2, 64), F.cross_entropy),
    "MLP": Case(mlp, lambda: vectors(256), F.cross_entropy),
}
Step = Callable[[], None]


def ours(model: nn.Module, case: Case, data: Tensor, target: Tensor) -> Step:
    """One stage, replicated; each rank cuts its own rows."""
    pipe = pdcompiler.compile(
        model, RANKS, example_args=(data,), example_target=target, loss_fn=case.loss_fn, partition=[], replicas=(RANKS,),
        microbatches=RANKS,
    )  # fmt: skip

    def step() -> None:
        pipe.zero_grad()
        pipe.step(data, target=target)

    return step


def theirs(model: nn.Module, case: Case, data: Tensor, target: Tensor) -> Step:
    """DistributedDataParallel, as it is without options."""
    replica, rank = DistributedDataParallel(model), dist.get_rank()
    rows, wanted = data.chunk(RANKS)[rank], target.chunk(RANKS)[rank]

    def step() -> None:
        replica.zero_grad()
        case.loss_fn(replica(rows), wanted).backward()  # type: ignore[no-untyped-call]

    return step


def assert_equal_gradients(ours: nn.Module, theirs: nn.Module) -> None:
    """Within 1e-5 of the tensor's largest."""
    expected = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        wanted = expected[name].grad
        assert parameter.grad is not None and wanted is not None, name
        torch.testing.assert_close(parameter.grad, wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))


def measure(case: Case, pairs: int) -> tuple[int, dict[str, list[float]]]:
    """Bytes of the parameters, and the seconds of each in each round."""
    torch.manual_seed(0)
    model, (data, target) = case.make(), case.batch()
    own, other = copy.deepcopy(model), copy.deepcopy(model)
    steps = {"ours": ours(own, case, data, target), "DDP": theirs(other, case, data, target)}
    for step in steps.values():
        step()
    assert_equal_gradients(own, other)
    return sum(parameter.nbytes for parameter in model.parameters()), by_turns(steps, pairs)


def main(names: Sequence[str], pairs: int, check: bool) -> int:
    """Measure each model, print the table, and judge. Only rank 0 prints."""
    console = begin(width=130)
    title = f"one stage, {RANKS} replicas, {pairs} pairs"
    table = Table("model", "parameters", "ours", "DDP", "DDP / ours", title=title, title_justify="left")
    missed = False
    for name in names:
        nbytes, seconds = measure(CASES[name], pairs)
        ratio = paired_ratio(seconds["DDP"], seconds["ours"])
        times = [f"{statistics.median(seconds[who]) * 1e3:.1f} ms" for who in ("ours", "DDP")]
        table.add_row(name, f"{nbytes / 1e6:.1f} MB", *times, spread(ratio))
        missed |= not ratio[1] >= BAR
    console.print(table)
    console.print(f"bar {BAR}   {'MISSED' if missed else 'met'}")
    dist.destroy_process_group()
    return int(check and missed)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=45)
    parser.add_argument("--model", choices=CASES, nargs="+", default=list(CASES))
    parser.add_argument("--check", action="store_true")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    given = parse(sys.argv[1:])
    if is_rank():
        sys.exit(main(given.model, given.pairs, given.check))
    sys.exit(run_on_ranks(__file__, RANKS, sys.argv[1:]))
