"""Every schedule, 1 to 4 ranks, 1 to 8 microbatches: ends, and is exact. Batches whose rows do not divide."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pdcompiler
from pdcompiler import Pipeline, Schedule
from pdcompiler.core.schedule_csv import to_csv
from pdcompiler.given_schedule import SEVERAL
from pdcompiler.passes.schedules.named import SCHEDULES
from pdcompiler.testing import assert_same, plain_eval
from tests.models import ZOO, Example
from tests.processes.checks import check_step, compile_example, first_rows
from tests.processes.pool import Group

pytestmark = pytest.mark.processes

LIMIT = 20.0
"""Seconds for the step of a case, which waits only where a rank waits for ever; compiling has a limit of its own."""

compiled: list[tuple[Pipeline, Example]] = []
"""In each process of the pool: what the next step takes."""


def compile_small(schedule: str, microbatches: int) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 6), *(layer for _ in range(6) for layer in (nn.Tanh(), nn.Linear(6, 6))), nn.Linear(6, 3)]
    model = nn.Sequential(*layers).double()
    rows, target = torch.randn(8, 4, dtype=torch.float64), torch.randn(8, 3, dtype=torch.float64)
    example = Example("small", model, (rows,), target=target, loss_fn=nn.functional.mse_loss)
    pipe = compile_example(example, schedule=schedule, microbatches=microbatches)
    pipe.prepare(rows, target=target)
    compiled[:] = [(pipe, example)]


def step_small(outputs: str) -> float:
    """Gives this rank's loss."""
    loss = check_step(*compiled[0], outputs).loss
    assert loss is not None
    return loss.item()


def compiled_schedule() -> Any:
    """The actions of each rank that the pipeline runs."""
    return compiled[0][0].schedule.ranks


def sizes() -> Iterator[Any]:
    """Every schedule, 1 to 4 ranks, 1 to 8 microbatches; of the newer ones a sample, all of them in `make test-all`."""
    for schedule, ranks, microbatches in itertools.product((*SCHEDULES, *SEVERAL), (1, 2, 3, 4), range(1, 9)):
        if schedule == "dualpipe-v" and microbatches < 2 * ranks:
            continue  # refused
        is_sampled = schedule in ("gpipe", "1f1b") or (ranks, microbatches) in ((1, 2), (2, 1), (2, 5), (3, 7), (4, 2), (4, 8))
        yield pytest.param(schedule, ranks, microbatches, marks=() if is_sampled else pytest.mark.full)


@pytest.mark.parametrize(("schedule", "ranks", "microbatches"), list(sizes()))
def test_case_29_every_schedule_ends(pool: Callable[[int], Group], schedule: str, ranks: int, microbatches: int) -> None:
    """Peers hang for some schedules, ranks and microbatches; also with fewer microbatches than ranks."""
    outputs = ("none", "last", "all")[microbatches % 3]
    pool(ranks).run(compile_small, schedule, microbatches)
    losses = pool(ranks).run(step_small, outputs, timeout=LIMIT)
    assert len(losses) == ranks
    assert len(set(losses)) == 1


@pytest.mark.parametrize("schedule", [*SCHEDULES, "interleaved", "zb-v"])
def test_case_31_every_rank_has_the_same_loss(pool: Callable[[int], Group], schedule: str) -> None:
    """Peers print -1 on most ranks."""
    pool(4).run(compile_small, schedule, 5)
    losses = pool(4).run(step_small, "none", timeout=LIMIT)
    assert len(losses) == 4
    assert len(set(losses)) == 1 and losses[0] > 0


OWN = Schedule.parse("""
    F0 F1 B0 W0 F2 F3 B1 B2 W1 B3 W3 W2
    F0 B0 F1 W0 B1 F2 B2 W1 F3 W2 B3 W3
""")


FILES = {"own.txt": str(OWN), "own.csv": to_csv(OWN, communication=True)}


@pytest.mark.parametrize("name", FILES)
def test_a_schedule_from_a_file_is_exact(pool: Callable[[int], Group], tmp_path: Path, name: str) -> None:
    """In the text form, and as torch's CSV with its messages: both run in the order that the file says."""
    path = tmp_path / name
    path.write_text(FILES[name])
    pool(2).run(compile_small, str(path), 4)
    losses = pool(2).run(step_small, "all", timeout=LIMIT)
    assert len(set(losses)) == 1
    assert pool(2).run(compiled_schedule) == [OWN.ranks] * 2


def check_rows() -> None:
    """One pipeline; full batches, smaller ones and back; fewer rows than microbatches; one row."""
    example = ZOO["mlp"]()
    pipe = compile_example(example, microbatches=4)
    for rows in (8, 7, 3, 1, 8):
        check_step(pipe, first_rows(example, rows))
        part = first_rows(example, rows)
        assert_same(pipe.eval_step(*part.args).outputs, plain_eval(example.model, part.args, {}), 1e-12, f"{rows} rows")


@pytest.mark.parametrize("ranks", [2, 3])
def test_any_number_of_rows(pool: Callable[[int], Group], ranks: int) -> None:
    pool(ranks).run(check_rows)


class TaggedRows(nn.Sequential):
    """Row i holds i + 1 everywhere, and every stage leaves it as it is."""

    def __init__(self, stages: int) -> None:
        super().__init__(*(nn.Linear(3, 3, bias=False, dtype=torch.float64) for _ in range(stages)))
        for parameter in self.parameters():
            nn.init.eye_(parameter)


def check_pairs() -> None:
    rows = torch.arange(1.0, 9.0, dtype=torch.float64).unsqueeze(1).expand(8, 3).contiguous()
    model = TaggedRows(dist.get_world_size())
    cuts = [str(n) for n in range(1, len(model))]
    pipe = pdcompiler.compile(model, dist.get_world_size(), microbatches=8, loss_fn=nn.L1Loss(), partition=cuts)
    met = pipe.step(rows, target=rows, outputs="all")
    assert met.loss is not None and met.loss.item() == 0
    assert torch.equal(met.outputs, rows)
    missed = pipe.step(rows, target=rows.roll(1, 0))
    assert missed.loss is not None and missed.loss.item() == (7 * 1 + 7) / 8


def test_labels_and_outputs_of_a_microbatch_meet(pool: Callable[[int], Group]) -> None:
    pool(4).run(check_pairs)


def step_automatic(name: str) -> str:
    """A step of what "auto" finds; the schedule that this rank found."""
    example = ZOO[name]()
    batch = {"example_args": example.args, "example_kwargs": example.kwargs, "example_target": example.target}
    pipe = compile_example(example, schedule="auto", **batch)
    check_step(pipe, example)
    return str(pipe.schedule)


@pytest.mark.parametrize("name", ["resnet", *(pytest.param(name, marks=pytest.mark.full) for name in ("gpt2", "t5", "unet"))])
def test_every_rank_finds_the_same_schedule_and_its_step_is_exact(pool: Callable[[int], Group], name: str) -> None:
    assert len(set(pool(2).run(step_automatic, name))) == 1
