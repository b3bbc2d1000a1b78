"""JAX: `torchrun --nproc-per-node=2 examples/jax_digits.py`.

A network with two hidden layers learns scikit-learn's digits. The gradient and the update are
jitted apart, and the mean over all ranks is taken in between; the update gives its arguments away
(`donate_argnums`), as one does to save memory. An optimizer of optax goes where `update` is.
`--alone N` does the work of N ranks in one process, to compare with.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

import gradlane
import gradlane.jax
from digits import batches, report, run

RATE, MOMENTUM = 0.1, 0.9


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


def main() -> None:
    """Train and report."""
    params = run(train, train_alone)
    report(jax.tree.leaves(params), lambda points: scores(params, jnp.asarray(points)))


if __name__ == "__main__":
    main()
