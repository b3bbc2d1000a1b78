"""Deep gradient compression by its paper (Lin et al. 2018), in plain NumPy: the oracle of tests.

Local gradient accumulation, momentum correction and momentum factor masking are those of algorithm
4; local gradient clipping is of section 3.2, the warm-up of sparsity of section 3.3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]

SPARSITIES = (0.75, 0.9375, 0.984375, 0.996)
"""Of the warm-up."""


class DgcOracle:
    """What all ranks keep of all layers, and what they send."""

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        ranks: int,
        ratio: float,
        momentum: float,
        clip: float,
        warmup: int,
    ) -> None:
        """Start before the first step; a layer of one value is sent as it is."""
        self.ranks, self.ratio, self.momentum = ranks, ratio, momentum
        self.clip, self.warmup = clip, warmup
        self.u = [[np.zeros(size, np.float32) for size in sizes] for _ in range(ranks)]
        self.v = [[np.zeros(size, np.float32) for size in sizes] for _ in range(ranks)]
        self.counts: list[int] = []
        """Values that a rank sent of its first layer, by step."""

    def share(self, step: int) -> float:
        """Return the share of a layer that is sent in a step."""
        if step >= self.warmup:
            return self.ratio
        return max(1.0 - SPARSITIES[4 * step // self.warmup], self.ratio)

    def _clipped(self, gradients: Sequence[Array]) -> list[Array]:
        norm = math.sqrt(sum(float(np.square(one.astype(np.float64)).sum()) for one in gradients))
        limit = self.clip / math.sqrt(self.ranks)
        return [one * np.float32(min(1.0, limit / norm)) for one in gradients]

    def step(
        self, step: int, gradients: Sequence[Sequence[Array]], decays: Sequence[Array | float]
    ) -> list[Array]:
        """Return the mean over ranks of what they send, for each layer.

        Args:
            step: its number.
            gradients: of each rank, of each layer, flat.
            decays: weight decay times weights of each layer, which SGD would add to gradients that
                are clipped, before momentum.
        """
        sums = [np.zeros_like(one) for one in gradients[0]]
        for rank, own in enumerate(gradients):
            for layer, gradient in enumerate(self._clipped(own)):
                if gradient.size == 1:
                    sums[layer] += gradient
                    continue
                u, v = self.u[rank][layer], self.v[rank][layer]
                u[:] = np.float32(self.momentum) * u + (gradient + decays[layer])
                v += u
                count = math.ceil(round(self.share(step) * v.size, 9))
                mask = np.argsort(-np.abs(v), kind="stable")[:count]
                sums[layer][mask] += v[mask]
                u[mask] = v[mask] = 0.0
                if (rank, layer) == (0, 0):
                    self.counts.append(count)
        return [one / np.float32(self.ranks) for one in sums]
