"""A pool of processes that share one gloo group: started once, then runs one case after another.

    pool = Pool(2)
    pool.run(check_step, "gpt2", "1f1b")      # the function is called on each rank; returns what each rank gave
    pool.close()

A case is a function of an importable module, with picklable arguments and results. Where a rank raises or does not answer in
time, the test fails with what each rank said (a silent one: where it stands), and the processes of this pool, and no others,
are ended; the next case gets new ones. Not here: what the cases check.
"""

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
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

HOST = "127.0.0.1"
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

    process: SpawnProcess
    connection: Connection
    stacks: Path


class Pool:
    """`world_size` processes with one gloo group; see the module's docstring."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.ranks: list[Rank] = []
        self.store: dist.TCPStore | None = None

    def run(self, case: Callable[..., Any], *args: Any, timeout: float = 120.0, **kwargs: Any) -> list[Any]:
        """Call the case on every rank; what each returned, in the order of the ranks."""
        if not self.ranks:
            self._start()
        for rank in self.ranks:
            rank.connection.send((case, args, kwargs))
        answers = self._answers(time.monotonic() + timeout)
        if len(answers) < self.world_size or any(answer.raised for answer in answers.values()):
            self._fail(case, answers, timeout)
        return [answers[rank].value for rank in range(self.world_size)]

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
        self.ranks, self.store = [], None

    def _start(self) -> None:
        self.store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        spawn = multiprocessing.get_context("spawn")
        for rank in range(self.world_size):
            ours, theirs = spawn.Pipe()
            stacks = Path(tempfile.mkstemp(prefix=f"rank{rank}_")[1])
            environment = {"RANK": rank, "WORLD_SIZE": self.world_size, "MASTER_ADDR": HOST, "MASTER_PORT": self.store.port}
            process = spawn.Process(target=serve, args=(theirs, environment, stacks), daemon=True)
            process.start()
            theirs.close()
            self.ranks.append(Rank(process, ours, stacks))
        started = self._answers(time.monotonic() + 120)
        if len(started) < self.world_size:
            self._fail(serve, started, 120)

    def _answers(self, deadline: float) -> dict[int, Answer]:
        """What each rank answers before the deadline; once one has raised, the others have little time left."""
        answers: dict[int, Answer] = {}
        waiting = {rank.connection: number for number, rank in enumerate(self.ranks)}
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

    def _fail(self, case: Callable[..., Any], answers: dict[int, Answer], timeout: float) -> NoReturn:
        said = []
        for number, rank in enumerate(self.ranks):
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


def serve(connection: Connection, environment: dict[str, Any], stacks: Path) -> None:
    """What a process of the pool does: join the group, then run cases until the test closes the connection."""
    os.environ.update({name: str(value) for name, value in environment.items()})
    torch.set_num_threads(1)
    with stacks.open("w") as file, contextlib.suppress(EOFError, ConnectionError):
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=False)
        dist.init_process_group("gloo", store=_store(environment), rank=environment["RANK"], world_size=environment["WORLD_SIZE"],
                                timeout=datetime.timedelta(seconds=60))  # fmt: skip
        connection.send(Answer())
        while True:
            case, args, kwargs = connection.recv()
            try:
                answer = Answer(case(*args, **kwargs))
            except BaseException:
                answer = Answer(raised=traceback.format_exc())
            connection.send(answer)


def _store(environment: dict[str, Any]) -> dist.TCPStore:
    return dist.TCPStore(HOST, environment["MASTER_PORT"], is_master=False)
