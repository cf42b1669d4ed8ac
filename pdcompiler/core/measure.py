"""Measure this computer: what `Machine.measure` gives.

Two workers, one thread on one core or one GPU each, time the same things at the same moment, as ranks do (two processes on one
CPU share its memory bandwidth): a matrix product, a sum of large arrays, many sums of tiny ones. Then they send messages of
several sizes to each other and back, each computing a little before it answers, so that the other has to be woken, as in a
pipeline; a line is fitted to half of the time there and back. The workers are processes of their own, so that nothing of the
caller's (threads, process groups) is touched. Not here: what an operator takes (`profile.py`).
"""

from __future__ import annotations

import datetime
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy
import torch
import torch.distributed as dist

from pdcompiler.core.errors import WorkerError
from pdcompiler.core.machine import Device, Level, Machine

START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from pdcompiler.core.measure import work; work(*sys.argv[2:])"
FIGURES, SAID = "figures.json", "said"
MESSAGE_BYTES = tuple(4**k for k in range(1, 12))
MESSAGES, BLOCKS, BLOCK_SECONDS = 30, 15, 0.02


def measure(*, dtype: str = "float32", timeout: float = 120.0, progress: Callable[[str], None] | None = None) -> Machine:
    """The machine that this computer is. Raises WorkerError where a worker fails, or takes longer than `timeout` seconds."""
    gpus = torch.cuda.device_count()
    with tempfile.TemporaryDirectory() as folder:
        _run_workers(Path(folder), 1 if gpus == 1 else 2, dtype, timeout, progress)
        figures = json.loads((Path(folder) / FIGURES).read_text())
    device = Device(**figures["device"])
    level = Level("NCCL" if gpus else "gloo", gpus or None, **figures["link"])
    return Machine("this computer", (level,), ((device, None),), overlap=gpus > 0)


def _run_workers(folder: Path, count: int, dtype: str, timeout: float, progress: Callable[[str], None] | None) -> None:
    """Start the workers and wait for them; none is left when this returns."""
    workers: list[subprocess.Popen[bytes]] = []
    deadline, told = time.monotonic() + timeout, 0
    try:
        for rank in range(count):
            arguments = [json.dumps(sys.path), str(folder), str(rank), str(count), dtype, str(timeout)]
            with (folder / f"stderr{rank}").open("wb") as errors:
                workers.append(subprocess.Popen([sys.executable, "-c", START, *arguments], stderr=errors))
        while any(worker.poll() is None for worker in workers):
            told = _pass_on(folder / SAID, told, progress)
            for rank, worker in enumerate(workers):
                if worker.poll():
                    said = (folder / f"stderr{rank}").read_text(errors="replace").strip().splitlines()
                    raise WorkerError(f"measuring failed: {said[-1] if said else f'exit code {worker.returncode}'}", rank=rank)
            if time.monotonic() > deadline:
                raise WorkerError(f"measuring took longer than timeout={timeout:g} seconds", rank=None)
            time.sleep(0.02)
        _pass_on(folder / SAID, told, progress)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


def _pass_on(said: Path, told: int, progress: Callable[[str], None] | None) -> int:
    lines = said.read_text().splitlines() if said.exists() else []
    for line in lines[told:]:
        if progress is not None:
            progress(line)
    return len(lines)


def work(folder: str, rank: str, count: str, dtype: str, timeout: str) -> None:
    """What a worker does: measure, and on rank 0 write the figures."""
    torch.set_num_threads(1)
    worker = _Worker(Path(folder), int(rank), int(count), getattr(torch, dtype))
    dist.init_process_group(
        "nccl" if worker.device.type == "cuda" else "gloo", init_method=f"file://{folder}/store", rank=worker.rank,
        world_size=worker.count, timeout=datetime.timedelta(seconds=float(timeout)),
    )  # fmt: skip
    figures = {"device": worker.measure_device(), "link": worker.measure_link()}
    if worker.rank == 0:
        (Path(folder) / FIGURES).write_text(json.dumps(figures))
    dist.barrier()
    dist.destroy_process_group()


