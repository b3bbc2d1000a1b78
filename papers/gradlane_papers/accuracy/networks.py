"""The networks of the study: small enough for many seeds, each of another kind.

All draw their parameters from torch's global generator, which the study seeds.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from gradlane.lab.workloads.char_transformer import SYMBOLS

CONTEXT = 32
"""Characters that a language model sees at once."""
LONG_CONTEXT = 64
"""Characters that the larger one sees."""


class Mlp(nn.Module):
    """Three fully connected layers on 8x8 images: 85,002 parameters."""

    def __init__(self) -> None:
        """Create the layers."""
        super().__init__()
        self.hidden1 = nn.Linear(64, 256)
        self.hidden2 = nn.Linear(256, 256)
        self.output = nn.Linear(256, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map images (samples, 1, 8, 8) to scores (samples, 10)."""
        values = functional.relu(self.hidden1(images.flatten(1)))
        scores: torch.Tensor = self.output(functional.relu(self.hidden2(values)))
        return scores


class Residual(nn.Module):
    """Two convolutions beside a shortcut (He et al. 2016), with normalization over groups.

    Normalization over batches would keep statistics that workers do not share.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        """Create the layers."""
        super().__init__()
        self.convolution1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(4, outputs)
        self.convolution2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(4, outputs)
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map (samples, inputs, height, width) to (samples, outputs, height, width over stride)."""
        values = functional.relu(self.norm1(self.convolution1(images)))
        values = self.norm2(self.convolution2(values)) + self.shortcut(images)
        return functional.relu(values)


class SmallResNet(nn.Module):
    """Three residual blocks on 8x8 images and a wide fully connected layer: 81,562 parameters."""

    def __init__(self) -> None:
        """Create the layers."""
        super().__init__()
        self.stem = nn.Conv2d(1, 16, 3, padding=1, bias=False)
        self.block1 = Residual(16, 16, 1)
        self.block2 = Residual(16, 32, 2)
        self.block3 = Residual(32, 48, 2)
        self.hidden = nn.Linear(48 * 4, 128)
        self.output = nn.Linear(128, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map images (samples, 1, 8, 8) to scores (samples, 10)."""
        values = self.block3(self.block2(self.block1(functional.relu(self.stem(images)))))
        scores: torch.Tensor = self.output(functional.relu(self.hidden(values.flatten(1))))
        return scores


class CharLstm(nn.Module):
    """One LSTM layer over characters: 98,561 parameters."""

    def __init__(self) -> None:
        """Create the layers."""
        super().__init__()
        self.symbols = nn.Embedding(SYMBOLS, 32)
        self.recurrent = nn.LSTM(32, 128, batch_first=True)
        self.output = nn.Linear(128, SYMBOLS)

    def forward(self, symbols: torch.Tensor) -> torch.Tensor:
        """Map symbols (samples, length) to scores of the next ones (samples, length, 97)."""
        values, _ = self.recurrent(self.symbols(symbols))
        scores: torch.Tensor = self.output(values)
        return scores


class SmallTransformer(nn.Module):
    """A decoder-only transformer of two blocks over characters: 114,657 parameters."""

    def __init__(self, size: int = 64, blocks: int = 2, context: int = CONTEXT) -> None:
        """Create the layers.

        Args:
            size: of a symbol's vector.
            blocks: number of them.
            context: characters that are seen at once.
        """
        super().__init__()
        self.symbols = nn.Embedding(SYMBOLS, size)
        self.positions = nn.Embedding(context, size)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                size, 4, 4 * size, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(blocks)
        )
        self.norm = nn.LayerNorm(size)
        self.output = nn.Linear(size, SYMBOLS)

    def forward(self, symbols: torch.Tensor) -> torch.Tensor:
        """Map symbols (samples, length) to scores of the next ones (samples, length, 97)."""
        length = symbols.shape[1]
        values = self.symbols(symbols) + self.positions(
            torch.arange(length, dtype=torch.long, device=symbols.device)
        )
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        for block in self.blocks:
            values = block(values, src_mask=mask, is_causal=True)
        scores: torch.Tensor = self.output(self.norm(values))
        return scores


class LanguageModel(SmallTransformer):
    """A decoder-only transformer of four blocks over characters: 826,465 parameters."""

    def __init__(self) -> None:
        """Create the layers."""
        super().__init__(size=128, blocks=4, context=LONG_CONTEXT)
