"""A recorded step on gloo: what was predicted of its memory holds, and it has the schema of a simulated one."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch.distributed as dist

from pdcompiler.core.events import Event
from tests.models import ZOO
from tests.processes.checks import compile_example
from tests.processes.pool import Group

pytestmark = pytest.mark.processes


def record(name: str, schedule: str) -> tuple[list[int], list[int]]:
    """The bytes of each rank's fullest moment: predicted, and measured by the sizes of storages."""
    example = ZOO[name]()
    pipe = compile_example(example, schedule=schedule, microbatches=4)
    pipe.prepare(*example.args, target=example.target, **example.kwargs)
    with pipe.record(memory=True) as recording:
        pipe.step(*example.args, target=example.target, **example.kwargs)
    seconds = recording.timeline.function_seconds()
    assert seconds["other"] > 0
    measured, predicted = recording.timeline, pipe.simulate(seconds)
    for rank, events in enumerate(measured.ranks):
        assert order(events) == order(predicted.ranks[rank]), f"rank {rank}"
        assert all(one.end <= other.start for one, other in itertools.pairwise(events)), f"rank {rank}"
        assert sum((measured.computing[rank], measured.exposed[rank], measured.bubble[rank])) == pytest.approx(measured.finish)
    assert {(m.sender, m.receiver, m.nbytes) for m in measured.messages} == {
        (m.sender, m.receiver, m.nbytes) for m in predicted.messages
    }
    assert measured.source == "measured" and dist.get_world_size() == len(measured.ranks)
    return [memory.peak for memory in predicted.memory], [memory.peak for memory in measured.memory]


def order(events: tuple[Event, ...]) -> list[str]:
    """The stage functions that ran."""
    return [event.name for event in events if event.kind in ("F", "B", "W")]


@pytest.mark.parametrize(("name", "schedule"), [("gpt2", "1f1b"), ("resnet", "zb-h1"), ("t5", "zb-v"), ("unet", "interleaved")])
def test_memory_is_what_was_predicted(pool: Callable[[int], Group], name: str, schedule: str) -> None:
    """The packed values of U-Net are views of larger memory, which a message does not have."""
    for predicted, measured in pool(2).run(record, name, schedule):
        assert predicted == pytest.approx(measured, rel=0.05), (predicted, measured)
