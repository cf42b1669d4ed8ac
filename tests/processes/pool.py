"""A pool of processes, started once, that runs one case after another in a gloo group of as many ranks as the case asks for.

    pool = Pool(4)
    pool.of(2).run(check_step, "gpt2", "1f1b")      # the function is called on each rank; returns what each rank gave
    pool.close()

A case is a function of an importable module, with picklable arguments and results. Where a rank raises or does not answer in
time, the test fails with what each rank said (a silent one: where it stands), and the processes of this pool, and no others,
are ended; the next case gets new ones. A group is made anew only where the number of ranks changes: processes take seconds to
start, and what they have traced serves cases of all sizes. Not here: what the cases check.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

HOST = "127.0.0.1"
START = 120.0
"""Seconds for all processes to start."""
PATIENCE = 5.0
"""Seconds that the others are given once one rank has raised, and a silent rank to write down where it stands."""


class CaseFailed(AssertionError):
    """A rank raised or did not answer; the message has a part for each rank."""


@dataclass(frozen=True)
class Answer:
    """What a rank said: what the case returned, or the traceback of what it raised."""

    value: Any = None
    raised: str | None = None


@dataclass
class Rank:
    """A process of the pool, seen from the test."""

    process: ForkServerProcess
    connection: Connection
    stacks: Path


class Pool:
    """`size` processes; see the module's docstring."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.ranks: list[Rank] = []
        self.store: dist.TCPStore | None = None
        self.group, self.groups = 0, 0

    def of(self, ranks: int) -> Group:
        """The first `ranks` of the processes."""
        return Group(self, ranks)

    def run(self, case: Callable[..., Any], args: Any, kwargs: Any, ranks: int, timeout: float) -> list[Any]:
        """Call the case on the first `ranks` processes, which are a group; what each returned, in their order."""
        if not self.ranks:
            self._start()
        if ranks != self.group:
            self.group, self.groups = ranks, self.groups + 1
            self._call(join, (self.groups, ranks), {}, self.size, START)
        return self._call(case, args, kwargs, ranks, timeout)

    def _call(self, case: Callable[..., Any], args: Any, kwargs: Any, ranks: int, timeout: float) -> list[Any]:
        for rank in self.ranks[:ranks]:
            rank.connection.send((case, args, kwargs))
        answers = self._answers(ranks, time.monotonic() + timeout)
        if len(answers) < ranks or any(answer.raised for answer in answers.values()):
            self._fail(case, answers, ranks, timeout)
        return [answers[rank].value for rank in range(ranks)]

    def close(self) -> None:
        """End the processes of this pool."""
        for rank in self.ranks:
            rank.connection.close()
        for rank in self.ranks:
            rank.process.join(timeout=PATIENCE)
            if rank.process.is_alive():
                rank.process.kill()
                rank.process.join()
            rank.stacks.unlink(missing_ok=True)
        self.ranks, self.store, self.group = [], None, 0

    def _start(self) -> None:
        self.store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("forkserver")  # what it has imported is there in every process
        context.set_forkserver_preload(["tests.processes.checks"])
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            stacks = Path(tempfile.mkstemp(prefix=f"rank{rank}_")[1])
            environment = {"RANK": str(rank), "MASTER_ADDR": HOST, "MASTER_PORT": str(self.store.port)}
            process = context.Process(target=serve, args=(theirs, environment, stacks), daemon=True)
            process.start()
            theirs.close()
            self.ranks.append(Rank(process, ours, stacks))

    def _answers(self, ranks: int, deadline: float) -> dict[int, Answer]:
        """What each rank answers before the deadline; once one has raised, the others have little time left."""
        answers: dict[int, Answer] = {}
        waiting = {rank.connection: number for number, rank in enumerate(self.ranks[:ranks])}
        while waiting and (ready := wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))):
            for connection in ready:
                number = waiting.pop(connection)  # type: ignore[call-overload]
                try:
                    answers[number] = connection.recv()  # type: ignore[union-attr]
                except (EOFError, ConnectionError):
                    self.ranks[number].process.join(timeout=PATIENCE)
                    answers[number] = Answer(raised=f"the process ended with code {self.ranks[number].process.exitcode}")
                if answers[number].raised:
                    deadline = min(deadline, time.monotonic() + PATIENCE)
        return answers

    def _fail(self, case: Callable[..., Any], answers: dict[int, Answer], ranks: int, timeout: float) -> NoReturn:
        said = []
        for number, rank in enumerate(self.ranks[:ranks]):
            answer = answers.get(number)
            if answer is None:
                said.append(f"rank {number} did not answer, and stands at\n{self._stack(rank)}")
            else:
                said.append(f"rank {number} " + (f"raised\n{answer.raised}" if answer.raised else f"gave {answer.value!r}"))
        self.close_at_once()
        raise CaseFailed(f"{case.__name__}, {timeout:.0f} s at most:\n" + "\n".join(said))

    def _stack(self, rank: Rank) -> str:
        """The Python stack of a process that is at work."""
        if rank.process.pid is None or not rank.process.is_alive():
            return f"the process ended with code {rank.process.exitcode}"
        os.kill(rank.process.pid, signal.SIGUSR1)
        deadline = time.monotonic() + PATIENCE
        while not rank.stacks.stat().st_size and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.1)  # until it is written to its end
        return rank.stacks.read_text()

    def close_at_once(self) -> None:
        """End the processes without waiting for their cases."""
        for rank in self.ranks:
            rank.process.kill()
        self.close()


@dataclass(frozen=True)
class Group:
    """Some processes of a pool."""

    pool: Pool
    size: int

    def run(self, case: Callable[..., Any], *args: Any, timeout: float = 120.0, **kwargs: Any) -> list[Any]:
        """Call the case on every rank; what each returned, in the order of the ranks."""
        return self.pool.run(case, args, kwargs, self.size, timeout)


def serve(connection: Connection, environment: dict[str, str], stacks: Path) -> None:
    """What a process of the pool does: run cases until the test closes the connection."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    with stacks.open("w") as file, contextlib.suppress(EOFError, ConnectionError):
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=False)
        while True:
            case, args, kwargs = connection.recv()
            try:
                answer = Answer(case(*args, **kwargs))
            except BaseException:
                answer = Answer(raised=traceback.format_exc())
            connection.send(answer)
    os._exit(0)  # Python's own end takes a process with torch and transformers seconds


def join(number: int, ranks: int) -> None:
    """Leave the group that there was; the first `ranks` processes make a new one."""
    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ["WORLD_SIZE"] = str(ranks)
    rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
    if rank < ranks:
        store = dist.PrefixStore(str(number), dist.TCPStore(HOST, port, is_master=False))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=datetime.timedelta(seconds=60))
