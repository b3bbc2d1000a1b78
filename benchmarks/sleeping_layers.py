"""A model whose layers sleep in place of computing: a loaded machine changes its steps little."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn


class _Sleep(torch.autograd.Function):
    """The identity, which takes a third of a layer's time in forward and the rest in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer_s: float) -> Tensor:
        """Sleep for a layer's forward."""
        ctx.layer_s = layer_s
        time.sleep(layer_s / 3)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> tuple[Tensor, None]:
        """Sleep for a layer's backward."""
        time.sleep(ctx.layer_s * 2 / 3)
        return gradient[0], None


class _Layer(nn.Module):
    """A layer that adds the mean of its weight's rows."""

    def __init__(self, elements: int, layer_s: float) -> None:
        """Make its weight (elements / 64, 64)."""
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(elements // 64, 64))
        self.layer_s = layer_s

    def forward(self, x: Tensor) -> Tensor:
        """Return the input (64) and a little of the weight."""
        out: Tensor = _Sleep.apply(x, self.layer_s) + self.weight.mean(0)
        return out


def sleeping_layers(layers: int, elements: int, layer_s: float) -> nn.Sequential:
    """Return layers of so many elements each; forward and backward of one sleep for `layer_s`."""
    return nn.Sequential(*(_Layer(elements, layer_s) for _ in range(layers)))
