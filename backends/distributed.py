"""Run a rank's program on this process, with real messages.

gloo (CPU): the default group; each ordered pair of ranks is a channel, first in, first out. NCCL (CUDA): one communicator per
channel, operations issued in the program's own order, which is the same global order on all ranks; torch runs them on streams
of their own, and `wait` makes the compute stream wait, not the host. Each send keeps its value until it is done; at most
`window` sends of a channel are open.

A failure on one rank is written into the launcher's store and the group is left, so that every rank that waits for it is woken
and raises the same root cause. Not here: what the words mean (`reference.py`), nor the order of anything.

Checked on gloo by the tests; the NCCL paths have been read, and their order of issue is checked by a recording backend, but no
GPU machine has run them yet.
"""

from __future__ import annotations

import contextlib
import datetime
import linecache
import os
import re
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, fx

from pdcompiler.core import ops
from pdcompiler.core.errors import CompileError, WorkerError
from pdcompiler.core.ir import RankProgram

TAG = 7253
"""Keeps our messages apart from the user's own on the default group."""
CAUSE = "pdcompiler/cause"


def launched() -> tuple[int, int] | None:
    """(rank, world size) under torchrun, else None."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return None


class Pending:
    """A receive that was asked for. Kept in one place, so that a failing rank can let go of all of them."""

    __slots__ = ("value", "work")

    def __init__(self, work: Any, value: Tensor) -> None:
        self.work, self.value = work, value


class Distributed:
    """This process's end of all channels. Made once per pipeline; joins or makes the default process group."""

    def __init__(self, device: torch.device, channels: Sequence[str], reductions: Sequence[tuple[int, ...]], timeout: float) -> None:
        self.device = device
        self.timeout = datetime.timedelta(seconds=timeout)
        self.own_group = not dist.is_initialized()
        if self.own_group:
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=self.timeout)
        self.rank = dist.get_rank()
        self.store = dist.distributed_c10d._get_default_store()
        self.is_nccl = dist.get_backend() == "nccl"
        self.sending: dict[str, deque[tuple[Any, Tensor]]] = defaultdict(deque)
        self.receiving: set[Pending] = set()
        self.window: Mapping[str, int] = {}
        self.channels: dict[str, Any] = {}
        self.groups: dict[tuple[int, ...], Any] = {}
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
            ops.weights: lambda *, stage, rank: memory.weights(stage, rank),
            ops.buffers: lambda *, stage, rank: memory.buffers(stage, rank),
            ops.write_buffers: memory.write_buffers,
            ops.send: self.send,
            ops.recv: self.recv,
            ops.start_recv: self.start_recv,
            ops.finish_recv: self.finish_recv,
            ops.all_reduce: self.all_reduce,
        }

    def send(self, value: Tensor, *, to: int, channel: str) -> None:
        """Start sending; waits only where `window` older sends of the channel are still open."""
        value = value.contiguous()
        open_ = self.sending[channel]
        open_.append((dist.isend(value, to, group=self.channels[channel], tag=0 if self.is_nccl else TAG), value))
        while len(open_) > self.window.get(channel, 1):
            open_.popleft()[0].wait()

    def start_recv(self, *, frm: int, channel: str, shape: Sequence[int], dtype: torch.dtype) -> Pending:
        """Ask for the next value on a channel."""
        value = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        work = dist.irecv(value, frm, group=self.channels[channel], tag=0 if self.is_nccl else TAG)
        pending = Pending(work, value)
        self.receiving.add(pending)
        return pending

    def finish_recv(self, pending: Pending) -> Tensor:
        """Wait for it (on CUDA: make the current stream wait)."""
        pending.work.wait()
        self.receiving.discard(pending)
        return pending.value

    def recv(self, **what: Any) -> Tensor:
        """Both at once."""
        return self.finish_recv(self.start_recv(**what))

    def all_reduce(self, value: Tensor, *, ranks: tuple[int, ...]) -> Tensor:
        """The sum over ranks, as new memory: a gradient may share its own with others."""
        total = value.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self.groups[tuple(ranks)])
        return total

    def run(self, program: RankProgram, module: fx.GraphModule, inputs: Mapping[str, Any], window: Mapping[str, int]) -> Any:
        """Run the program; an error anywhere is raised on every rank as WorkerError with its root cause."""
        self.window = window
        names = [str(node.target) for node in program.graph.nodes if node.op == "placeholder"]
        try:
            with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
                results = module(*(inputs[name] for name in names))
            self._settle()
            return results
        except Exception as error:
            self.fail(error, module)

    def _settle(self) -> None:
        for open_ in self.sending.values():
            while open_:
                open_.popleft()[0].wait()

    def fail(self, error: Exception, module: fx.GraphModule) -> NoReturn:
        """Say the cause to the others, leave the group so that they wake, and raise the root cause."""
        if _is_communication(error):
            cause = self._cause_of_others() or f"rank {self.rank} lost a peer: {error}"
        else:
            cause = f"rank {self.rank}: {locate(error, module)}{type(error).__name__}: {error}"
            if self.store.add(f"{CAUSE}/first", 1) == 1:
                self.store.set(CAUSE, cause)
            else:
                cause = self._cause_of_others() or cause
        world_size = dist.get_world_size()
        self.close()
        self._wait_for_readers(world_size)
        raise WorkerError(cause, rank=int(cause.split()[1].rstrip(":"))) from error

    def _cause_of_others(self) -> str | None:
        """The root cause that another rank wrote; it may still be on its way."""
        deadline = time.monotonic() + 3
        while time.monotonic() < deadline:
            with contextlib.suppress(RuntimeError):
                if self.store.check([CAUSE]):
                    return str(self.store.get(CAUSE).decode())
            time.sleep(0.05)
        return None

    def _wait_for_readers(self, world_size: int) -> None:
        """The store may live in this process: stay until the others have read the cause, a few seconds at most."""
        with contextlib.suppress(RuntimeError):
            self.store.add(f"{CAUSE}/read", 1)
            deadline = time.monotonic() + 5
            while time.monotonic() < deadline and self.store.add(f"{CAUSE}/read", 0) < world_size:
                time.sleep(0.05)

    def close(self) -> None:
        """Leave the process group. Open messages are let go first: they would keep the connections, and the peers asleep."""
        for pending in self.receiving:
            pending.work = None
        self.receiving.clear()
        self.sending.clear()
        self.channels.clear()
        self.groups.clear()
        if dist.is_initialized():
            dist.destroy_process_group()


def _is_communication(error: Exception) -> bool:
    """Whether an error says that a peer is gone, not that this rank's own work failed."""
    text = str(error).lower()
    return isinstance(error, (dist.DistError, dist.DistBackendError)) or "gloo" in text or "connection" in text


def locate(error: BaseException, module: fx.GraphModule) -> str:
    """Stage, microbatch and module path of the operation that failed, from the generated code's own lines."""
    words: list[str] = []
    names: dict[str, fx.Node] = {node.name: node for node in module.graph.nodes}
    for child in module.children():
        names |= {node.name: node for node in child.graph.nodes}  # type: ignore[union-attr]
    trace = error.__traceback__
    while trace is not None:
        line = linecache.getline(trace.tb_frame.f_code.co_filename, trace.tb_lineno).strip()
        assigned = re.match(r"(\w+)", line)
        call = re.search(r"self\.(stage\d+_\w+)", line)
        if call is not None:
            words.append(call[1])
        elif assigned and assigned[1] in names and "module" in names[assigned[1]].meta:
            words.append(str(names[assigned[1]].meta["module"]))
        trace = trace.tb_next
    return ", ".join(words) + ": " if words else ""
