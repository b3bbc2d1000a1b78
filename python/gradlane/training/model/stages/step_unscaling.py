"""How `GradScaler` unscales gradients that are still to arrive."""

from __future__ import annotations

from collections.abc import Iterable, Set

import torch
from torch import Tensor

from gradlane.training.torch_internals import foreach_unscale


class StepUnscaling:
    """How `GradScaler` unscales the gradients of one step.

    Where all means are finite, it finds stand-ins in place of the gradients of a group that are
    under way: ones. What it multiplies them with is what each gradient is multiplied with when it
    arrives, by the same operation.
    """

    def __init__(self, devices: Iterable[torch.device], indices: Set[int]) -> None:
        """Make the stand-ins.

        Args:
            devices: of the gradients.
            indices: numbers of the parameters whose means are unscaled.
        """
        self.indices = indices
        self._factors = {
            device: torch.ones((), dtype=torch.float32, device=device)
            for device in dict.fromkeys(devices)
        }

    @property
    def count(self) -> int:
        """Number of parameters whose means are unscaled."""
        return len(self.indices)

    def stand_ins(self) -> list[Tensor]:
        """Return tensors whose `.grad` is to be checked and unscaled."""
        found = []
        for factor in self._factors.values():
            stand_in = torch.empty_like(factor)
            stand_in.grad = factor
            found.append(stand_in)
        return found

    @property
    def factor(self) -> float:
        """Factor on all gradients, once `GradScaler` has applied it to the stand-ins."""
        return next(iter(self._factors.values())).item()

    def scale(self, gradients: Iterable[Tensor]) -> None:
        """Unscale gradients in place, once each."""
        alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for gradient in gradients:
            alike.setdefault((gradient.device, gradient.dtype), []).append(gradient)
        with torch.no_grad(), torch.inference_mode(False):
            for (device, _), some in alike.items():
                factor = self._factors[device]
                foreach_unscale(some, torch.zeros_like(factor), factor)
