"""Run a rank's program on this process, with real messages.

gloo (CPU): the default group; each ordered pair of ranks is a channel, first in, first out. NCCL (CUDA): one communicator per
channel, operations issued in the program's own order, which is the same global order on all ranks; torch runs them on streams
of their own, and `wait` makes the compute stream wait, not the host. Each send keeps its value until it is done; at most
`window` sends of a channel are open.

A failure on one rank is written into the launcher's store and the group is left, so that every rank that waits for it is woken
and raises the same root cause. A rank that dies without a word is named by the first that misses it. Leaving closes connections
only once nothing holds an open message, so the failed step's frames are emptied first. A group made here is left when the
process ends. Not here: what the words mean (`reference.py`), nor the order of anything.

Checked on gloo by the tests; the NCCL paths have been read, and their order of issue is checked by a recording backend, but no
GPU machine has run them yet.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import linecache
import os
import re
import time
import traceback
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, fx

from pdcompiler.core import ops
from pdcompiler.core.errors import WorkerError
from pdcompiler.core.ir import RankProgram, module_of
from pdcompiler.core.storage import is_alone

TAG = 7253
"""Keeps our messages apart from the user's own on the default group."""
CAUSE, READ = "pdcompiler/cause", "pdcompiler/cause/read"


def launched() -> tuple[int, int] | None:
    """(rank, world size) under torchrun, else None."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return None


class Lost(Exception):
    """A peer did not send, take or answer."""

    def __init__(self, peers: Sequence[int], error: str) -> None:
        super().__init__(error)
        self.peers = tuple(peers)


class Distributed:
    """This process's end of all channels. Made once per pipeline; joins or makes the default process group."""

    def __init__(
        self, device: torch.device, channels: Sequence[str], reductions: Sequence[tuple[int, ...]], timeout: float
    ) -> None:
        self.device = device
        self.timeout = datetime.timedelta(seconds=timeout)
        self.own_group = not dist.is_initialized()
        if self.own_group:
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=self.timeout)
            atexit.register(leave)
        self.rank = dist.get_rank()
        self.store: Any = dist.distributed_c10d._get_default_store()
        self.is_nccl = dist.get_backend() == "nccl"
        self.tag = 0 if self.is_nccl else TAG
        self.patience = () if self.is_nccl else (self.timeout,)  # NCCL's `wait` would block the host
        self.sending: dict[str, deque[tuple[Any, int, Tensor]]] = defaultdict(deque)
        self.window: Mapping[str, int] = {}
        self.channels: dict[str, Any] = {}
        self.groups: dict[tuple[int, ...], Any] = {}
        self.waited: dict[int, float] = defaultdict(float)
        """Seconds, for messages of each rank."""
        self.put_by: dict[Any, Any] = {}
        """What programs put by for later ones, open receives among it."""
        self.buckets: dict[int, Tensor] = {}
        self.reductions = 0
        """Of the program that runs, so far; `buckets` by this number."""
        self.join(channels, reductions)

    def join(self, channels: Sequence[str], reductions: Sequence[tuple[int, ...]]) -> None:
        """Make the groups that are not there yet; every rank calls this with the same arguments."""
        for channel in channels:
            if channel not in self.channels:
                pair = [int(rank) for rank in channel.split("->")]
                self.channels[channel] = dist.new_group(sorted(pair), timeout=self.timeout) if self.is_nccl else None
        for ranks in reductions:
            if ranks not in self.groups:
                self.groups[ranks] = dist.new_group(list(ranks), timeout=self.timeout)

    def meaning(self, pure: Mapping[Any, Callable[..., Any]], memory: Any) -> dict[Any, Callable[..., Any]]:
        """What each word of the vocabulary does here; `pure` are those without messages."""
        return {
            **pure,
            **memory.words(),
            ops.send: self.send,
            ops.recv: self.recv,
            ops.start_recv: self.start_recv,
            ops.finish_recv: self.finish_recv,
            ops.all_reduce: self.all_reduce,
            ops.start_all_reduce: self.start_all_reduce,
            ops.finish_all_reduce: self.finish_all_reduce,
        }

    def send(self, value: Tensor, *, to: int, channel: str) -> None:
        """Start sending; waits only where `window` older sends of the channel are still open."""
        value = value.contiguous()
        open_ = self.sending[channel]
        open_.append((self._reach((to,), dist.isend, value, to, self.channels[channel], self.tag), to, value))
        self._finish_sends(channel, self.window.get(channel, 1))

    def finish_sends(self) -> None:
        """Wait until everything that was sent has been taken."""
        for channel in self.sending:
            self._finish_sends(channel, 0)

    def _finish_sends(self, channel: str, keep: int) -> None:
        """Wait for the oldest sends of a channel, until at most `keep` are open."""
        while len(self.sending[channel]) > keep:
            work, to, _ = self.sending[channel][0]
            self._reach((to,), work.wait, *self.patience)
            self.sending[channel].popleft()

    def start_recv(self, *, frm: int, channel: str, shape: Sequence[int], dtype: torch.dtype) -> tuple[Any, int, Tensor]:
        """Ask for the next value on a channel."""
        value = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        return self._reach((frm,), dist.irecv, value, frm, self.channels[channel], self.tag), frm, value

    def finish_recv(self, pending: tuple[Any, int, Tensor]) -> Tensor:
        """Wait for it (on CUDA: make the current stream wait)."""
        work, frm, value = pending
        begin = time.perf_counter()
        self._reach((frm,), work.wait, *self.patience)
        self.waited[frm] += time.perf_counter() - begin
        return value

    def recv(self, **what: Any) -> Tensor:
        """Both at once."""
        return self.finish_recv(self.start_recv(**what))

    def start_all_reduce(self, values: tuple[Tensor, ...], *, ranks: tuple[int, ...]) -> tuple[Any, Sequence[int], Tensor, Any]:
        """Ask for the sums over ranks, in one message and in memory of their own (a gradient may share its with others)."""
        parts = [value.reshape(-1) for value in values]
        total = self._bucket(sum(part.numel() for part in parts), parts[0])
        torch.cat(parts, out=total)
        others = [rank for rank in ranks if rank != self.rank]
        work = self._reach(others, dist.all_reduce, total, dist.ReduceOp.SUM, self.groups[tuple(ranks)], True)
        return work, others, total, [value.shape for value in values]

    def _bucket(self, size: int, like: Tensor) -> Tensor:
        """Memory for sums: that of the program's same reduction before, if nobody holds it any more. New memory costs time."""
        self.reductions += 1
        bucket = self.buckets.get(self.reductions)
        if bucket is None or bucket.numel() != size or bucket.dtype != like.dtype or not is_alone(bucket):
            bucket = self.buckets[self.reductions] = torch.empty(size, dtype=like.dtype, device=like.device)
        return bucket.detach()

    def finish_all_reduce(self, pending: tuple[Any, Sequence[int], Tensor, Any]) -> tuple[Tensor, ...]:
        """Wait for them (on CUDA: make the current stream wait)."""
        work, others, total, shapes = pending
        self._reach(others, work.wait, *self.patience)
        parts = torch.split(total, [shape.numel() for shape in shapes])
        return tuple(part.view(shape) for part, shape in zip(parts, shapes, strict=True))

    def all_reduce(self, values: tuple[Tensor, ...], *, ranks: tuple[int, ...]) -> tuple[Tensor, ...]:
        """Both at once."""
        return self.finish_all_reduce(self.start_all_reduce(values, ranks=ranks))

    def of_all(self, value: Tensor, operation: Any) -> Tensor:
        """One number of all ranks together, summed in float64 (or its largest)."""
        total = value.detach().to(torch.float64, copy=True)
        self._reach([rank for rank in range(dist.get_world_size()) if rank != self.rank], dist.all_reduce, total, operation)
        return total.to(value.dtype)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, on each of them."""
        values = [None] * dist.get_world_size()
        self._reach([rank for rank in range(len(values)) if rank != self.rank], dist.all_gather_object, values, value)
        return values

    def _reach(self, peers: Sequence[int], call: Callable[..., Any], *args: Any) -> Any:
        """Call what needs peers."""
        try:
            return call(*args)
        except RuntimeError as error:
            text = str(error)
            if isinstance(error, dist.DistError) or re.search("gloo|connection|timed out", text, re.IGNORECASE):
                raise Lost(peers, re.sub(r"^\[\S*\] ", "", text).split(". ")[0]) from error
            raise

    def run(
        self, program: RankProgram, module: fx.GraphModule, inputs: Mapping[str, Any], window: Mapping[str, int],
        finish: bool = True,
    ) -> Any:  # fmt: skip
        """Run the program; an error anywhere is raised on every rank as WorkerError with its root cause. finish: wait for what it
        sends; else that goes on while later programs run."""
        self.window, self.reductions = window, 0
        names = [str(node.target) for node in program.graph.nodes if node.op == "placeholder"]
        try:
            with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
                results = module(*(inputs[name] for name in names))
            if finish:
                self.finish_sends()
            return results
        except Exception as error:
            self.fail(error, module)

    def fail(self, error: Exception, module: fx.GraphModule) -> NoReturn:
        """Say the cause to the others, leave the group so that they wake, and raise the root cause."""
        cause = self._describe(error, module)
        try:
            cause = str(self.store.compare_set(CAUSE, "", cause).decode())  # another rank's, where that was first
        except RuntimeError:
            cause += "; the store is gone too, so rank 0 or the launcher, which held it, may have been first"
            self.store = None
        world_size = dist.get_world_size()
        _forget(error)
        self.close()
        self._wait_for_readers(world_size)
        rank = re.match(r"rank (\d+)", cause)
        raise WorkerError(cause, rank=int(rank[1]) if rank else None) from error

    def _describe(self, error: Exception, module: fx.GraphModule) -> str:
        if not isinstance(error, Lost):
            return f"rank {self.rank}: {locate(error, module)}{type(error).__name__}: {error}"
        peers = ", ".join(map(str, error.peers))
        who = f"rank {peers}" if len(error.peers) == 1 else f"one of the ranks {peers}"
        if "timed out" in str(error).lower():
            return f"{who} did not answer rank {self.rank} within {self.timeout.total_seconds():g} s"
        return f"{who} is gone: rank {self.rank} lost the connection to it ({error})"

    def _wait_for_readers(self, world_size: int) -> None:
        """The store may live in this process: stay until the others have read the cause, a few seconds at most."""
        with contextlib.suppress(RuntimeError):
            deadline = time.monotonic() + 5
            read = self.store.add(READ, 1) if self.store else world_size
            while read < world_size and time.monotonic() < deadline:
                time.sleep(0.05)
                read = self.store.add(READ, 0)

    def close(self) -> None:
        """Leave the process group. Open messages are let go first: they would keep the connections, and the peers asleep."""
        self.sending.clear()
        self.put_by.clear()
        self.channels.clear()
        self.groups.clear()
        leave()


def leave() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _forget(error: BaseException | None) -> None:
    """Empty the frames that an error passed through."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


CALL = re.compile(r"(.*) = self\.(stage(\d+)_(forward|backward)\w*)\(")


def locate(error: BaseException, module: fx.GraphModule) -> str:
    """Stage, microbatch and module path of the operation that failed, from the generated code's own lines."""
    words: list[str] = []
    graph = module.graph
    for frame, number in traceback.walk_tb(error.__traceback__):
        nodes = {node.name: node for node in graph.nodes}
        line = linecache.getline(frame.f_code.co_filename, number).strip()
        if call := CALL.match(line):
            given = [nodes[word] for word in re.findall(r"\w+", call[1]) if word in nodes]
            words += [f"stage {call[3]} {call[4]}", *(f"microbatch {node.meta['microbatch']}" for node in given[:1])]
            graph = getattr(module, call[2]).graph
        elif (name := line.split(" = ")[0]) in nodes and words and (path := str(module_of(nodes[name]))):
            words.append(f"module {path}")
    return ", ".join(words) + ": " if words else ""
