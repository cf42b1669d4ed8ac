"""Trains on the launched ranks until one of them fails in the way that is asked for; what this rank raised goes to a file.

    RANK=1 WORLD_SIZE=3 ... python fail.py WAY FOLDER SCHEDULE
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pdcompiler
from pdcompiler.given_schedule import SEVERAL

ROWS = 8
STEPS = 3
ONE_EACH, TWO_EACH = ["table", "last"], ["table", "deep.0", "deep.1", "deep.2", "last"]
"""Where stages begin, with one stage a rank and with two. Either way the table is in stage 1, on rank 1."""


class Net(nn.Module):
    """`first`, the `table` that is looked up, some `deep` layers, and `last`, which may have the weight of `first`."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.table = nn.Embedding(10, 8)
        self.deep = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
        self.last = nn.Linear(8, 8)
        if tied:
            self.last.weight = self.first.weight

    def forward(self, rows: Tensor, ids: Tensor) -> Tensor:
        hidden = torch.relu(self.first(rows)) + self.table(ids)
        result: Tensor = self.last(self.deep(torch.relu(hidden)))
        return result


def main(way: str, folder: Path, schedule: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank = int(os.environ["RANK"])
    if way == "late":
        torch.distributed.init_process_group("gloo")  # a user's own, with its own long timeout
    rows, ids, target = torch.randn(ROWS, 8), torch.arange(ROWS), torch.randn(ROWS, 8)
    streams = schedule == "pipedream"
    options = {"optimizer": sgd} if streams else {"microbatches": ROWS}
    pipe = pdcompiler.compile(
        Net(not streams), 3, loss_fn=F.mse_loss, partition=TWO_EACH if schedule in SEVERAL else ONE_EACH, schedule=schedule,
        timeout=10.0 if way == "late" else 300.0, **options,
    )  # fmt: skip
    for _ in range(4 if streams else 1):  # until the pipeline is full
        pipe.step(rows, ids, target=target)
    report = {"raised": None}
    try:
        for step in range(STEPS):
            if step == (STEPS - 1 if way.startswith("stop ") else 1):
                ids = ids.clone()
                fail(way, rank, ids)
            pipe.step(rows, ids, target=target)
        pipe.drain()
    except Exception as error:
        report = {"raised": type(error).__name__, "message": str(error), "rank": getattr(error, "rank", None)}
    (folder / f"{rank}.json").write_text(json.dumps(report))
    sys.exit(report["raised"] is not None)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)


def fail(way: str, rank: int, ids: Tensor) -> None:
    """Here, if it is this rank's turn."""
    if way == "index":
        ids[5] = 99  # read by stage 1 alone, in microbatch 5
    if way == f"kill {rank}":
        os.kill(os.getpid(), signal.SIGKILL)
    if way == f"stop {rank}":
        sys.exit(0)
    if way == "late" and rank == 1:
        time.sleep(40)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
