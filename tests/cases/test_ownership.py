"""Case 24b and what crosses in Hugging Face models: one ownership for all traces, no saved weights, no integers or masks.

Training, evaluation, one row and bf16 autocast are different graphs; the partition is made once, from the first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import pdcompiler
from pdcompiler import Pipeline
from pdcompiler.core.ir import Staged
from tests.cases.test_values import messages
from tests.models import LENGTH, ZOO, Example

QUICK = ("resnet",)
SLOW = ("gpt2", "t5", "llama", "bert", "vit", "mixtral", "whisper")
MODELS = [*QUICK, *[pytest.param(name, marks=pytest.mark.full) for name in SLOW]]


@cache
def compiled(name: str, world_size: int) -> tuple[Example, Pipeline]:
    """A model of the zoo compiled at its own batch; shared by the tests of this file."""
    example = ZOO[name]()
    return example, pdcompiler.compile(example.model, world_size, microbatches=4, example_kwargs=example.kwargs)


def all_staged(pipe: Pipeline) -> list[Staged]:
    """The stages' functions of every trace that was made so far."""
    return [staged for known in pipe.runner.traces.made.values() for _, staged in known]


@pytest.mark.parametrize("name", MODELS)
def test_case_24b_one_ownership_for_all_traces(name: str) -> None:
    """A tool that cuts each trace on its own moves parameters between ranks when the user evaluates, or calls autocast."""
    example, pipe = compiled(name, 3)
    partition = pipe.partition
    owned = [stage.parameters for stage in partition.stages]
    rows = {key: value[:1] for key, value in example.kwargs.items()}
    pipe.eval_step(**example.kwargs)
    if name != "resnet":  # BatchNorm refuses to train on one value per channel, in plain PyTorch too
        pipe.step(**rows)
    with torch.autocast("cpu", torch.bfloat16):
        pipe.step(**example.kwargs)
    made = all_staged(pipe)
    assert len(made) >= (3 if name == "resnet" else 4)
    for staged in made:
        assert [stage.parameters for stage in staged.stages] == owned
        given = [name for stage in staged.stages for name in stage.gradients]
        assert all(index in partition.owners()[n] for index, stage in enumerate(staged.stages) for n in stage.gradients), given
    assert pipe.partition is partition
    trainable = {name for name, parameter in example.model.named_parameters() if parameter.requires_grad}
    assert {name for stage in made[0].stages for name in stage.gradients} == trainable


def storages(value: Any) -> Iterator[int]:
    """Where the tensors of a nested tuple lie."""
    if isinstance(value, Tensor):
        yield value.untyped_storage().data_ptr()
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from storages(item)


@pytest.mark.parametrize("autocast", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", ["gpt2", pytest.param("t5", marks=pytest.mark.full)])
def test_case_24b_no_saved_value_shares_storage_with_a_parameter(name: str, autocast: bool) -> None:
    """`verify_staged` refuses views by the graph; here the memory itself: an optimizer step in place would change it unseen."""
    example, pipe = compiled(name, 3)
    held = {tensor.untyped_storage().data_ptr() for tensor in (*example.model.parameters(), *example.model.buffers())}
    saved: list[tuple[int, Any]] = []
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), contextlib.ExitStack() as hooks:
        pipe.step(**example.kwargs)
        for stage in pipe.stages:
            place = stage.forward.gives.index("saved")

            def keep(module: Any, args: Any, result: Any, index: int = stage.index, place: int = place) -> None:
                saved.append((index, result[place]))

            hooks.callback(stage.forward.module.register_forward_hook(keep).remove)
        pipe.step(**example.kwargs)
    assert [index for index, _ in sorted(saved, key=lambda item: item[0])] == [0] * 4 + [1] * 4 + [2] * 4
    for index, values in saved:
        shared = [place for place, value in enumerate(values) if set(storages(value)) & held]
        assert not shared, f"stage {index} saves the memory of a weight or buffer at {shared}"


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.full), 3, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", ["gpt2", *[pytest.param(n, marks=pytest.mark.full) for n in ("t5", "bert", "llama")]])
def test_no_integer_and_no_mask_crosses(name: str, world_size: int) -> None:
    """Ids, positions, lengths and masks are made again where they are read: every rank has the batch."""
    example, pipe = compiled(name, world_size)
    pipe.step(**example.kwargs)
    sent = messages(pipe)
    assert sent and all(dtype.is_floating_point for _, dtype, _ in sent), sent
    if name != "t5":  # whose bias of positions is made of a parameter, and is an activation like others
        assert not [shape for _, _, shape in sent if shape[-2:] == (LENGTH, LENGTH)], "a float mask crosses"