class _Worker:
    """One of the two, with its device."""

    def __init__(self, folder: Path, rank: int, count: int, dtype: torch.dtype) -> None:
        self.folder, self.rank, self.count, self.dtype = folder, rank, count, dtype
        self.on_gpu = torch.cuda.is_available()
        self.device = torch.device("cuda", rank) if self.on_gpu else torch.device("cpu")
        if self.on_gpu:
            torch.cuda.set_device(self.device)
        elif hasattr(os, "sched_setaffinity"):
            cores = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, {cores[rank % len(cores)]})

    def measure_device(self) -> dict[str, float | str]:
        """The fields of a Device."""
        size, long = (8192, 2**26) if self.on_gpu else (512, 2**24)
        self.say("matrix products")
        a, b, c = (torch.ones(size, size, dtype=self.dtype, device=self.device) for _ in range(3))
        product = self.time(lambda: torch.mm(a, b, out=c))
        self.say("memory")
        x, y, z = (torch.ones(long, device=self.device) for _ in range(3))
        total = self.time(lambda: torch.add(x, y, out=z))
        self.say("small operations")
        small = torch.ones(4, device=self.device)
        operation = self.time(lambda: small + small)
        return {
            "name": torch.cuda.get_device_name(self.device) if self.on_gpu else "core",
            "flops_per_second": 2 * size**3 / product,
            "memory_bytes_per_second": 3 * x.nbytes / total,
            "memory_bytes": self.memory_bytes(),
            "seconds_per_operation": operation,
        }

    def measure_link(self) -> dict[str, float]:
        """The figures of a Level. One GPU alone talks to nobody."""
        if self.count == 1:
            return {"bytes_per_second": math.inf, "latency_seconds": 0.0}
        self.say("messages")
        seconds = [self.message_seconds(nbytes) for nbytes in MESSAGE_BYTES]
        latency, bytes_per_second = fit_line(MESSAGE_BYTES, seconds)
        return {"bytes_per_second": bytes_per_second, "latency_seconds": latency}

    def message_seconds(self, nbytes: int) -> float:
        """Of one message: half of what an answer takes, without the computing that the other does first."""
        value = torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
        matrix = torch.ones(384, 384, device=self.device)
        computing, answered = [], []
        for _ in range(MESSAGES):
            dist.barrier()
            for sender in (0, 1):
                if self.rank == sender:
                    computing.append(self.block(lambda: torch.mm(matrix, matrix), 1))
                    start = time.perf_counter()
                    dist.send(value, 1 - self.rank)
                else:
                    dist.recv(value, 1 - self.rank)
            self.wait()
            answered.append(time.perf_counter() - start)
        return max((statistics.median(answered) - statistics.median(computing)) / 2, 1e-9)

    def wait(self) -> None:
        """Until the device is done."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def time(self, run: Callable[[], object]) -> float:
        """Median seconds of a call, over blocks of calls that begin on all workers at once."""
        run()
        calls = torch.tensor(max(1, math.ceil(BLOCK_SECONDS / self.block(run, 3))), device=self.device)
        dist.all_reduce(calls, op=dist.ReduceOp.MAX)
        blocks = []
        for _ in range(BLOCKS):
            dist.barrier()
            blocks.append(self.block(run, int(calls)))
        return statistics.median(blocks)

    def block(self, run: Callable[[], object], calls: int) -> float:
        """Seconds a call."""
        start = time.perf_counter()
        for _ in range(calls):
            run()
        self.wait()
        return (time.perf_counter() - start) / calls

    def say(self, what: str) -> None:
        """Let the caller's `progress` know."""
        if self.rank == 0:
            with (self.folder / SAID).open("a") as file:
                file.write(f"{what}\n")

    def memory_bytes(self) -> float:
        """A GPU's own, or a core's share of what this computer (or container) has."""
        if self.on_gpu:
            return float(torch.cuda.get_device_properties(self.device).total_memory)
        return memory_of_computer() / (os.cpu_count() or 1)


def memory_of_computer() -> float:
    """Bytes; a container's limit where that is less."""
    physical = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.exists() else "max"
    return min(physical, float(text)) if text.isdigit() else physical


def fit_line(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Latency and bytes per second: least squares of the relative error of latency + size / bandwidth, neither below 0."""
    times = numpy.array(seconds)
    columns = numpy.stack([1 / times, numpy.array(sizes) / times], axis=1)
    (latency, per_byte), *_ = numpy.linalg.lstsq(columns, numpy.ones(len(times)), rcond=None)
    if latency <= 0:
        latency, per_byte = 0.0, float(columns[:, 1].sum() / (columns[:, 1] ** 2).sum())
    return float(latency), math.inf if per_byte <= 0 else float(1 / per_byte)
