"""Gradients while collectives use them: their numbers in the order of memory, cut into parts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradlane.training.node.parts import Part

SUM_DTYPES = {
    torch.float64: torch.float64,
    torch.float32: torch.float32,
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
}
"""What sums are taken in: halves in f32, and rounded once, as in the host's memory."""


@dataclass
class PendingGradient:
    """This rank's gradient of a tensor in the current step.

    Attributes:
        values: all of them, in the order of memory; complex ones are pairs.
        absent: whether there is none, and the memory waits for the others' mean.
        mark: when whatever uses the memory so far is done.
        parts_left: parts whose mean is not in place yet.
    """

    values: Tensor
    absent: bool
    mark: object
    parts_left: int

    def values_of(self, part: Part) -> Tensor:
        """Return the numbers of a part, in place."""
        size = self.values.element_size()
        first = part.first_byte // size
        return self.values[first : first + part.nbytes // size]


def flat_values(gradient: Tensor) -> Tensor:
    """View a dense tensor's numbers in the order of memory; complex ones are pairs."""
    flat = gradient.detach().as_strided((gradient.numel(),), (1,))
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
