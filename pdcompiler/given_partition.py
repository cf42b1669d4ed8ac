"""What the user says of the stages: `partition=` and `replicas=` of `compile`, read and checked before anything is traced.

Whether a given Partition fits a trace is checked later (`passes/partition/check_partition.py`); whether it fits the devices'
memory, in `own_plan.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from pdcompiler.compiler import fingerprint
from pdcompiler.core.errors import CompileError
from pdcompiler.core.partition import Partition
from pdcompiler.passes.partition.check_partition import check_names


def differing_parameters(partition: Partition, model: nn.Module) -> str:
    """In words, what of a model's parameters a partition for another model lacks or has besides."""
    planned, own = partition.owners(), {name for name, _ in model.named_parameters()}
    lacking, besides = [name for name in own if name not in planned], [name for name in planned if name not in own]
    for names, where in ((lacking, "of this one are not in it"), (besides, "of it are not in this one")):
        if names:
            some = ", ".join(sorted(names)[:3]) + (", ..." if len(names) > 3 else "")
            return f"{len(names)} parameters {where} ({some})"
    return "its parameters have the same names and other shapes"


def read_partition(given: Any, model: nn.Module) -> Partition | tuple[str, ...] | None:
    """The user's `partition=`: a Partition, its JSON file, module paths at which stages begin, or None."""
    if given is None:
        return None
    partition: Partition | tuple[str, ...]
    if isinstance(given, (str, Path, Partition)):
        partition = given if isinstance(given, Partition) else Partition.load(given)
        if partition.model and partition.model != fingerprint(model):
            raise CompileError(
                f"the partition is for another model: {differing_parameters(partition, model)}",
                ways_out=("let pdcompiler choose the partition",),
            )
        check_names(partition, model)
    elif isinstance(given, Sequence):
        partition = tuple(given)
    else:
        raise CompileError(f"partition is a {type(given).__name__}", ways_out=("a Partition, a JSON file, or module paths",))
    if isinstance(partition, Partition) and any(stage.recompute for stage in partition.stages):
        raise CompileError(
            "the partition has stages that recompute their forward; these can be planned, not run",
            ways_out=("plan without recompute", "torch.utils.checkpoint inside of the model"),
        )
    return partition


def read_replicas(
    partition: Partition | tuple[str, ...] | None, replicas: Any, world_size: int, several: int | None = None
) -> tuple[tuple[int, ...], int]:
    """The replicas of each stage, and how often the whole pipeline is replicated. Raises CompileError where that is not for so
    many ranks. replicas: the user's, for the stages that module paths begin.   several: how many stages the schedule has, where
    each rank runs several."""
    places = several or world_size
    if isinstance(partition, Partition):
        if replicas is not None:
            raise CompileError("replicas are given, and the partition has its own", ways_out=("leave replicas out",))
        found, pipelines = tuple(stage.replicas for stage in partition.stages), partition.pipelines
    else:
        stages = places if partition is None else len(partition) + 1
        found, pipelines = (1,) * stages if replicas is None else _checked(replicas), 1
        if partition is None and replicas is not None and len(found) > 1:
            ways_out = ("partition: the module paths at which stages begin", "a Partition from pdcompiler plan")
            raise CompileError("replicas are given, but not what they are replicas of", ways_out=ways_out)
        if partition is not None and len(found) != stages:
            raise CompileError(f"replicas are for {len(found)} stages, the partition has {stages} stages")
    ranks = sum(found) * pipelines
    if several is not None and (ranks != len(found) or len(found) != several):
        what = f"{len(found)} stages on {ranks} ranks" if ranks != len(found) else f"{len(found)} stages"
        raise CompileError(
            f"the schedule has {several} stages on {world_size} ranks, the partition has {what}",
            ways_out=(f"a partition of {several} stages, one replica each", "a schedule of one stage a rank: 1f1b, zb-h1"),
        )
    if ranks != places:
        what = f"{len(found)} stages" + (f" on {ranks} ranks" if ranks != len(found) else "")
        raise CompileError(f"the partition has {what}, world_size is {world_size}", ways_out=(f"world_size={ranks}",))
    return found, pipelines


def _checked(replicas: Any) -> tuple[int, ...]:
    counts = tuple(replicas) if isinstance(replicas, Sequence) and not isinstance(replicas, str) else ()
    if not counts or any(not isinstance(count, int) or count < 1 for count in counts):
        raise CompileError(f"replicas is {replicas!r}, expected one number of at least 1 for each stage")
    return counts
