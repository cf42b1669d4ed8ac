"""What crosses between processes: every kind of tensor, skips over stages; buffers that change from microbatch to microbatch."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.nn import functional as F

import pdcompiler
from pdcompiler import Machine, Pipeline
from pdcompiler.core import ops
from pdcompiler.core.ir import type_of
from tests.models import ZOO, Example
from tests.processes.checks import check_step, compile_example
from tests.processes.pool import Group

pytestmark = pytest.mark.processes


class Crossing(nn.Module):
    """Stage 0 makes a bool mask, integers, a 0-d tensor and a transposed view; later stages read them, the last all but one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.table = nn.Embedding(8, 8)
        self.mix = nn.Linear(4, 4)
        self.last = nn.Linear(8, 3)

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.first(rows)
        mask, ids, scale, turned = hidden > 0, hidden.argmax(-1), hidden.abs().mean(), hidden.transpose(1, 2)
        looked_up = self.table(ids)
        mixed = self.mix(turned).transpose(1, 2)
        result: Tensor = self.last(torch.where(mask, mixed * scale, looked_up + hidden))
        return result


def crossing_kinds(pipe: Pipeline) -> set[tuple[torch.dtype, int]]:
    """Element type and number of dimensions of every value that crosses, also of those that are packed."""
    values: list[Any] = [node.args[0] for node in pipe.program.graph.nodes if node.target is ops.transfer]
    parts = [part for value in values for part in (value.args[0] if value.target is ops.pack else [value])]
    return {(type_of(part).dtype, len(type_of(part).shape)) for part in parts if isinstance(part, fx.Node)}


def check_crossing(schedule: str, packed: bool) -> None:
    torch.manual_seed(0)
    model = Crossing().double()
    rows, target = torch.randn(8, 4, 6, dtype=torch.float64), torch.randn(8, 4, 3, dtype=torch.float64)
    example = Example("crossing", model, (rows,), target=target, loss_fn=F.mse_loss)
    machine = Machine() if packed else Machine.flat(latency_seconds=1e-12)
    pipe = compile_example(example, schedule=schedule, partition=["table", "mix", "last"], machine=machine)
    check_step(pipe, example)
    packs = [node for node in pipe.program.graph.nodes if node.target is ops.pack]
    assert bool(packs) == packed
    kinds = crossing_kinds(pipe)
    assert {(torch.bool, 3), (torch.int64, 2), (torch.float64, 0), (torch.float64, 3)} <= kinds, kinds


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_masks_integers_scalars_views_and_skips_cross(pool: Callable[[int], Group], schedule: str, packed: bool) -> None:
    pool(4).run(check_crossing, schedule, packed)


def check_unet() -> None:
    example = ZOO["unet"]()
    check_step(compile_example(example), example)


def test_a_unets_skips_cross_all_stages_between(pool: Callable[[int], Group]) -> None:
    pool(3).run(check_unet)


def check_batch_norm() -> list[str]:
    """Gives the buffers that this rank holds the newest values of."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)]
    model = nn.Sequential(*layers).double()
    rows, target = torch.randn(8, 4, dtype=torch.float64), torch.randn(8, 2, dtype=torch.float64)
    example = Example("batch_norm", model, (rows,), target=target, loss_fn=F.mse_loss)
    pipe = pdcompiler.compile(model, dist.get_world_size(), loss_fn=F.mse_loss, microbatches=4, partition=["3"])
    for _ in range(2):
        check_step(pipe, example)
    counts = {name: int(buffer) for name, buffer in pipe.named_buffers() if name.endswith("num_batches_tracked")}
    assert set(counts.values()) == {8}
    return [name for name, _ in pipe.named_buffers()]


def test_batch_norm_counts_microbatches_where_its_stage_is(pool: Callable[[int], Group]) -> None:
    names = ("num_batches_tracked", "running_mean", "running_var")
    assert [sorted(held) for held in pool(2).run(check_batch_norm)] == [[f"{i}.{name}" for name in names] for i in (1, 4)]


def check_dropout(schedule: str, options: dict[str, Any]) -> list[float]:
    """Two steps, each against plain PyTorch that draws from the same seeds; the losses, and nothing of torch's own generator."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.4)) for _ in range(4)]).double()
    rows, target = torch.randn(8, 6, dtype=torch.float64), torch.randn(8, 6, dtype=torch.float64)
    example = Example("dropout", model, (rows,), target=target, loss_fn=F.mse_loss)
    pipe = compile_example(example, schedule=schedule, **options)
    torch.manual_seed(dist.get_rank())
    losses = [float(check_step(pipe, example).loss) for _ in range(2)]  # type: ignore[arg-type]
    assert torch.initial_seed() == dist.get_rank()
    return losses


def test_dropout_is_that_of_plain_pytorch_on_any_ranks(pool: Callable[[int], Group]) -> None:
    plans: list[tuple[int, str, dict[str, Any]]] = [
        (2, "1f1b", {"partition": ["2"]}), (4, "zb-h1", {"partition": ["1", "2", "3"]}), (2, "interleaved", {}),
        (3, "1f1b", {"partition": ["2"], "replicas": (2, 1)}),
    ]  # fmt: skip
    found = [losses for ranks, schedule, options in plans for losses in pool(ranks).run(check_dropout, schedule, options)]
    assert len(found) == 2 + 4 + 2 + 3 and found[0][0] != found[0][1]
    assert all(losses == pytest.approx(found[0], rel=1e-12) for losses in found)


def wait_for_rank_0() -> tuple[float, ...]:
    """Rank 0's part takes half a second more: rank 1 waits for it."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).double()
    pipe = pdcompiler.compile(model, 2, loss_fn=F.mse_loss, partition=["1"], microbatches=2)
    rows = torch.randn(4, 6, dtype=torch.float64)
    pipe.step(rows, target=rows)
    dist.barrier()
    time.sleep(0.5 * (dist.get_rank() == 0))
    pipe.step(rows, target=rows)
    found = pipe.metrics()
    assert found.seconds >= 0.4 and found.steps == 2
    return found.waited


def test_metrics_say_who_waited(pool: Callable[[int], Group]) -> None:
    first, second = pool(2).run(wait_for_rank_0)
    assert first == second and first[0] < 0.3 < 0.4 <= first[1]
