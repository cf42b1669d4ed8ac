"""How fast is a step of ours, against torch.distributed.pipelining's, on two ranks?

Same pre-norm GPT (8 blocks, vocabulary 1,024), same cut (`layers.4`), 8 microbatches, one thread a rank, gloo; both zero their
gradients before each step. Equal gradients are checked first. Then pairs of steps alternate in one run, and the table gives the
median and the quartiles of the paired ratios: the peer's time by ours, above 1 where ours is faster.

    python benchmarks/throughput.py [--pairs 45] [--size 64,32,2 ...] [--check]

`limit` is the bubble's: plain PyTorch's in one process / ranks x (1 + (ranks - 1) / microbatches).   `in stages` is the time
that our busiest rank spends in its stages' functions, from steps of its own; the rest is the bubble and messages.
With --check it exits 1 where the median ratio against 1F1B misses the size's bar.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from gpt import VOCABULARY, Gpt, token_loss
from ranks import begin, by_turns, is_rank, paired_ratio, run_on_ranks, spread
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, SplitPoint, pipeline

import pdcompiler

RANKS, MICROBATCHES, CUT = 2, 8, "layers.4"
SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}
BARS = {(64, 32, 2): 1.5, (128, 64, 2): 1.2, (256, 64, 4): 1.0}
"""Sizes (width, sequence, rows of a microbatch), and the least ratio against 1F1B."""
Size = tuple[int, int, int]
Step = Callable[[], Any]


@dataclass(frozen=True)
class Contestant:
    """One way to take a step. parameters: this rank's, by the model's names.   functions: what its step spends its time in."""

    step: Step
    parameters: dict[str, nn.Parameter]
    functions: tuple[nn.Module, ...] = ()

    def run(self) -> None:
        """What is timed."""
        for parameter in self.parameters.values():
            parameter.grad = None
        self.step()


def ours(model: nn.Module, schedule: str, ids: Tensor, target: Tensor) -> Contestant:
    """Compiled by pdcompiler."""
    pipe = pdcompiler.compile(
        model, RANKS, example_args=(ids,), example_target=target, loss_fn=token_loss, schedule=schedule,
        microbatches=MICROBATCHES, partition=[CUT],
    )  # fmt: skip
    functions = pipe.ranks[dist.get_rank()].children()
    return Contestant(lambda: pipe.step(ids, target=target), dict(pipe.named_parameters()), tuple(functions))


def peer(model: nn.Module, schedule: Any, ids: Tensor, target: Tensor) -> Contestant:
    """Cut and run by torch.distributed.pipelining."""
    part = ids[: len(ids) // MICROBATCHES]
    cut = pipeline(model, mb_args=(part,), split_spec={CUT: SplitPoint.BEGINNING})
    stage = cut.build_stage(dist.get_rank(), torch.device("cpu"))
    runner = schedule(stage, n_microbatches=MICROBATCHES, loss_fn=token_loss)

    def step() -> None:
        if dist.get_rank() == 0:
            runner.step(ids)
        else:
            runner.step(target=target, losses=[])

    return Contestant(step, dict(stage.submod.named_parameters()))


def plain(model: nn.Module, ids: Tensor, target: Tensor) -> Contestant:
    """Plain PyTorch in one process: a loop over the same microbatches."""

    def step() -> None:
        for part, wanted in zip(ids.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
            (token_loss(model(part), wanted) / MICROBATCHES).backward()  # type: ignore[no-untyped-call]

    return Contestant(step, dict(model.named_parameters()))


def assert_equal_gradients(contestants: Iterable[Contestant], reference: Contestant) -> None:
    """Every rank's gradients are plain PyTorch's, within 1e-5 of the tensor's largest; together they are all of them."""
    reference.run()
    for contestant in contestants:
        contestant.run()
        for name, parameter in contestant.parameters.items():
            wanted = reference.parameters[name].grad
            assert parameter.grad is not None and wanted is not None, name
            torch.testing.assert_close(parameter.grad, wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))
        held: list[Any] = [None] * RANKS
        dist.all_gather_object(held, list(contestant.parameters))
        assert sorted(name for names in held for name in names) == sorted(reference.parameters), held


def name_of(size: Size) -> str:
    """As on the command line."""
    return ",".join(map(str, size))


