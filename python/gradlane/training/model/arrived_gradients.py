"""What has come back of a step."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass
class ArrivedGradients:
    """The tensors that have come back.

    Attributes:
        gradients: tensor numbers and averaged gradients.
        indices: all tensor numbers that are done with, also without a gradient.
        averaged: those of trained parameters that some rank had a gradient for.
    """

    gradients: list[tuple[int, Tensor]]
    indices: list[int]
    averaged: list[int]
