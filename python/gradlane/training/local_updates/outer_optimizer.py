"""The values that all ranks have in common, and the outer optimizer that moves them.

Every rank holds them and runs the same operations on the same numbers, so they are the same bits
everywhere. Each operation rounds once: none is fused with another, whatever the processor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradlane.training.options.local_updates import AVERAGE, NESTEROV, Local
from gradlane.training.rendezvous.tensor_table import TensorEntry


class OuterOptimizer:
    """Moves common values by outer gradients: the mean difference of all ranks to them."""

    def __init__(self, local: Local, trained: Sequence[TensorEntry]) -> None:
        """Begin with the parameters as they are, the same on all ranks.

        Args:
            local: outer optimizer, learning rate and momentum.
            trained: table entries of the trained parameters.
        """
        self._local = local
        self._trained = trained
        self.momentum: dict[int, Tensor] = {}
        """By tensor number, once there is some."""
        with torch.inference_mode(False), torch.no_grad():
            self.common = [entry.device_memory().copy_(entry.tensor) for entry in trained]
            """Common values by tensor number, laid out as gradients are."""

    def difference(self, index: int) -> Tensor:
        """Return the common value minus this rank's parameter: its outer gradient."""
        entry = self._trained[index]
        with torch.inference_mode(False), torch.no_grad():
            return torch.sub(self.common[index], entry.tensor, out=entry.device_memory())

    def differs(self, index: int) -> bool:
        """Whether this rank's parameter has other numbers than its common value."""
        parameter = self._trained[index].tensor.detach()
        return not torch.allclose(self.common[index], parameter, rtol=0, atol=0, equal_nan=True)

    def step(self, index: int, gradient: Tensor) -> None:
        """Move a common value.

        Args:
            index: the tensor.
            gradient: the mean of all ranks' differences; it is written to.
        """
        local, common = self._local, self.common[index]
        with torch.inference_mode(False), torch.no_grad():
            if local.outer == AVERAGE:
                common.sub_(gradient)
                return
            if local.outer_momentum > 0:
                momentum = self.momentum.get(index)
                if momentum is None:
                    momentum = self.momentum[index] = gradient.clone()
                else:
                    momentum.mul_(local.outer_momentum).add_(gradient)
                if local.outer == NESTEROV:
                    gradient.add_(momentum * local.outer_momentum)
                else:
                    gradient.copy_(momentum)
            common.sub_(gradient.mul_(local.outer_lr))

    def mix(self, index: int, share: float) -> None:
        """Give this rank's parameter a share of its common value; 1: all of it."""
        parameter = self._trained[index].tensor
        with torch.no_grad():
            if share == 1:
                parameter.copy_(self.common[index])
            else:
                parameter.lerp_(self.common[index], share)
