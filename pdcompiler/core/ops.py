"""The closed vocabulary of programs. The bodies raise: a backend gives the meaning, and `backends/reference.py` defines it.

    microbatch(value, start, stop, dim)   rows start to stop of a model input; each rank cuts its own, inputs are never sent
    weights(stage, rank)                  the parameters of a stage, as this rank holds them: a tuple of tensors
    buffers(stage, rank)                  its buffers, at the program's entry: a tuple
    stage{i}_forward, stage{i}_backward   (modules of the program) a stage's two functions, see ir.Function
    accumulate(total, value)              total + value, of tensors or of tuples of tensors
    accumulate_in_place(total, value)     the same; the total's memory is used, since nobody else reads it
    transfer(value, to)                   the value, on another rank; identity; only before split_ranks
    send(value, to, channel)              one half of a transfer
    recv(frm, channel, shape, dtype)      the other half
    start_recv(frm, channel, ...)         ask for the next value on a channel, without waiting
    finish_recv(pending)                  wait for it
    pack(values), unpack(packed, types)   several values as one message
    all_reduce(values, ranks)             the sums of several ranks' tuples of tensors, for each of them; in a rank's program
                                          all_reduce(own, ranks)
    start_all_reduce(own, ranks)          let a rank's part of the sums travel, without waiting
    finish_all_reduce(pending)            wait for the sums
    write_buffers(stage, rank, values)    the buffers' new values
    stash(value, kind, stage, minibatch)  put a value by for a later program (or for later in this one)
    restore(kind, stage, minibatch)       take it back, once. minibatch: relative to the one that comes in with the program
    divide(values, count)                 a tuple of tensors, each divided by a number
    update(weights, gradients, stage)     one optimizer step of a stage, on each of its replicas

A rank's program is these and nothing else. Adding a word means: its line here, its meaning in reference.py, its messages in
distributed.py, and its place in the proof (verify.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor
from torch.fx.node import has_side_effect

F = TypeVar("F")
VOCABULARY: dict[str, Any] = {}


def _word(function: F) -> F:
    VOCABULARY[function.__name__] = function  # type: ignore[attr-defined]
    return function


def _effect(function: F) -> F:
    """A word that dead-code elimination must keep: dropping one half of a pair would make the other wait for ever."""
    return _word(has_side_effect(function))  # type: ignore[arg-type, return-value]


def _meaningless(name: str) -> NoReturn:
    raise RuntimeError(f"{name} has no meaning by itself: run the program through a backend (pipe.step, backends/reference.py)")


@_word
def microbatch(value: Tensor, *, start: int, stop: int, dim: int) -> Tensor:
    """Rows `start` to `stop` of a model input, along `dim`, contiguous."""
    _meaningless("microbatch")


@_word
def weights(*, stage: int, rank: int) -> tuple[Tensor, ...]:
    """The parameters of a stage on this rank, in the order of `Stage.parameters`."""
    _meaningless("weights")


@_word
def buffers(*, stage: int, rank: int) -> tuple[Tensor, ...]:
    """The buffers of a stage on this rank, in the order of `Stage.buffers`."""
    _meaningless("buffers")


@_word
def accumulate(total: Any, value: Any) -> Any:
    """The sum, as new memory."""
    _meaningless("accumulate")


@_word
def accumulate_in_place(total: Any, value: Any) -> Any:
    """The sum, in the memory of `total`, which a program reads nowhere else."""
    _meaningless("accumulate_in_place")


@_word
def transfer(value: Tensor, *, to: int) -> Tensor:
    """The same value on rank `to`."""
    _meaningless("transfer")


@_effect
def send(value: Tensor, *, to: int, channel: str) -> None:
    """Send a value to rank `to`; the k-th send on a channel meets the k-th receive on it."""
    _meaningless("send")


@_effect
def recv(*, frm: int, channel: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Take the next value that rank `frm` sent on `channel`; wait for it if need be."""
    _meaningless("recv")


@_effect
def start_recv(*, frm: int, channel: str, shape: Sequence[int], dtype: torch.dtype) -> Any:
    """Ask for the next value on `channel`, without waiting for it."""
    _meaningless("start_recv")


@_effect
def finish_recv(pending: Any) -> Tensor:
    """Wait for a value that was asked for."""
    _meaningless("finish_recv")


@_word
def pack(values: Sequence[Tensor]) -> Tensor:
    """Several values as one tensor of bytes."""
    _meaningless("pack")


@_word
def unpack(packed: Tensor, *, types: Sequence[tuple[Sequence[int], torch.dtype]]) -> tuple[Tensor, ...]:
    """The inverse of pack."""
    _meaningless("unpack")


@_effect
def all_reduce(values: Any, *, ranks: Sequence[int]) -> Any:
    """In the global program: a tuple of tensors of each rank, to that of the sums for each. In a rank's program: its own."""
    _meaningless("all_reduce")


@_effect
def stash(value: Any, *, kind: str, stage: int, minibatch: int, rank: int) -> None:
    """Put a value by under (kind, stage, minibatch), on a rank; a receive that has not finished, too."""
    _meaningless("stash")


@_effect
def restore(*, kind: str, stage: int, minibatch: int, rank: int) -> Any:
    """Take back what was put by under (kind, stage, minibatch), and forget it."""
    _meaningless("restore")


@_word
def divide(values: tuple[Tensor, ...], *, count: int) -> tuple[Tensor, ...]:
    """Each of the values divided by `count`, as new memory."""
    _meaningless("divide")


@_effect
def update(weights: tuple[Tensor, ...], gradients: tuple[Tensor, ...], *, stage: int, rank: int, keep: bool) -> None:
    """One step of the stage's optimizer: the newest weights, which `weights` gives in later programs. keep: whether the old
    values are still used, and so must not be written over."""
    _meaningless("update")


@_effect
def start_all_reduce(values: Any, *, ranks: Sequence[int]) -> Any:
    """Give a rank's own values to a reduction, without waiting for the others."""
    _meaningless("start_all_reduce")


@_effect
def finish_all_reduce(pending: Any) -> Any:
    """Wait for the sums."""
    _meaningless("finish_all_reduce")


@_effect
def write_buffers(values: tuple[Tensor, ...], *, stage: int, rank: int) -> None:
    """Give the buffers of a stage their new values."""
    _meaningless("write_buffers")
