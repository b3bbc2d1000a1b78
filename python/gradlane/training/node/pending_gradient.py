"""Gradients that collectives use: their values in memory order, cut into parts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradlane.training.node.parts import TensorPart

SUM_DTYPES = {
    torch.float64: torch.float64,
    torch.float32: torch.float32,
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
}
"""Dtypes of sums: halves add up in f32 and round once, as in shared memory."""


@dataclass
class PendingGradient:
    """This rank's gradient of a tensor in the current step.

    Attributes:
        values: in memory order; complex numbers are pairs.
        absent: True if this rank has no gradient and the memory is for the others' mean.
        mark: when whatever uses the memory so far is done.
        parts_left: parts whose mean is not in place yet.
    """

    values: Tensor
    absent: bool
    mark: object
    parts_left: int

    def values_of(self, part: TensorPart) -> Tensor:
        """Return a view of the values of a part."""
        size = self.values.element_size()
        first = part.first_byte // size
        return self.values[first : first + part.nbytes // size]


def flat_values(gradient: Tensor) -> Tensor:
    """Return a dense tensor's values in memory order; complex numbers are pairs."""
    flat = gradient.detach().as_strided((gradient.numel(),), (1,))
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
