"""Local gradient clipping of the codec `dgc` (Lin et al. 2018, section 3.2).

A rank's gradient is clipped by the norm of all of it before the codec adds it to what it keeps, so
none leaves before the last is there. To clip means in its place would come too late: they hold what
was added up over many steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gradlane.training.model.stages.stage import StepStage


def clip_together(gradients: Sequence[Tensor], max_norm: float) -> None:
    """Scale gradients in place so that the 2-norm of all of them is within a limit.

    A norm that is no number scales nothing: the values tell all ranks what is wrong.

    Args:
        gradients: of one rank and step, of any shapes, dtypes and devices.
        max_norm: the limit, above 0.
    """
    norms = [torch.linalg.vector_norm(one.detach()).cpu().double() for one in gradients]
    norm = float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0
    if math.isfinite(norm) and norm > max_norm:
        with torch.no_grad(), torch.inference_mode(False):
            for gradient in gradients:
                gradient.mul_(max_norm / norm)


class LocalClipping(StepStage):
    """Clips the gradients of a step by the norm of all of them."""

    def __init__(self, max_norm: float) -> None:
        """Clip to a norm.

        Args:
            max_norm: largest 2-norm of all gradients of this rank together, above 0.
        """
        super().__init__("local clipping", f"codec dgc: to {max_norm:g} on each rank")
        self._max_norm = max_norm

    def before_send_all(self, gradients: Sequence[Tensor]) -> None:
        """Clip this rank's gradients in place."""
        clip_together(gradients, self._max_norm)
