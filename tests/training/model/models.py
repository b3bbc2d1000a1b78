"""Small models with everything that makes parameters awkward."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor, nn

_generator = threading.Lock()


def seeded(build: Callable[[], nn.Module], seed: int = 7) -> nn.Module:
    """Build a model from a seed; ranks that are threads share torch's generator and take turns."""
    with _generator, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


class SmallCnn(nn.Module):
    """A convolutional network with batch norm; inputs (N, 1, 8, 8), outputs (N, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, stride=2),
            nn.ReLU(),
            nn.Flatten(),
        )
        self.head = nn.Linear(16 * 9, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.body(images))  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Torch's own attention, whose output projection is never called; inputs (N, 5, 8)."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)

    def forward(self, tokens: Tensor) -> Tensor:
        mixed, _ = self.attention(tokens, tokens, tokens, need_weights=False)
        return self.norm(tokens + mixed)  # type: ignore[no-any-return]


class Awkward(nn.Module):
    """Tied, reused, frozen, unused and sometimes-used parameters; inputs (N, 6)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(6, 6)
        self.decoder = nn.Linear(6, 6)
        self.decoder.weight = self.encoder.weight
        self.reused = nn.Linear(6, 6)
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.unused = nn.Linear(6, 6)
        self.sometimes = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.ones(6))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("mask", torch.tril(torch.ones(6, 6)).bool())
        self.register_buffer("odd", torch.arange(12.0).view(3, 4).t(), persistent=False)
        self.uses_sometimes = False

    def forward(self, values: Tensor) -> Tensor:
        hidden = self.frozen(self.encoder(values)).tanh()
        hidden = self.reused(self.reused(hidden)) * self.scale
        if self.uses_sometimes:
            hidden = self.sometimes(hidden)
        return self.decoder(hidden)  # type: ignore[no-any-return]


class CharTransformer(nn.Module):
    """A small causal transformer over bytes; inputs (N, T) int64 with T <= 16, outputs logits."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(64, 32)
        self.position = nn.Parameter(torch.zeros(16, 32))
        layer = nn.TransformerEncoderLayer(
            32, 4, dim_feedforward=64, dropout=0.0, batch_first=True, norm_first=True
        )
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        hidden = self.token(tokens) + self.position[:length]
        return self.head(self.body(hidden, mask=mask, is_causal=True))  # type: ignore[no-any-return]
