"""The user's model gets memory where it is to be measured: values that run, sharing that stays, the rest untouched."""

from __future__ import annotations

import torch
from torch import nn

from pdcompiler.commands.model import CPU, give_memory, is_on_meta, read_example, to_device


def test_only_what_has_no_memory_gets_random_values() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64, device="meta"))
    model[1].weight = model[0].weight
    kept = {name: value.clone() for name, value in model.state_dict().items() if not value.is_meta}
    with torch.device("meta"):
        shared = nn.Linear(64, 64)
    shared.bias.requires_grad_(False)
    shared.register_buffer("mask", torch.zeros(3, dtype=torch.bool, device="meta"))
    shared.register_buffer("indices", torch.ones(3, dtype=torch.long, device="meta"))
    both = nn.ModuleList([model, shared, nn.ModuleList([shared])])
    both.again = nn.Linear(64, 64, device="meta")
    both.again.weight = shared.weight
    names = [name for name, _ in both.named_parameters()]
    assert is_on_meta(both)
    give_memory(both, CPU)
    assert not is_on_meta(both) and [name for name, _ in both.named_parameters()] == names
    assert both.again.weight is shared.weight and model[1].weight is model[0].weight
    assert all(torch.equal(model.state_dict()[name], value) for name, value in kept.items())
    assert shared.weight.requires_grad and not shared.bias.requires_grad
    assert 0.5 < shared.weight.std() * 8 < 1.5  # a variance of 1 / 64: values neither grow nor vanish
    assert shared.mask.all() and not shared.indices.any() and (shared.bias == 1).all()


def test_a_models_place_is_kept_or_changed() -> None:
    model = nn.Linear(3, 3)
    weight = model.weight
    assert to_device(model, None) == CPU and model.weight is weight
    assert to_device(nn.Linear(3, 3, device="meta"), None) == CPU


def test_an_example_without_memory_becomes_zeros_in_containers_too() -> None:
    class Takes(nn.Module):
        def forward(self, pair: tuple[torch.Tensor, torch.Tensor], scale: float) -> torch.Tensor:
            return pair[0] * pair[1] * scale

    kwargs = {"pair": (torch.ones(4, 2, device="meta"), torch.ones(4, 2)), "scale": 2.0}
    batch = read_example(Takes(), kwargs, CPU)
    assert batch.rows == 4 and not batch.tensors["pair[0]"].any() and batch.tensors["pair[1]"].all()
    assert batch.tensors["pair[0]"].dtype == torch.float32 and batch.tensors["pair[0]"].shape == (4, 2)
