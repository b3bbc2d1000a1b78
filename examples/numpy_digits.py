"""NumPy alone, no other framework: `torchrun --nproc-per-node=2 examples/numpy_digits.py`.

A network with one hidden layer learns scikit-learn's digits; gradients are computed by hand. Each
is pushed as soon as backward has it, the last layer's first, and waited for where it is applied,
the first layer's first. `--alone N` does the work of N ranks in one process, to compare with.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

import gradlane
from digits import batches, report, run

Arrays = dict[str, np.ndarray[Any, np.dtype[np.float32]]]
HIDDEN, RATE = 48, np.float32(0.5)


def starting_values() -> Arrays:
    """Return the parameters in the order of the forward pass."""
    draw = np.random.default_rng(0)
    return {
        "hidden.weight": (draw.normal(size=(64, HIDDEN)) * 0.2).astype(np.float32),
        "hidden.bias": np.zeros(HIDDEN, np.float32),
        "head.weight": (draw.normal(size=(HIDDEN, 10)) * 0.2).astype(np.float32),
        "head.bias": np.zeros(10, np.float32),
    }


def gradients(parameters: Arrays, points: Any, labels: Any) -> Iterator[tuple[str, Any]]:
    """Yield the gradients of the mean cross entropy as backward reaches them."""
    hidden = np.tanh(points @ parameters["hidden.weight"] + parameters["hidden.bias"])
    scores = hidden @ parameters["head.weight"] + parameters["head.bias"]
    slope = np.exp(scores - scores.max(1, keepdims=True))
    slope /= slope.sum(1, keepdims=True)
    slope[np.arange(len(labels)), labels] -= 1
    slope /= np.float32(len(labels))
    yield "head.bias", slope.sum(0)
    yield "head.weight", hidden.T @ slope
    slope = (slope @ parameters["head.weight"].T) * (1 - hidden * hidden)
    yield "hidden.bias", slope.sum(0)
    yield "hidden.weight", points.T @ slope


def train(session: gradlane.Session) -> Arrays:
    """Train on this rank's part of the data."""
    parameters = starting_values()
    for name, value in parameters.items():
        session.arrays.register(name, value.shape, value.dtype)
    session.arrays.spread(parameters)
    for step in batches(session.world_size):
        for name, gradient in gradients(parameters, *step[session.rank]):
            session.arrays.push(name, gradient)
        for name, value in parameters.items():
            value -= RATE * session.arrays.wait(name)
    return parameters


def train_alone(world_size: int) -> Arrays:
    """Do the work of all ranks in this process."""
    parameters = starting_values()
    for step in batches(world_size):
        total: Arrays = {}
        for points, labels in step:
            for name, gradient in gradients(parameters, points, labels):
                total[name] = total[name] + gradient if name in total else gradient
        for name, value in parameters.items():
            value -= RATE * (total[name] / np.float32(world_size))
    return parameters


def scores(parameters: Arrays, points: Any) -> Any:
    """Return a score for each digit."""
    hidden = np.tanh(points @ parameters["hidden.weight"] + parameters["hidden.bias"])
    return hidden @ parameters["head.weight"] + parameters["head.bias"]


def main() -> None:
    """Train and report."""
    parameters = run(train, train_alone)
    report(parameters.values(), lambda points: scores(parameters, points))


if __name__ == "__main__":
    main()
