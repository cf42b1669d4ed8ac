"""The models whose steps `prediction.py` predicts, small enough for two CPU cores, with their batches and cuts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from gpt import VOCABULARY, Gpt, token_loss
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import ResNetConfig, ResNetForImageClassification

MICROBATCHES = 8


class Lstm(nn.Module):
    """A language model of four LSTM layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(4))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = layer(hidden)[0]
        result: Tensor = self.head(hidden)
        return result


class ResNet(nn.Module):
    """Hugging Face's, of four stages."""

    def __init__(self, width: int) -> None:
        super().__init__()
        sizes = [width, 2 * width, 4 * width, 8 * width]
        config = ResNetConfig(embedding_size=width, hidden_sizes=sizes, depths=[2, 2, 2, 2], layer_type="basic", num_labels=10)
        self.whole = ResNetForImageClassification(config)

    def forward(self, image: Tensor) -> Tensor:
        logits: Tensor = self.whole(image).logits
        return logits


@dataclass(frozen=True)
class Case:
    """A model with one batch, and where it is cut, one cut a pipeline."""

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    loss_fn: Callable[[Tensor, Tensor], Tensor]
    cuts: tuple[str, ...]


def sentences(rows: int, length: int) -> tuple[Tensor, Tensor]:
    """Token ids and targets for all microbatches."""
    ids, target = torch.randint(VOCABULARY, (2, rows * MICROBATCHES, length))
    return ids, target


def images(rows: int, size: int) -> tuple[Tensor, Tensor]:
    """Images and classes for all microbatches."""
    return torch.randn(rows * MICROBATCHES, 3, size, size), torch.randint(10, (rows * MICROBATCHES,))


GPT_CUTS, STAGES = ("layers.2", "layers.4", "layers.6"), "whole.resnet.encoder.stages"
CASES = (
    Case("GPT 64,32,2", lambda: Gpt(64), lambda: sentences(2, 32), token_loss, GPT_CUTS),
    Case("GPT 128,64,2", lambda: Gpt(128), lambda: sentences(2, 64), token_loss, GPT_CUTS),
    Case("ResNet 16,64,4", lambda: ResNet(16), lambda: images(4, 64), F.cross_entropy, tuple(f"{STAGES}.{i}" for i in (1, 2, 3))),
    Case("LSTM 128,16,4", lambda: Lstm(128), lambda: sentences(4, 16), token_loss, ("layers.1", "layers.2", "layers.3")),
)
