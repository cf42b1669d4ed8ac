"""The model that the benchmarks share: a pre-norm GPT, written as a user would write it."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, BLOCKS, HEADS = 1024, 8, 4


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.project = nn.Linear(width, 3 * width)
        self.merge = nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        heads = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.project(hidden).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        result: Tensor = self.merge(mixed.transpose(1, 2).flatten(2))
        return result


class Block(nn.Module):
    """Pre-norm: attention, then an MLP, each added to what came in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.LayerNorm(width), Attention(width))
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(hidden)
        result: Tensor = hidden + self.mlp(hidden)
        return result


class Gpt(nn.Module):
    """Token ids to logits."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(BLOCKS))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False))

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        result: Tensor = self.head(hidden)
        return result


def token_loss(logits: Tensor, target: Tensor) -> Tensor:
    """The mean over all tokens."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())
