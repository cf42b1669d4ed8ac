"""Write one tick of a schedule without flushes as one program over all ranks.

    stages 0, 1, depths 1 and 0; steady state       stage0_weights = weights(stage=0)                                   # rank 0
                                                    h_0, saved_0 = stage0_forward(stage0_weights, x_0)                  # rank 0
                                                    stash(stage0_weights, "weights", stage=0, minibatch=0)              # rank 0
                                                    stash(saved_0, "saved", stage=0, minibatch=0)                       # rank 0
                                                    weights_1 = restore("weights", stage=0, minibatch=-1)               # rank 0
                                                    saved_1, d_h_1 = restore("saved", ...), restore("d_h", ...)         # rank 0
                                                    gradients_1, = stage0_backward(weights_1, saved_1, d_h_1)           # rank 0
                                                    update(stage0_weights, gradients_1, stage=0, keep=True)             # rank 0
                                                    ...                                                  the same of stage 1
                                                    return {0: {losses}, 1: {losses}}

A name's number says how many ticks ago its minibatch came in. What a backward reads of its forward, and what a later stage's
backward gives it, is put by and taken back, also where both are in one tick (`forward_stashes` removes that). An update keeps the
old weights only if a backward that is still to come really reads them, or a forward. Not here: which weights those are
(`core/tick_text.py`), messages.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from torch import fx

from pdcompiler.core import ops
from pdcompiler.core.ir import Microbatch, Program, Stage, Staged, ValueType
from pdcompiler.core.names import identifier
from pdcompiler.core.program_writer import BUCKET, Note, ProgramWriter, as_they_are_made, buckets, note_of
from pdcompiler.core.tick_text import TickBackward, TickForward, TickText, TickUpdate


def lower_tick(
    text: TickText, minibatches: Mapping[int, Microbatch], staged: Staged, dims: Mapping[str, int | None],
    replicas: Mapping[int, tuple[int, ...]], bucket: float = BUCKET,
) -> Program:  # fmt: skip
    """minibatches: those of the text, by their number in it.   staged: the stages, of any minibatch.   dims: of the batch's
    tensors, as in ir.Step.   replicas: the ranks of each stage.   bucket: the most bytes of one reduction."""
    lowering = _Lowering(text, minibatches, staged, dims, replicas, bucket)
    for item in text.items:
        if isinstance(item, TickForward):
            lowering.forward(item)
        elif isinstance(item, TickBackward):
            lowering.backward(item)
        else:
            lowering.update(item)
    return lowering.finish()


class _Lowering:
    """The program while it grows."""

    def __init__(
        self, text: TickText, minibatches: Mapping[int, Microbatch], staged: Staged, dims: Mapping[str, int | None],
        replicas: Mapping[int, tuple[int, ...]], bucket: float,
    ) -> None:  # fmt: skip
        self.text, self.minibatches, self.staged, self.dims, self.replicas = text, minibatches, staged, dims, replicas
        self.bucket = bucket
        self.updating = {item.stage for item in text.items if isinstance(item, TickUpdate)}
        self.writer = ProgramWriter(dims)
        self.values: dict[str, fx.Node] = {}
        self.totals: dict[tuple[int, int], fx.Node] = {}
        self.ranks = range(1 + max(rank for ranks in replicas.values() for rank in ranks))

    def part(self, minibatch: int, stage: int) -> Stage:
        return self.minibatches[minibatch].staged.stages[stage]

    def forward(self, item: TickForward) -> None:
        """Of the minibatch that comes in, on one stage; what its backward will read is put by."""
        part, rank = self.part(0, item.stage), self._rank(item.stage, item.turn)
        note = note_of(rank, item.stage, 0, "F")
        taken = {name: self._for_forward(name, part, item, note) for name in part.forward.takes}
        call = self.writer.stage_call(part.forward, list(taken.values()), note)
        given: dict[str, fx.Node] = {}
        for place, name in enumerate(part.forward.gives):
            given[name] = self.writer.result(call, place, name, part, self.minibatches[0].rows, note)
        self.values |= {name: node for name, node in given.items() if name not in ("saved", "buffers")}
        for name in part.backward.takes if part.backward else ():
            if name == "saved":
                self._stash(given["saved"], name, item.stage, 0, rank)
            elif _is_of_forward(name, part):
                value = taken[name] if name in taken else self._for_forward(name, part, item, note)
                self._stash(value, name, item.stage, 0, rank)
        if item.next is not None and "weights" in taken:
            self._stash(taken["weights"], "kept weights", item.stage, item.next, rank)
        if "buffers" in given:
            self.writer.call(ops.write_buffers, (given["buffers"],), {"stage": item.stage, "rank": rank}, "write_buffers", note)
        loss = self.minibatches[0].staged.loss
        if loss in given:
            for other in self.ranks:
                self._stash(given[loss], "loss", item.stage, 0, other)

    def _for_forward(self, name: str, part: Stage, item: TickForward, note: Note) -> Any:
        if name == "weights" and item.kept:
            return self._restore("kept weights", 0, note)
        if name in ("weights", "buffers"):
            word = ops.weights if name == "weights" else ops.buffers
            return self.writer.once(word, f"stage{item.stage}_{name}", note)
        given = self.writer.of_batch(name, part, self.minibatches[0], self.dims, note)
        return self.values[name] if given is None else given

    def backward(self, item: TickBackward) -> None:
        """Of a minibatch that came in earlier; what earlier stages read of it is put by for their backwards."""
        part, rank = self.part(item.minibatch, item.stage), self._rank(item.stage, item.turn)
        if part.backward is None:
            return
        note, rows = note_of(rank, item.stage, -item.minibatch, "B"), self.minibatches[item.minibatch].rows
        taken = [rows if name == "rows" else self._for_backward(name, item, note) for name in part.backward.takes]
        call = self.writer.stage_call(part.backward, taken, note)
        given = {name: self.writer.result(call, k, name, part, rows, note) for k, name in enumerate(part.backward.gives)}
        for name, node in given.items():
            if name == "gradients":
                self._add(node, item, note)
                continue
            for stage in range(item.stage):
                reader = self.part(item.minibatch, stage).backward
                if reader is not None and name in reader.takes:
                    self._stash(node, name, stage, item.minibatch, self._rank(stage, item.turn))

    def _for_backward(self, name: str, item: TickBackward, note: Note) -> fx.Node:
        makers = [stage for stage in self.replicas if stage > item.stage and self._gives(item.minibatch, stage, name)]
        return self._restore(name, item.minibatch, note, self._rank(makers[0], item.turn) if makers else None)

    def _gives(self, minibatch: int, stage: int, name: str) -> bool:
        backward = self.part(minibatch, stage).backward
        return backward is not None and name in backward.gives and name != "gradients"

    def _add(self, gradients: fx.Node, item: TickBackward, note: Note) -> None:
        """To the sum of the round's on this replica, which waits for the update."""
        if item.before is not None:
            so_far = self._restore("gradients", item.before, note)
            gradients = self.writer.call(ops.accumulate, (so_far, gradients), {}, f"stage{item.stage}_gradients", note)
        if item.stage in self.updating:
            self.totals[item.stage, item.minibatch] = gradients
        else:
            self._stash(gradients, "gradients", item.stage, item.minibatch, note["rank"])

    def update(self, item: TickUpdate) -> None:
        """On every replica of a stage, with the mean of the round's gradients; of a batch's, which its loss weighs, the sum."""
        part, ranks = self.staged.stages[item.stage], self.replicas[item.stage]
        if not part.gradients:
            return
        last = {ranks[replica]: minibatch for replica, minibatch in zip(item.replicas, item.minibatches, strict=True)}
        sums = self._summed(part, {rank: self._total(item.stage, last[rank], rank) for rank in ranks if rank in last})
        forward_reads, backward_reads = "weights" in part.forward.takes, part.backward and "weights" in part.backward.takes
        keep = bool(item.in_flight and backward_reads) or (forward_reads and any(following for following in item.next))
        for rank, following in zip(ranks, item.next, strict=True):
            note = note_of(rank, item.stage, None, "B")
            weights = self.writer.once(ops.weights, f"stage{item.stage}_weights", note)
            if following is not None and forward_reads:
                self._stash(weights, "kept weights", item.stage, following, rank)
            mean = sums.get(rank, next(iter(sums.values())))
            if item.mean and len(item.minibatches) > 1:
                mean = self.writer.call(ops.divide, (mean,), {"count": len(item.minibatches)}, f"stage{item.stage}_mean", note)
            where = {"stage": item.stage, "rank": rank, "keep": keep}
            self.writer.call(ops.update, (weights, mean), where, "update", note)

    def _total(self, stage: int, minibatch: int, rank: int) -> fx.Node:
        """A replica's gradients of the round."""
        if (stage, minibatch) in self.totals:
            return self.totals[stage, minibatch]
        return self._restore("gradients", minibatch, note_of(rank, stage, None, "B"))

    def _summed(self, part: Stage, totals: Mapping[int, fx.Node]) -> dict[int, Any]:
        """Over the replicas that have any, on each of them: a tuple, of which other replicas can be given each tensor."""
        if len(totals) == len(self.replicas[part.index]) == 1:
            return dict(totals)
        types = dict(zip(part.gradients, part.gradient_types, strict=True))
        sums: dict[int, dict[str, fx.Node]] = {
            rank: {
                name: self._part(total, k, name, type, note_of(rank, part.index, None, "B"))
                for k, (name, type) in enumerate(types.items())
            }
            for rank, total in totals.items()
        }
        for names in buckets(as_they_are_made(part), self.bucket) if len(totals) > 1 else ():
            self._reduce(part.index, names, types, sums)
        return {rank: tuple(own[name] for name in part.gradients) for rank, own in sums.items()}

    def _reduce(
        self, stage: int, names: list[str], types: Mapping[str, ValueType], sums: dict[int, dict[str, fx.Node]]
    ) -> None:
        """Replace each rank's own gradients of a bucket by their sums."""
        ranks = tuple(sums)
        given = tuple(tuple(sums[rank][name] for name in names) for rank in ranks)
        together = self.writer.call(ops.all_reduce, (given,), {"ranks": ranks}, "sums", note_of(ranks[0], stage, None, "B"))
        for place, rank in enumerate(ranks):
            note = note_of(rank, stage, None, "B")
            own = self.writer.call(operator.getitem, (together, place), {}, "sums", note)
            for k, name in enumerate(names):
                sums[rank][name] = self._part(own, k, name, types[name], note)

    def _part(self, gradients: fx.Node, place: int, name: str, type: ValueType, note: Note) -> fx.Node:
        """The gradient of one parameter."""
        readable = f"d_{name}".replace(".", "_")
        return self.writer.call(operator.getitem, (gradients, place), {}, readable, note, type)

    def finish(self) -> Program:
        """At the end of a drain all replicas get the first one's buffers; the results are each rank's loss."""
        if self.text.last:
            for stage in self.staged.stages:
                self._share_buffers(stage)
        return self.writer.program(self.staged.stages, {rank: self._results(rank) for rank in self.ranks}, None)

    def _results(self, rank: int) -> dict[str, Any]:
        """The losses that are told, on each rank."""
        losses = []
        for item in self.text.losses:
            staged = self.minibatches[item.minibatch].staged
            stage = next(part.index for part in staged.stages if staged.loss in part.forward.gives)
            maker = self._rank(stage, item.turn)
            note = note_of(rank, stage, -item.minibatch, "F")
            losses.append(self._restore("loss", item.minibatch, note, maker if maker != rank else None))
        return {"losses": losses}

    def _share_buffers(self, stage: Stage) -> None:
        first, *others = self.replicas[stage.index]
        if not stage.written or not others:
            return
        for rank in others:
            note = note_of(rank, stage.index, None, "")
            values = self.writer.copied_buffers(stage, first, note)
            self.writer.call(ops.write_buffers, (values,), {"stage": stage.index, "rank": rank}, "write_buffers", note)

    def _rank(self, stage: int, turn: tuple[int, ...]) -> int:
        return self.replicas[stage][turn[stage]]

    def _stash(self, value: Any, kind: str, stage: int, minibatch: int, rank: int) -> None:
        where = {"kind": kind, "stage": stage, "minibatch": minibatch, "rank": rank}
        self.writer.call(ops.stash, (value,), where, "stash", note_of(rank, stage, -minibatch, "B"))

    def _restore(self, kind: str, minibatch: int, note: Note, maker: int | None = None) -> fx.Node:
        """maker: the rank whose message it is."""
        where = {"kind": kind, "stage": note["stage"], "minibatch": minibatch, "rank": note["rank"]}
        node = self.writer.call(ops.restore, (), where, f"{identifier(kind)}_{-minibatch}", note)
        node.meta["maker"] = maker
        return node


def _is_of_forward(name: str, part: Stage) -> bool:
    """Whether a backward takes it from its own stage's forward."""
    return name in ("weights", "buffers", "loss_weight", "seed") or name in part.batch
