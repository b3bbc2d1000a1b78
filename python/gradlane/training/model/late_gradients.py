"""Late gradients that are not lost: what a step went on without is added to the next gradient.

A gradient's memory is the core's once it was handed over, and becomes the step's result, so a copy
is kept until it is known whether the step has it.
"""

from __future__ import annotations

import torch
from torch import Tensor


class LateGradientBuffer:
    """Copies of this rank's gradients of the current step, and what earlier ones left."""

    def __init__(self) -> None:
        """Carry nothing."""
        self._given: dict[int, Tensor] = {}
        self._carried: dict[int, Tensor] = {}

    def before_give(self, index: int, gradient: Tensor) -> None:
        """Add what is carried to a gradient, in place, and keep a copy of the sum.

        Args:
            index: the tensor's number.
            gradient: about to be handed over.
        """
        with torch.no_grad(), torch.inference_mode(False):
            carried = self._carried.get(index)
            if carried is not None:
                gradient.add_(carried)
            self._given[index] = gradient.clone()

    def carried(self, index: int) -> Tensor | None:
        """Return what waits to be added to a tensor's next gradient; None: nothing."""
        return self._carried.get(index)

    def carry(self, index: int, gradient: Tensor) -> None:
        """Have this added to a tensor's next gradient, in place of what is carried."""
        self._carried[index] = gradient

    def settle(self, was_in: bool) -> None:
        """The step is over.

        Args:
            was_in: whether it has what was given.
        """
        if was_in:
            for index in self._given:
                self._carried.pop(index, None)
        else:
            self._carried.update(self._given)
        self._given = {}
