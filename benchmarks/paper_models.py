"""Three models of PipeDream's paper in shape, small enough for one CPU core: where the parameters are, and where the time goes.

    VGG-16 like     convolutions: most of the time; three fully connected layers: most of the parameters
    AWD LM like     three LSTM layers between a large embedding and a large decoder
    GNMT-16 like    an LSTM encoder, the first layer in both directions; a decoder that attends to it; a large vocabulary

Not here: how they are trained, and on what link (`against_data_parallel.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from gpt import token_loss
from torch import Tensor, nn
from torch.nn import functional as F


class Vgg(nn.Module):
    """The thirteen convolutions and three fully connected layers of VGG-16, of a quarter of the width, for images of 64 x 64."""

    LAYOUT = (16, 16, "pool", 32, 32, "pool", 64, 64, 64, "pool", 128, 128, 128, "pool", 128, 128, 128, "pool")

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for item in self.LAYOUT:
            if isinstance(item, int):
                layers += [nn.Conv2d(channels, item, 3, padding=1), nn.ReLU()]
                channels = item
            else:
                layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Flatten(), nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 100)
        )

    def forward(self, image: Tensor) -> Tensor:
        result: Tensor = self.classifier(self.features(image))
        return result


class LanguageModel(nn.Module):
    """Embedding, three LSTM layers, decoder."""

    def __init__(self, vocabulary: int = 6000, width: int = 128, hidden: int = 288) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        sizes = ((width, hidden), (hidden, hidden), (hidden, width))
        self.layers = nn.ModuleList(nn.LSTM(*pair, batch_first=True) for pair in sizes)
        self.decoder = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = layer(hidden)[0]
        result: Tensor = self.decoder(hidden)
        return result


class Translator(nn.Module):
    """Encoder and decoder of LSTM layers with residual connections; each position of the decoder attends to the encoder's."""

    def __init__(self, vocabulary: int = 4000, width: int = 128, layers: int = 4) -> None:
        super().__init__()
        self.source = nn.Embedding(vocabulary, width)
        self.first = nn.LSTM(width, width // 2, batch_first=True, bidirectional=True)
        self.encoder = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(layers - 1))
        self.target = nn.Embedding(vocabulary, width)
        self.query = nn.LSTM(width, width, batch_first=True)
        self.decoder = nn.ModuleList(nn.LSTM(2 * width, width, batch_first=True) for _ in range(layers - 1))
        self.classifier = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        """Of source and target, one behind the other in each row."""
        source, target = ids.chunk(2, dim=1)
        encoded = self.first(self.source(source))[0]
        for layer in self.encoder:
            encoded = encoded + layer(encoded)[0]
        hidden = self.query(self.target(target))[0]
        weights = torch.softmax(hidden @ encoded.transpose(1, 2), dim=-1)
        context = weights @ encoded
        for layer in self.decoder:
            hidden = hidden + layer(torch.cat([hidden, context], dim=-1))[0]
        result: Tensor = self.classifier(hidden)
        return result


@dataclass(frozen=True)
class Case:
    """rows: of a host's batch."""

    make: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Tensor, Tensor]]
    loss_fn: Callable[[Tensor, Tensor], Tensor]
    rows: int


def images(rows: int) -> tuple[Tensor, Tensor]:
    """With their classes."""
    return torch.randn(rows, 3, 64, 64), torch.randint(100, (rows,))


def sentences(rows: int) -> tuple[Tensor, Tensor]:
    """With the words to predict."""
    ids, target = torch.randint(6000, (2, rows, 16))
    return ids, target


def pairs(rows: int) -> tuple[Tensor, Tensor]:
    """Source and target sentences, with the words to predict."""
    return torch.randint(4000, (rows, 24)), torch.randint(4000, (rows, 12))


CASES = {
    "VGG-16": Case(Vgg, images, F.cross_entropy, 24),
    "AWD LM": Case(LanguageModel, sentences, token_loss, 40),
    "GNMT-16": Case(Translator, pairs, token_loss, 48),
}
"""By the paper's names."""
