"""A character-level transformer that learns to write Python, from the standard library's sources.

The text is what the interpreter brings along, so that no data has to be fetched. Attention is
written out here with fully connected layers that are called as modules.
"""

from __future__ import annotations

import math
import sysconfig
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional

from gradlane.lab.workloads.gradients import hash_of
from gradlane.lab.workloads.paced_layers import (
    PacedEmbedding,
    PacedLayerNorm,
    PacedLinear,
    PacedOperation,
    Pacer,
)
from gradlane.lab.workloads.real import Batch, RealWorkload

CONTEXT = 64
"""Characters that a prediction can see."""
SIZE = 128
HEADS = 4
BLOCKS = 5
TEXT_CHARACTERS = 2_000_000
"""Length of the text; the last tenth is held out."""
SYMBOLS = 97
"""Printable ASCII, the end of a line, and one symbol for everything else."""
LIGHT_FORWARD_S = 0.002
"""Time of embeddings, normalizations and the core of attention."""
HEAVY_FORWARD_S = 0.004
"""Time of fully connected layers."""
LEARNING_RATE = 1e-3
"""Twice as much learns more slowly, and turns the last bits of sums into percents of the loss."""
HELD_OUT_WINDOWS = 64
HELD_OUT_BATCH = 16


@lru_cache(maxsize=1)
def standard_library_text() -> npt.NDArray[np.uint8]:
    """Read the standard library's modules by name and encode them as numbers below `SYMBOLS`.

    Returns:
        At most `TEXT_CHARACTERS` symbols: 0 to 94 printable ASCII, 95 newline, 96 other.

    Raises:
        FileNotFoundError: if this interpreter has no library sources of a useful length.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    collected = bytearray()
    for path in sorted(folder.glob("*.py")):
        collected += path.read_bytes()
        if len(collected) >= TEXT_CHARACTERS:
            break
    if len(collected) < 100 * CONTEXT * HELD_OUT_WINDOWS:
        raise FileNotFoundError(
            f"found only {len(collected)} bytes of Python sources in {folder}; install the "
            "standard library's sources or choose another workload"
        )
    table = np.full(256, SYMBOLS - 1, dtype=np.uint8)
    table[32:127] = np.arange(95, dtype=np.uint8)
    table[ord("\n")] = 95
    return table[np.frombuffer(bytes(collected[:TEXT_CHARACTERS]), dtype=np.uint8)]


def causal_attention(projections: torch.Tensor) -> torch.Tensor:
    """Attend to earlier characters (Vaswani et al. 2017, with a causal mask).

    Args:
        projections: queries, keys and values, (samples, length, 3 * size).

    Returns:
        Mixed values, (samples, length, size).
    """
    samples, length, width = projections.shape
    size = width // 3
    parts = projections.view(samples, length, 3, HEADS, size // HEADS).permute(2, 0, 3, 1, 4)
    queries, keys, values = parts.unbind(0)
    scores = queries @ keys.transpose(-2, -1) / math.sqrt(size // HEADS)
    future = torch.ones(length, length, dtype=torch.bool, device=scores.device).triu(1)
    weights = functional.softmax(scores.masked_fill(future, -math.inf), dim=-1)
    return (weights @ values).transpose(1, 2).reshape(samples, length, size)


class Block(nn.Module):
    """Attention and a two-layer perceptron, each with normalization before and a sum after."""

    def __init__(self, pacer: Pacer) -> None:
        """Create the block from torch's global generator."""
        super().__init__()
        self.norm1 = PacedLayerNorm(pacer, SIZE, LIGHT_FORWARD_S)
        self.projections = PacedLinear(pacer, SIZE, 3 * SIZE, HEAVY_FORWARD_S)
        self.attention = PacedOperation(pacer, causal_attention, LIGHT_FORWARD_S)
        self.output = PacedLinear(pacer, SIZE, SIZE, HEAVY_FORWARD_S)
        self.norm2 = PacedLayerNorm(pacer, SIZE, LIGHT_FORWARD_S)
        self.expand = PacedLinear(pacer, SIZE, 4 * SIZE, HEAVY_FORWARD_S, functional.gelu)
        self.contract = PacedLinear(pacer, 4 * SIZE, SIZE, HEAVY_FORWARD_S)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Map (samples, length, size) to the same shape."""
        values = values + self.output(self.attention(self.projections(self.norm1(values))))
        result: torch.Tensor = values + self.contract(self.expand(self.norm2(values)))
        return result


class CharNetwork(nn.Module):
    """A decoder-only transformer of five blocks: 1,024,737 parameters in 66 tensors."""

    def __init__(self, pacer: Pacer) -> None:
        """Create the network from torch's global generator."""
        super().__init__()
        self.symbols = PacedEmbedding(pacer, SYMBOLS, SIZE, LIGHT_FORWARD_S)
        self.positions = PacedEmbedding(pacer, CONTEXT, SIZE, LIGHT_FORWARD_S)
        self.blocks = nn.ModuleList(Block(pacer) for _ in range(BLOCKS))
        self.norm = PacedLayerNorm(pacer, SIZE, LIGHT_FORWARD_S)
        self.head = PacedLinear(pacer, SIZE, SYMBOLS, HEAVY_FORWARD_S)

    def forward(self, symbols: torch.Tensor) -> torch.Tensor:
        """Map symbols (samples, length) to scores of the next ones (samples, length, 97)."""
        values = self.symbols(symbols) + self.positions(
            torch.arange(symbols.shape[1], dtype=torch.long, device=symbols.device)
        )
        for block in self.blocks:
            values = block(values)
        scores: torch.Tensor = self.head(self.norm(values))
        return scores


class CharTransformer(RealWorkload):
    """Prediction of the next character of Python sources, trained with AdamW."""

    batch_size = 4

    def load(self) -> None:
        """Read the text and cut out this rank's part of it."""
        text = standard_library_text()
        training = len(text) * 9 // 10
        share = training // self.world_size
        if share <= CONTEXT:
            raise ValueError(
                f"{self.world_size} ranks are too many for {training} characters of text"
            )
        self._text = torch.from_numpy(text[self.rank * share : (self.rank + 1) * share])
        self._held_out_text = torch.from_numpy(text[training:])

    def make_model(self) -> nn.Module:
        """Build the network."""
        return CharNetwork(self.pacer)

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return AdamW with torch's own defaults but for the learning rate.

        The update is not paced, so it is torch's fused one, a third of the usual cost.
        """
        return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)

    def batch(self, step: int) -> Batch:
        """Return random windows of this rank's text and, for each, the same one symbol on."""
        starts = [
            hash_of(self.seed, self.rank, step, sample) % (len(self._text) - CONTEXT)
            for sample in range(self.batch_size)
        ]
        return _windows(self._text, starts)

    def held_out(self) -> list[Batch]:
        """Return evenly spread windows of the held-out text."""
        stride = (len(self._held_out_text) - CONTEXT - 1) // HELD_OUT_WINDOWS
        starts = [stride * window for window in range(HELD_OUT_WINDOWS)]
        return [
            _windows(self._held_out_text, starts[first : first + HELD_OUT_BATCH])
            for first in range(0, HELD_OUT_WINDOWS, HELD_OUT_BATCH)
        ]


def _windows(text: torch.Tensor, starts: list[int]) -> Batch:
    windows = torch.stack([text[start : start + CONTEXT + 1] for start in starts]).long()
    return windows[:, :-1], windows[:, 1:]
