"""Images that are drawn from a known mixture, so that the best possible accuracy is known, too.

Each of ten classes has three patterns of 8x8 pixels; an image is one of them with normal noise on
every pixel. No rule is right more often than the class with the largest probability, computed from
the patterns; a network that learns from finitely many images is right less often. Draws follow from
seeds alone, so the data are the same everywhere.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

CLASSES = 10
PATTERNS = 3
"""Of each class."""
PIXELS = 64
PATTERN_NORM = 4.0
"""Length of a pattern, in standard deviations of a pixel's noise."""
TRAINING_IMAGES = 12_000
HELD_OUT_IMAGES = 8_000
"""One of them is 0.0125 points of accuracy."""
_PATTERN_SEED, _TRAINING_SEED, _HELD_OUT_SEED = 11, 12, 13

Images = tuple[torch.Tensor, torch.Tensor]
"""Images (samples, 1, 8, 8), and their classes (int64)."""


def _patterns() -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """Return the patterns of all classes, one after another: (30, 64)."""
    drawn = np.random.default_rng(_PATTERN_SEED).standard_normal((CLASSES * PATTERNS, PIXELS))
    lengths: np.ndarray[tuple[int, int], np.dtype[np.float64]]
    lengths = np.linalg.norm(drawn, axis=1, keepdims=True)
    patterns: np.ndarray[tuple[int, int], np.dtype[np.float64]] = PATTERN_NORM * drawn / lengths
    return patterns


@lru_cache(maxsize=2)
def images(seed: int, count: int) -> Images:
    """Return as many images, drawn by a seed."""
    generator = np.random.default_rng(seed)
    chosen = generator.integers(CLASSES * PATTERNS, size=count)
    pixels = _patterns()[chosen] + generator.standard_normal((count, PIXELS))
    values = torch.from_numpy(pixels.astype(np.float32)).reshape(-1, 1, 8, 8)
    return values, torch.from_numpy((chosen // PATTERNS).astype(np.int64))


def held_out() -> Images:
    """Return the images that nobody trains on."""
    return images(_HELD_OUT_SEED, HELD_OUT_IMAGES)


def batch(size: int, seed: int, worker: int, workers: int, step: int) -> Images:
    """Return a worker's images of a step: each image once in an epoch, in an order of its own."""
    values, classes = images(_TRAINING_SEED, TRAINING_IMAGES)
    epoch, position = divmod(step, TRAINING_IMAGES // (size * workers))
    start = (position * workers + worker) * size
    order = np.random.default_rng((seed, epoch)).permutation(TRAINING_IMAGES)
    chosen = torch.from_numpy(order[start : start + size])
    return values[chosen], classes[chosen]


def best_accuracy() -> float:
    """Return the accuracy on the held-out images of the class with the largest probability."""
    values, classes = held_out()
    pixels = values.flatten(1).double().numpy()
    patterns = _patterns()
    # All patterns are as long, so the densities differ by the inner products alone.
    scores = (pixels @ patterns.T).reshape(len(pixels), CLASSES, PATTERNS)
    likelihood = np.logaddexp.reduce(scores, axis=2)
    return float((likelihood.argmax(axis=1) == classes.numpy()).mean())
