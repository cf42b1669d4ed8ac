"""The zoo's networks that no library here brings: U-Net, VGG-16, AWD-LM, GNMT and an MLP, as users write them.

They are shaped like the originals and tiny; nothing about them is made easy for a compiler.
"""

from itertools import pairwise

import torch
from torch import Tensor, nn


def mlp(inputs: int, classes: int, width: int = 32) -> nn.Sequential:
    hidden = [layer for _ in range(4) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), *hidden, nn.Linear(width, classes))


def double_convolution(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(inplace=True),
        nn.Conv2d(outputs, outputs, 3, padding=1), nn.ReLU(inplace=True),
    )  # fmt: skip


class UNet(nn.Module):
    """down1 ------------------> up1;  down2 ------> up2;  bottom between."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.down1 = double_convolution(3, width)
        self.down2 = double_convolution(width, 2 * width)
        self.pool = nn.MaxPool2d(2)
        self.bottom = double_convolution(2 * width, 4 * width)
        self.widen2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.up2 = double_convolution(4 * width, 2 * width)
        self.widen1 = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.up1 = double_convolution(2 * width, width)
        self.head = nn.Conv2d(width, 3, 1)

    def forward(self, image: Tensor) -> Tensor:
        fine = self.down1(image)
        coarse = self.down2(self.pool(fine))
        hidden = self.bottom(self.pool(coarse))
        hidden = self.up2(torch.cat([coarse, self.widen2(hidden)], 1))
        hidden = self.up1(torch.cat([fine, self.widen1(hidden)], 1))
        result: Tensor = self.head(hidden)
        return result


class Vgg16(nn.Module):
    """torchvision's layers and initialisation; `M` is max pooling."""

    LAYERS = (64, 64, "M", 128, 128, "M", 256, 256, 256, "M", 512, 512, 512, "M", 512, 512, 512, "M")

    def __init__(self, classes: int, narrower: int = 16, width: int = 64, dropout: float = 0.0) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for layer in self.LAYERS:
            if isinstance(layer, str):
                layers.append(nn.MaxPool2d(2, 2))
            else:
                layers += [nn.Conv2d(channels, layer // narrower, 3, padding=1), nn.ReLU(inplace=True)]
                channels = layer // narrower
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d((7, 7))
        self.classifier = nn.Sequential(
            nn.Linear(channels * 7 * 7, width), nn.ReLU(True), nn.Dropout(dropout),
            nn.Linear(width, width), nn.ReLU(True), nn.Dropout(dropout),
            nn.Linear(width, classes),
        )  # fmt: skip
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, image: Tensor) -> Tensor:
        hidden = torch.flatten(self.avgpool(self.features(image)), 1)
        result: Tensor = self.classifier(hidden)
        return result


class AwdLm(nn.Module):
    """Embedding, three LSTM layers of which the last has the embedding's width, decoder tied to the embedding."""

    def __init__(self, vocabulary: int, width: int = 16, hidden: int = 24) -> None:
        super().__init__()
        self.encoder = nn.Embedding(vocabulary, width)
        sizes = [width, hidden, hidden, width]
        self.rnns = nn.ModuleList(nn.LSTM(inputs, outputs, batch_first=True) for inputs, outputs in pairwise(sizes))
        self.decoder = nn.Linear(width, vocabulary)
        self.decoder.weight = self.encoder.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.encoder(ids)
        for rnn in self.rnns:
            hidden, _ = rnn(hidden)
        result: Tensor = self.decoder(hidden)
        return result


class Attention(nn.Module):
    """Bahdanau's: v^T tanh(W query + U keys), normalised over the keys."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.score = nn.Linear(width, 1, bias=False)

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
        sums = self.query(queries).unsqueeze(2) + self.key(keys).unsqueeze(1)
        weights = torch.softmax(self.score(torch.tanh(sums)).squeeze(-1), dim=-1)
        return weights @ keys


class Gnmt(nn.Module):
    """A bidirectional and two plain encoder layers; three decoder layers, each given the attention's context."""

    def __init__(self, vocabulary: int, width: int = 16) -> None:
        super().__init__()
        self.source = nn.Embedding(vocabulary, width)
        self.bidirectional = nn.LSTM(width, width, batch_first=True, bidirectional=True)
        self.encoder = nn.ModuleList(nn.LSTM(inputs, width, batch_first=True) for inputs in (2 * width, width))
        self.target = nn.Embedding(vocabulary, width)
        self.first = nn.LSTM(width, width, batch_first=True)
        self.attention = Attention(width)
        self.decoder = nn.ModuleList(nn.LSTM(2 * width, width, batch_first=True) for _ in range(2))
        self.classifier = nn.Linear(width, vocabulary)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, _ = self.bidirectional(self.source(source))
        for index, layer in enumerate(self.encoder):
            output, _ = layer(memory)
            memory = output + memory if index else output
        hidden, _ = self.first(self.target(target))
        context = self.attention(hidden, memory)
        for layer in self.decoder:
            output, _ = layer(torch.cat([hidden, context], -1))
            hidden = output + hidden
        result: Tensor = self.classifier(hidden)
        return result
