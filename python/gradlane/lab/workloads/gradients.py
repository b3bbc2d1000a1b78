"""Gradients of replayed models: cheap to write, different for each rank, step and element.

An element's value is a function of (seed, tensor, rank, step, element) alone: one multiplication
of a shared random pattern, shifted and scaled by a hash of the rest. NumPy computes the same bits
without torch, so that what a network delivered can be checked against it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]

PATTERN_ELEMENTS = 262_139
"""Length of the pattern: a prime, so that no whole number of slices is a period of it, and small
enough (1 MB) to stay in a core's cache while gradients are written."""

_MASK = (1 << 64) - 1


def _mixed(value: int) -> int:
    """Return one output of the splitmix64 generator (Steele, Lea and Flood 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def hash_of(*words: int) -> int:
    """Hash integers to 64 bits; any change of any word changes the whole result."""
    state = 0
    for word in words:
        state = _mixed(state ^ _mixed(word & _MASK))
    return state


class GradientPattern:
    """The shared pattern of one seed, and the gradients that are made of it."""

    def __init__(self, seed: int) -> None:
        """Draw the pattern: standard normal, float32, the same on every machine."""
        self.seed = seed
        generator = np.random.Generator(np.random.PCG64(seed))
        self.values: Float32Array = generator.standard_normal(PATTERN_ELEMENTS, dtype=np.float32)

    def shift_and_scale(self, tensor_index: int, rank: int, step: int) -> tuple[int, np.float32]:
        """Return where in the pattern a gradient starts, and its factor in [0.5, 1.5)."""
        bits = hash_of(self.seed, tensor_index, rank, step)
        shift = (bits & 0xFFFFFFFF) % PATTERN_ELEMENTS
        # 23 bits are exact in float32, so that torch and NumPy get the same factor.
        scale = np.float32(0.5) + np.float32(bits >> 41) * np.float32(2.0**-23)
        return shift, np.float32(scale)

    def gradient(
        self,
        tensor_index: int,
        rank: int,
        step: int,
        numel: int,
        elements: npt.NDArray[np.int64] | None = None,
    ) -> Float32Array:
        """Compute the gradient of one tensor on one rank.

        Args:
            tensor_index: number of the tensor in `named_parameters()` order.
            rank: the rank whose gradient it is.
            step: number of the step.
            numel: number of elements of the tensor.
            elements: flat indices of the elements that are wanted; None for all.

        Returns:
            float32, one value for each wanted element.
        """
        shift, scale = self.shift_and_scale(tensor_index, rank, step)
        indices = np.arange(numel, dtype=np.int64) if elements is None else elements
        return np.multiply(self.values[(indices + shift) % PATTERN_ELEMENTS], scale)

    def mean_gradient(
        self,
        tensor_index: int,
        step: int,
        world_size: int,
        numel: int,
        elements: npt.NDArray[np.int64] | None = None,
    ) -> Float32Array:
        """Compute the mean over all ranks, summed in rank order: ((g0 + g1) + g2 ...) / N.

        Arguments and result are those of `gradient`, for ranks 0 to `world_size` - 1. Every
        operation rounds to float32, as the engine's reduction does.
        """
        total = self.gradient(tensor_index, 0, step, numel, elements)
        for rank in range(1, world_size):
            total = np.add(total, self.gradient(tensor_index, rank, step, numel, elements))
        mean: Float32Array = np.divide(total, np.float32(world_size))
        return mean
