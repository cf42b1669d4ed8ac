"""`pipe.simulate()`: what it says of a real model, shows, writes and refuses. How near it is to what runs: tests/processes."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
import torch

import pdcompiler
from pdcompiler import CompileError, Pipeline
from pdcompiler.core.machine import Machine
from tests.models import ZOO

PNG = b"\x89PNG"


@cache
def gpt2(schedule: str = "zb-h1") -> Pipeline:
    example = ZOO["gpt2"]()
    return pdcompiler.compile(
        example.model, 2, example_args=example.args, example_kwargs=example.kwargs, schedule=schedule, microbatches=4
    )


def test_a_rank_computes_waits_and_pays_for_messages() -> None:
    timeline = gpt2().simulate()
    assert timeline.source == "simulated" and len(timeline.ranks) == 2
    for parts in zip(timeline.computing, timeline.exposed, timeline.bubble, strict=True):
        assert sum(parts) == pytest.approx(timeline.finish) and min(parts) > 0
    assert {event.kind for event in timeline.ranks[1]} >= {"F", "B", "W", "message"}
    assert len([event for event in timeline.ranks[0] if event.kind == "F"]) == 4


def test_memory_is_made_of_parts_and_peaks_where_it_says() -> None:
    pipe = gpt2()
    timeline = pipe.simulate()
    for rank, memory in enumerate(timeline.memory):
        assert sum(memory.parts.values()) == memory.peak == max(size for _, size in timeline.held[rank])
        names = {node.name for node in pipe.ranks[rank].graph.nodes}
        assert memory.node in names
        held = {name: p.numel() * p.element_size() for name, p in pipe.request.model.named_parameters()}
        assert memory.parts["weights"] == sum(held[name] for name in pipe.partition.stages[rank].parameters)


def test_seconds_that_are_known_take_the_place_of_the_machines() -> None:
    pipe = gpt2()
    names = pipe.simulate().function_seconds()
    known = dict.fromkeys(names, 0.5)
    timeline = pipe.simulate(known)
    assert timeline.function_seconds() == pytest.approx(known)
    assert timeline.finish > pipe.simulate().finish
    with pytest.raises(CompileError, match=r"no stage function 'stage7_forward'\n.*stage0_forward"):
        pipe.simulate({"stage7_forward": 1.0})


def test_a_faster_link_is_less_exposed() -> None:
    example = ZOO["mlp"]()
    machines = [Machine.flat(2, bytes_per_second=speed, latency_seconds=0.0, overlap=True) for speed in (1e6, 1e9)]
    slow, fast = (
        pdcompiler.compile(
            example.model, 2, example_args=example.args, example_target=example.target, loss_fn=example.loss_fn, machine=machine,
            partition=["2"],
        ).simulate()
        for machine in machines
    )
    assert sum(slow.exposed) > 10 * sum(fast.exposed)


def test_it_is_shown_and_written(tmp_path: Path) -> None:
    timeline = gpt2().simulate()
    first, second = timeline.text(100).splitlines()
    assert first.startswith("rank 0 F") and "B" in second and "w" in second.lower() and len(first) <= 100
    assert "bubble" in str(timeline) and "stage1_backward_input" in str(timeline)
    timeline.save_picture(tmp_path / "a.svg")
    timeline.save_picture(tmp_path / "a.png")
    text = (tmp_path / "a.svg").read_text()
    assert "<svg" in text and all(colour in text.lower() for colour in ("#0072b2", "#e69f00", "#009e73"))
    assert (tmp_path / "a.png").read_bytes().startswith(PNG)
    with pytest.raises(CompileError, match="is no picture"):
        timeline.save_picture(tmp_path / "a.txt")


def test_a_trace_for_perfetto(tmp_path: Path) -> None:
    timeline = gpt2().simulate()
    timeline.save_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == sum(map(len, timeline.ranks))
    assert max(event["ts"] + event["dur"] for event in slices) == pytest.approx(timeline.finish * 1e6)
    assert len([e for e in events if e["ph"] == "s"]) == len([e for e in events if e["ph"] == "f"]) == len(timeline.messages) > 0
    assert any(event["ph"] == "C" and event["args"]["bytes"] == timeline.memory[0].peak for event in events)


def test_refusals() -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(CompileError, match="no step is compiled yet"):
        pdcompiler.compile(model, 1, loss_fn=torch.nn.functional.mse_loss).simulate()
    stream = pdcompiler.compile(model, 1, loss_fn=torch.nn.functional.mse_loss, schedule="pipedream", optimizer=torch.optim.SGD)
    with pytest.raises(CompileError, match="pipedream does not flush"):
        stream.simulate()
    with pytest.raises(CompileError, match="each rank in its process"), gpt2().record():
        pass
