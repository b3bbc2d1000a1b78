"""Costs of what was counted in runs, by least squares; none is below zero."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def non_negative(counts: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Return what one of each thing costs, by least squares; costs below zero are held at zero.

    Args:
        counts: how many of each thing every run had.
        seconds: how long each run took.
    """
    rows = np.array(counts, dtype=np.float64)
    scale = np.abs(rows).max(axis=0)
    used = list(range(rows.shape[1]))
    while True:
        found, *_ = np.linalg.lstsq(rows[:, used] / scale[used], np.array(seconds), rcond=None)
        if not used or found.min() >= 0.0:
            break
        del used[int(found.argmin())]
    solution = [0.0] * rows.shape[1]
    for index, value in zip(used, found, strict=True):
        solution[index] = float(value / scale[index])
    return solution
