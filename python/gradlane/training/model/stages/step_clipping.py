"""How gradients are clipped that are still to arrive.

The factor is that of `torch.nn.utils.clip_grad_norm_`: `max_norm / (norm + 1e-6)`, at most 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gradlane.training.model.lazy_norm import LazyNorm

_EPSILON = 1e-6


class StepClipping:
    """How the gradients of one step are clipped."""

    def __init__(
        self,
        max_norm: float,
        dtype: torch.dtype,
        wait: Callable[[], float],
        told: Callable[[float], None],
    ) -> None:
        """Clip to a norm.

        Args:
            max_norm: the largest norm that gradients keep.
            dtype: of the norm, in which the factor is computed.
            wait: returns the norm of all gradients, once it is known.
            told: given the factor, once it is known.
        """
        self._told = told
        self._max_norm = max_norm
        self.norm = LazyNorm.of(dtype, wait)
        self._factor: Tensor | None = None

    def factor(self) -> Tensor:
        """Wait for the norm; return what gradients are multiplied with."""
        if self._factor is None:
            self._factor = torch.clamp(self._max_norm / (self.norm + _EPSILON), max=1.0)
            self._told(self._factor.item())
        return self._factor

    def scale(self, gradients: Sequence[Tensor]) -> None:
        """Clip gradients in place, once each; waits for the norm."""
        factor = self.factor() if gradients else None
        if factor is not None and factor.item() != 1.0:
            with torch.no_grad(), torch.inference_mode(False):
                for gradient in gradients:
                    gradient.mul_(factor.to(gradient.device))

    def check_finite(self) -> None:
        """Wait for the norm.

        Raises:
            RuntimeError: it is infinite or not a number, as torch says it.
        """
        if not torch.isfinite(self.norm):
            raise RuntimeError(
                f"the norm of all averaged gradients is {self.norm.item()}, so they cannot be "
                "clipped; pass error_if_nonfinite=False to scale them by it all the same"
            )
