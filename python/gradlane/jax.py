"""JAX: the mean of a pytree of gradients over all ranks.

::

    session = gradlane.init()
    order = gradlane.jax.forward_order(loss, params, *batch)
    mean = gradlane.jax.MeanOverRanks(session, params, order=order)
    params = mean.spread(params)                   # rank 0's values everywhere
    for batch in loader:
        params = update(params, mean(gradient(params, *batch)))

JAX arrays never change, and a buffer may be given away (`donate_argnums`) as soon as a call
returns. So nothing of JAX's memory is lent: each leaf is copied once into memory of the session's
own, where its mean lands, and the result is a new array with memory of its own again. The arrays
that come and go may be donated freely. See `docs/frameworks.md`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from gradlane.errors import ArrayRefusedError, RefusedError, UsageError

if TYPE_CHECKING:
    from gradlane.training.arrays.memory import HostArray
    from gradlane.training.session.session import Session

__all__ = ["MeanOverRanks", "forward_order"]


def forward_order(function: Callable[..., Any], params: Any, *arguments: Any) -> list[int]:
    """Return in which order a function first uses the leaves of its parameters.

    The function is traced with abstract values, never run. The order of a pytree says little of
    the order of layers: dictionaries are sorted by key, `layer10` before `layer2`.

    Args:
        function: the loss, or the model: called as `function(params, *arguments)`.
        params: a pytree of arrays, or of their shapes.
        arguments: the rest of its arguments.

    Returns:
        Numbers of leaves, as `jax.tree.leaves` has them, the first used first; unused ones last.
    """
    traced = jax.make_jaxpr(function)(params, *arguments)
    leaves: int = len(jax.tree.leaves(params))
    watched = {id(variable): number for number, variable in enumerate(traced.jaxpr.invars[:leaves])}
    used: dict[int, None] = {}
    _note_uses(traced.jaxpr, watched, used)
    return [*used, *(number for number in range(leaves) if number not in used)]


class MeanOverRanks:
    """Averages gradients of one pytree of parameters over all ranks, outside of `jax.jit`."""

    def __init__(
        self,
        session: Session,
        params: Any,
        *,
        order: Sequence[int] | None = None,
        prefix: str = "",
    ) -> None:
        """Register every leaf; on all ranks alike.

        Args:
            session: an open session.
            params: the parameters, or anything with their structure, shapes and dtypes.
            order: numbers of the leaves in the order in which the forward pass needs them, as
                `forward_order` returns them; None: the order of the pytree.
            prefix: before each leaf's name, where a session averages several pytrees.

        Raises:
            ArrayRefusedError: a leaf has no elements, or a dtype that cannot be averaged.
            ValueError: the order is none of these leaves.
            GradlaneError: the session has failed or is closed.
        """
        found, self._structure = jax.tree_util.tree_flatten_with_path(params)
        self._names = [
            f"{prefix}{jax.tree_util.keystr(path, simple=True, separator='.')}" for path, _ in found
        ]
        self._session = session
        self._order = list(range(len(found)) if order is None else order)
        if sorted(self._order) != list(range(len(found))):
            raise RefusedError(
                f"order is {list(self._order)}: give each of the {len(found)} leaves' numbers once"
            )
        self._memory: list[HostArray] = []
        self._shardings: list[Any] = [None] * len(found)
        for position, number in enumerate(self._order):
            _, leaf = found[number]
            session.arrays.register(self._names[number], leaf.shape, leaf.dtype, position)
        for _, leaf in found:
            self._memory.append(np.empty(leaf.shape, leaf.dtype))

    def spread(self, params: Any) -> Any:
        """Return rank 0's values on every rank, before the first gradients; a collective call.

        Raises:
            ArrayRefusedError: the leaves are not those that were registered.
            GradlaneError: the session has failed or is closed, or the ranks differ.
        """
        for number, leaf in enumerate(self._leaves(params)):
            self._copy_in(number, leaf)
        self._session.arrays.spread(dict(zip(self._names, self._memory, strict=True)))
        means = [self._copied_out(number) for number in range(len(self._names))]
        return jax.tree.unflatten(self._structure, means)

    def __call__(self, gradients: Any) -> Any:
        """Return the mean of all ranks' gradients: `push` and `wait` in one.

        Args:
            gradients: of the structure, shapes and dtypes of the parameters.

        Raises:
            UsageError: inside of `jax.jit` or another transformation.
            ArrayRefusedError: a leaf is not as it was registered.
            GradlaneError: the session has failed or is closed.
        """
        self.push(gradients)
        return self.wait()

    def push(self, gradients: Any) -> None:
        """Hand gradients over leaf by leaf, those of the last layer first.

        Dispatch in JAX is asynchronous: this waits for one leaf after the other to be computed, so
        that the first ones travel while later ones are still being computed, if they come of
        several jitted calls; all results of one call are there together.

        Args:
            gradients: of the structure, shapes and dtypes of the parameters. None of its memory is
                used after the call: it may be donated.

        Raises:
            UsageError: inside of `jax.jit` or another transformation.
            ArrayRefusedError: a leaf is not as it was registered.
            GradlaneError: the session has failed or is closed.
        """
        leaves = self._leaves(gradients)
        for number in reversed(self._order):
            self._copy_in(number, leaves[number])
            self._session.arrays.push(self._names[number], self._memory[number])

    def wait(self) -> Any:
        """Wait for the means of what was pushed; returns them in the structure of the parameters.

        Raises:
            UsageError: nothing was pushed.
            GradlaneError: the session has failed or is closed.
        """
        means: list[Any] = [None] * len(self._names)
        for number, mean in self.arriving():
            means[number] = mean
        return jax.tree.unflatten(self._structure, means)

    def arriving(self) -> Iterator[tuple[int, Any]]:
        """Go through the means in the order of the forward pass, as they arrive.

        The updates of the first layers can run while the rest is on its way.

        Yields:
            The number of a leaf, and its mean.

        Raises:
            UsageError: nothing was pushed.
            GradlaneError: the session has failed or is closed.
        """
        for number in self._order:
            self._session.arrays.wait(self._names[number])
            yield number, self._copied_out(number)

    def _leaves(self, tree: Any) -> list[Any]:
        leaves: list[Any]
        leaves, structure = jax.tree.flatten(tree)
        if structure != self._structure:
            raise ArrayRefusedError(
                f"a pytree of structure {structure} was given, and {self._structure} registered",
                "type",
            )
        for name, leaf in zip(self._names, leaves, strict=True):
            if isinstance(leaf, jax.core.Tracer):
                raise UsageError(
                    f"leaf {name} is a tracer: gradients are averaged outside of jax.jit, grad, "
                    "vmap and scan. Jit the gradient and the update apart, and average in between"
                )
            if not isinstance(leaf, jax.Array):
                continue
            if leaf.is_deleted():
                raise UsageError(
                    f"leaf {name} was donated to a jitted call (donate_argnums) and is gone: "
                    "average it before that call"
                )
            if not leaf.is_fully_addressable:
                raise ArrayRefusedError(
                    f"leaf {name} is spread over the devices of several processes, and this one "
                    "sees a part of it: average arrays that are whole in each process",
                    "device",
                )
        return leaves

    def _copy_in(self, number: int, leaf: Any) -> None:
        """Copy a leaf, once it is computed, into the session's memory."""
        memory = self._memory[number]
        if leaf.shape != memory.shape or leaf.dtype != memory.dtype:
            raise ArrayRefusedError(
                f"leaf {self._names[number]} is {leaf.dtype} of shape {leaf.shape}, and was "
                f"registered as {memory.dtype} of shape {memory.shape}",
                "dtype" if leaf.shape == memory.shape else "shape",
            )
        self._shardings[number] = getattr(leaf, "sharding", None)
        np.copyto(memory, np.asarray(leaf))

    def _copied_out(self, number: int) -> Any:
        """Return a mean as an array of JAX's, where the leaf was.

        JAX may keep the memory that it is given instead of copying it, and read it whenever it
        likes: so it gets memory that nobody writes to again.
        """
        return jax.device_put(self._memory[number].copy(), self._shardings[number])


def _note_uses(jaxpr: Any, watched: dict[int, int], used: dict[int, None]) -> None:
    """Note which watched variables equations use, in order; looks into those that are calls."""
    for equation in jaxpr.eqns:
        inputs = [watched.get(id(variable)) for variable in equation.invars]
        for inner in _inner(equation):
            # Calls such as jit and scan hand their inputs on one by one; some have more before.
            offset = len(equation.invars) - len(inner.invars)
            if offset >= 0:
                handed = zip(inner.invars, inputs[offset:], strict=True)
                names = {id(mine): number for mine, number in handed if number is not None}
                _note_uses(inner, names, used)
        for number in inputs:
            if number is not None:
                used.setdefault(number)


def _inner(equation: Any) -> list[Any]:
    """Return the jaxprs that an equation calls."""
    found = []
    for value in equation.params.values():
        for one in value if isinstance(value, (tuple, list)) else (value,):
            inner = getattr(one, "jaxpr", one)
            if hasattr(inner, "eqns"):
                found.append(inner)
    return found
