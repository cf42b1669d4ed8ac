"""Does a GPT compiled for 4 ranks compute plain PyTorch's gradients on a GPU, and how long does a step take there?

All rank programs run on one GPU, in one process, through the reference backend: this checks the compiled graphs on CUDA, not
messages between GPUs. In float64 against plain PyTorch's loop over the same microbatches, then timed in float32.

    python benchmarks/gpu_check.py          under 3 minutes; without a GPU it says so and exits 0

It exits 1 where a gradient differs by more than 1e-10 of its tensor's largest element.
"""

from __future__ import annotations

import copy
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from gpt import VOCABULARY, Gpt, token_loss
from torch import Tensor, nn

import pdcompiler

RANKS, MICROBATCHES, WIDTH, LENGTH, ROWS, REPEATS = 4, 8, 512, 256, 32, 20
TOLERANCE = 1e-10


def plain_step(model: nn.Module, ids: Tensor, target: Tensor) -> None:
    """A loop over the microbatches."""
    for part, wanted in zip(ids.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
        (token_loss(model(part), wanted) / MICROBATCHES).backward()  # type: ignore[no-untyped-call]


def compiled(model: nn.Module, schedule: str, ids: Tensor, target: Tensor) -> pdcompiler.Pipeline:
    """For 4 ranks, all of which run in this process."""
    return pdcompiler.compile(
        model, RANKS, example_args=(ids,), example_target=target, loss_fn=token_loss, schedule=schedule, microbatches=MICROBATCHES
    )


def largest_difference(pipe: pdcompiler.Pipeline, model: nn.Module) -> float:
    """Over all gradients, each by its tensor's largest element."""
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    differences = []
    for name, parameter in pipe.named_parameters():
        wanted = expected.pop(name)
        assert parameter.grad is not None and wanted is not None, name
        differences.append(float((parameter.grad - wanted).abs().max() / wanted.abs().max()))
    assert not expected, f"no gradient for {sorted(expected)}"
    return max(differences)


def seconds_of(run: Callable[[], Any]) -> float:
    """The median, after some rounds to warm up."""
    taken = []
    for number in range(REPEATS + 3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        if number >= 3:
            taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def main() -> int:
    """Check both schedules, then time them."""
    if not torch.cuda.is_available():
        print("gpu_check: no GPU on this machine, nothing was checked")
        return 0
    torch.manual_seed(0)
    device = torch.device("cuda")
    model = Gpt(WIDTH).to(device, torch.float64)
    ids, target = torch.randint(VOCABULARY, (2, ROWS, LENGTH), device=device)
    plain_step(model, ids, target)
    worst = 0.0
    for schedule in ("1f1b", "gpipe"):
        replica = copy.deepcopy(model)
        replica.zero_grad()
        start = time.perf_counter()
        pipe = compiled(replica, schedule, ids, target)
        seconds = time.perf_counter() - start
        pipe.step(ids, target=target)
        difference = largest_difference(pipe, model)
        worst = max(worst, difference)
        print(f"{schedule:>5}: compiled for {RANKS} ranks in {seconds:.1f} s, gradients differ by {difference:.1e} at most")
    plain = Gpt(WIDTH).to(device)
    pipe = compiled(copy.deepcopy(plain), "1f1b", ids, target)
    ours, eager = seconds_of(lambda: pipe.step(ids, target=target)), seconds_of(lambda: plain_step(plain, ids, target))
    print(f"{torch.cuda.get_device_name()}: a step of all {RANKS} ranks {ours * 1e3:.1f} ms, plain PyTorch {eager * 1e3:.1f} ms")
    print("gpu_check:", "equal" if worst <= TOLERANCE else f"DIFFERENT, {worst:.1e} above {TOLERANCE:.0e}")
    return int(not worst <= TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