def measure(size: Size, pairs: int) -> dict[str, list[float]]:
    """Seconds of each contestant in each round; every other round in reverse order."""
    width, length, rows = size
    torch.manual_seed(0)
    model = Gpt(width)
    ids, target = torch.randint(VOCABULARY, (2, rows * MICROBATCHES, length))
    contestants: dict[str, Contestant] = {}
    for name, schedule in SCHEDULES.items():
        contestants[f"ours {name}"] = ours(copy.deepcopy(model), name, ids, target)
        contestants[f"torch {name}"] = peer(copy.deepcopy(model), schedule, ids, target)
    single = plain(model, ids, target)
    assert_equal_gradients(contestants.values(), single)
    runs: dict[str, Step] = {name: contestant.run for name, contestant in contestants.items()}
    runs["single"] = single.run if dist.get_rank() == 0 else lambda: None
    seconds = by_turns(runs, pairs)
    for schedule in SCHEDULES:
        seconds[f"in stages {schedule}"] = [seconds_in_functions(contestants[f"ours {schedule}"]) for _ in range(10)]
    return seconds


def seconds_in_functions(contestant: Contestant) -> float:
    """Of one step: the time inside the contestant's functions, on the rank where it is longest."""
    clock = [0.0]

    def begin(*_: Any) -> None:
        clock[0] -= time.perf_counter()

    def end(*_: Any) -> None:
        clock[0] += time.perf_counter()

    hooks = [f.register_forward_pre_hook(begin) for f in contestant.functions]
    hooks += [f.register_forward_hook(end) for f in contestant.functions]
    dist.barrier()
    contestant.run()
    for hook in hooks:
        hook.remove()
    longest = torch.tensor(clock[0])
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    return longest.item()


def ratios(seconds: dict[str, list[float]], schedule: str) -> tuple[float, float, float]:
    """First quartile, median and third quartile of the peer's time by ours, round by round."""
    return paired_ratio(seconds[f"torch {schedule}"], seconds[f"ours {schedule}"])


def rows_of(size: Size, seconds: dict[str, list[float]]) -> list[list[str]]:
    """The lines of the table for one size, one a schedule."""
    medians = {name: statistics.median(values) * 1e3 for name, values in seconds.items()}
    limit = medians["single"] / RANKS * (1 + (RANKS - 1) / MICROBATCHES)
    lines = []
    for schedule in SCHEDULES:
        own, other = medians[f"ours {schedule}"], medians[f"torch {schedule}"]
        times = [f"{milliseconds:.1f} ms" for milliseconds in (own, other, medians["single"], limit)]
        inside = f"{medians[f'in stages {schedule}']:.1f} ms"
        ratio = spread(ratios(seconds, schedule))
        lines.append([name_of(size), schedule, times[0], inside, times[1], ratio, *times[2:], f"{own / limit:.2f}"])
    return lines


def main(sizes: Sequence[Size], pairs: int, check: bool) -> int:
    """Measure each size, print the table, and judge. Only rank 0 prints."""
    console = begin(width=130, pinned=False)
    columns = ("size", "schedule", "ours", "in stages", "torch", "torch / ours", "one process", "limit", "ours / limit")
    table = Table(*columns, title=f"{RANKS} ranks, {MICROBATCHES} microbatches, {pairs} pairs", title_justify="left")
    missed, figures = False, []
    for size in sizes:
        seconds = measure(size, pairs)
        for line in rows_of(size, seconds):
            table.add_row(*line)
        middle, bar = ratios(seconds, "1f1b")[1], BARS.get(size, 0.0)
        missed |= not middle >= bar
        figures.append(f"{name_of(size)}: {middle:.2f} (bar {bar})")
    console.print(table)
    console.print(f"ratio against 1F1B   {'   '.join(figures)}   {'MISSED' if missed else 'met'}")
    dist.destroy_process_group()
    return int(check and missed)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=45)
    parser.add_argument("--size", type=lambda text: tuple(map(int, text.split(","))), nargs="+", default=list(BARS))
    parser.add_argument("--check", action="store_true")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    given = parse(sys.argv[1:])
    if is_rank():
        sys.exit(main(given.size, given.pairs, given.check))
    sys.exit(run_on_ranks(__file__, RANKS, sys.argv[1:]))
