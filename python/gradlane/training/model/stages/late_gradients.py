"""Late gradients that are not lost: one that missed its step is added to the next gradient.

The core owns a gradient's memory once it was submitted, and writes the step's result there, so a
copy is kept until it is known whether the step has the gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradlane.training.model.contributors import Contributors
from gradlane.training.model.stages.stage import StepStage


class LateGradientBuffer(StepStage):
    """Keeps copies of this rank's gradients of the current step, and late ones of earlier steps."""

    def __init__(self, contributors: Contributors) -> None:
        """Start without gradients; `contributors`: of the model's steps."""
        super().__init__("late gradients", 'stragglers with late="carry": added to the next ones')
        self._contributors = contributors
        self._submitted: dict[int, Tensor] = {}
        self._carried: dict[int, Tensor] = {}

    def before_send(self, index: int, gradient: Tensor) -> None:
        """Add the late gradient to a fresh one, in place, and keep a copy of the sum.

        Args:
            index: the tensor's number.
            gradient: about to be submitted.
        """
        with torch.no_grad(), torch.inference_mode(False):
            carried = self._carried.get(index)
            if carried is not None:
                gradient.add_(carried)
            self._submitted[index] = gradient.clone()

    def carried(self, index: int) -> Tensor | None:
        """Return the sum that is added to a tensor's next gradient, or None."""
        return self._carried.get(index)

    def carry(self, index: int, gradient: Tensor) -> None:
        """Have this added to a tensor's next gradient, in place of the late one."""
        self._carried[index] = gradient

    def completed(self, step: int) -> None:
        """Carry the submitted gradients on, if the step has gone on without them."""
        if self._contributors.lack_this_rank(step):
            self._carried.update(self._submitted)
        else:
            for index in self._submitted:
                self._carried.pop(index, None)
        self._submitted = {}
