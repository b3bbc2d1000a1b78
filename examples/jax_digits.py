"""JAX: `torchrun --nproc-per-node=2 examples/jax_digits.py`.

A network with two hidden layers learns scikit-learn's digits. The gradient and the update are
jitted apart, and the mean over all ranks is taken in between; the update gives its arguments away
(`donate_argnums`), as one does to save memory. An optimizer of optax goes where `update` is.
`--alone N` does the work of N ranks in one process, to compare with.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits

import gradlane
import gradlane.jax

BATCH, EPOCHS, RATE, MOMENTUM = 64, 6, 0.1, 0.9


def starting_values(seed: int) -> Any:
    """Return the parameters; the layers' names sort in another order than the layers come in."""
    keys = jax.random.split(jax.random.key(seed), 3)
    sizes = {"stem": (64, 48), "body": (48, 32), "head": (32, 10)}
    return {
        name: {"weight": jax.random.normal(key, size) * 0.2, "bias": jnp.zeros(size[1])}
        for key, (name, size) in zip(keys, sizes.items(), strict=True)
    }


def scores(params: Any, points: jax.Array) -> jax.Array:
    """Return a score for each digit."""
    hidden = jnp.tanh(points @ params["stem"]["weight"] + params["stem"]["bias"])
    hidden = jnp.tanh(hidden @ params["body"]["weight"] + params["body"]["bias"])
    return hidden @ params["head"]["weight"] + params["head"]["bias"]


def loss(params: Any, points: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the mean cross entropy."""
    logarithms = jax.nn.log_softmax(scores(params, points))
    return -jnp.take_along_axis(logarithms, labels[:, None], 1).mean()


gradient = jax.jit(jax.grad(loss))


@functools.partial(jax.jit, donate_argnums=(0, 1, 2))
def update(params: Any, velocity: Any, gradients: Any) -> tuple[Any, Any]:
    """Return parameters and velocity after a step with momentum."""
    velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, velocity, gradients)
    return jax.tree.map(lambda p, v: p - RATE * v, params, velocity), velocity


def batches(world_size: int) -> Iterator[list[tuple[jax.Array, jax.Array]]]:
    """Yield each step's batches, one for each rank, of the first 1500 digits."""
    points, labels = load_digits(return_X_y=True)
    points = (points[:1500] / 16).astype(np.float32)
    for epoch in range(EPOCHS):
        order = np.random.default_rng(epoch).permutation(len(points))
        for first in range(0, len(order) - BATCH * world_size + 1, BATCH * world_size):
            chosen = order[first : first + BATCH * world_size].reshape(world_size, BATCH)
            yield [(jnp.asarray(points[one]), jnp.asarray(labels[one])) for one in chosen]


def train(session: gradlane.Session) -> Any:
    """Train on this rank's part of the data."""
    params = starting_values(seed=session.rank)
    some = next(batches(session.world_size))[session.rank]
    order = gradlane.jax.forward_order(loss, params, *some)
    mean = gradlane.jax.MeanOverRanks(session, params, order=order)
    params = mean.spread(params)
    velocity = jax.tree.map(jnp.zeros_like, params)
    for step in batches(session.world_size):
        gradients = mean(gradient(params, *step[session.rank]))
        params, velocity = update(params, velocity, gradients)
    return params


def train_alone(world_size: int) -> Any:
    """Do the work of all ranks in this process."""
    params = starting_values(seed=0)
    velocity = jax.tree.map(jnp.zeros_like, params)
    for step in batches(world_size):
        parts = [gradient(params, *one) for one in step]
        total = functools.reduce(lambda one, other: jax.tree.map(jnp.add, one, other), parts)
        gradients = jax.tree.map(lambda one: one / world_size, total)
        params, velocity = update(params, velocity, gradients)
    return params


def report(params: Any) -> None:
    """Print how many digits that were not trained on are read right, and a hash of the result."""
    points, labels = load_digits(return_X_y=True)
    found = scores(params, jnp.asarray((points[1500:] / 16).astype(np.float32))).argmax(1)
    right = float((np.asarray(found) == labels[1500:]).mean())
    leaves = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(params)]
    digest = hashlib.sha256(b"".join(leaves)).hexdigest()[:16]
    print(f"learned {digest} reads {right:.1%}\n", end="", flush=True)


def main() -> None:
    """Train and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--alone", type=int, metavar="N", help="do the work of N ranks here")
    alone = parser.parse_args().alone
    if alone is not None:
        report(train_alone(alone))
        return
    with gradlane.init() as session:
        report(train(session))


if __name__ == "__main__":
    main()
