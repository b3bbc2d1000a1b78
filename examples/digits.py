"""Shared parts of the examples without torch: scikit-learn's digits, and their command line."""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

import gradlane

BATCH, EPOCHS, TRAINED = 64, 6, 1500


def batches(world_size: int) -> Iterator[list[tuple[Any, Any]]]:
    """Yield each step's batches, one for each rank, of the first 1500 digits.

    A batch is points (64 of 64 pixels, f32 from 0 to 1) and labels (64 integers).
    """
    points, labels = load_digits(return_X_y=True)
    points = (points[:TRAINED] / 16).astype(np.float32)
    for epoch in range(EPOCHS):
        order = np.random.default_rng(epoch).permutation(len(points))
        for first in range(0, len(order) - BATCH * world_size + 1, BATCH * world_size):
            chosen = order[first : first + BATCH * world_size].reshape(world_size, BATCH)
            yield [(points[one], labels[one]) for one in chosen]


def report(arrays: Iterable[Any], scores: Callable[[Any], Any]) -> None:
    """Print how many digits that were not trained on are read right, and a hash of the result.

    Args:
        arrays: the parameters.
        scores: gives each digit's scores for points.
    """
    points, labels = load_digits(return_X_y=True)
    found = np.asarray(scores((points[TRAINED:] / 16).astype(np.float32))).argmax(1)
    right = float((found == labels[TRAINED:]).mean())
    state = hashlib.sha256(b"".join(np.asarray(array).tobytes() for array in arrays))
    print(f"learned {state.hexdigest()[:16]} reads {right:.1%}\n", end="", flush=True)


def run(train: Callable[[gradlane.Session], Any], train_alone: Callable[[int], Any]) -> Any:
    """Read the command line, and train as it says.

    Args:
        train: trains this rank's part in a session.
        train_alone: does the work of so many ranks in this process (`--alone N`).

    Returns:
        What the training returned.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--alone", type=int, metavar="N", help="do the work of N ranks here")
    alone = parser.parse_args().alone
    if alone is not None:
        return train_alone(alone)
    with gradlane.init() as session:
        return train(session)
