"""Models of the zoo train on gloo as in the plain loop: loss, outputs, every gradient, every buffer; and evaluate."""

import itertools
from collections.abc import Callable

import pytest
import torch.distributed as dist

from pdcompiler.testing import assert_same, plain_eval
from tests.models import FLOAT32, ZOO
from tests.processes.checks import check_step, compile_example, first_rows
from tests.processes.pool import Group

pytestmark = pytest.mark.processes

FULL = pytest.mark.full
NEWER = ("zb-h1", "zb-h2", "interleaved", "zb-v", "dualpipe-v")
SAMPLED = {("gpt2", 2, "zb-v"), ("unet", 2, "zb-h1"), ("t5", 2, "interleaved"), ("resnet", 2, "dualpipe-v"), ("gpt2", 4, "zb-h2")}
CASES = [
    *[
        pytest.param(*case, marks=() if case in SAMPLED else FULL)
        for case in itertools.product(("gpt2", "unet", "t5", "resnet"), (2, 4), NEWER)
    ],
    *[pytest.param(name, ranks, "1f1b") for name in ("gpt2", "bert", "t5", "llama", "resnet") for ranks in (2, 4)],
    pytest.param("gpt2", 2, "gpipe"),
    *[pytest.param(name, 3, "1f1b", marks=FULL) for name in ("gpt2", "bert", "t5", "llama", "resnet")],
    *[pytest.param(name, ranks, "gpipe", marks=FULL) for name in ("bert", "t5", "llama", "resnet") for ranks in (2, 3, 4)],
]


def check_model(name: str, schedule: str) -> list[str]:
    """Gives the names of the parameters that this rank holds."""
    example = ZOO[name]()
    microbatches = max(4, 2 * dist.get_world_size()) if schedule == "dualpipe-v" else 4
    pipe = compile_example(example, schedule=schedule, microbatches=microbatches)
    check_step(pipe, example)
    return [name for name, _ in pipe.named_parameters()]


@pytest.mark.parametrize(("name", "ranks", "schedule"), CASES)
def test_a_step_is_the_plain_loop(pool: Callable[[int], Group], name: str, ranks: int, schedule: str) -> None:
    held = pool(ranks).run(check_model, name, schedule)
    assert {name for names in held for name in names} == {name for name, _ in ZOO[name]().model.named_parameters()}


def check_evaluation(name: str) -> None:
    """A model in training mode: its modes, and the buffers of BatchNorm, stay as they are."""
    example = ZOO[name]()
    before = {key: value.clone() for key, value in example.model.state_dict().items()}
    pipe = compile_example(example)
    for rows in (8, 3):
        part = first_rows(example, rows)
        outputs = pipe.eval_step(*part.args, **part.kwargs).outputs
        assert_same(outputs, plain_eval(example.model, part.args, part.kwargs), FLOAT32, f"outputs of {rows} rows")
    assert example.model.training
    assert all(value.equal(before[key]) for key, value in pipe.state_dict().items())
    last = pipe.eval_step(*example.args, outputs="last", **example.kwargs)
    assert (last.outputs is not None) == (dist.get_rank() == dist.get_world_size() - 1)


@pytest.mark.parametrize("name", ["resnet", "t5"])
def test_an_evaluation_gives_every_rank_the_whole_batchs_outputs(pool: Callable[[int], Group], name: str) -> None:
    pool(2).run(check_evaluation, name)
