"""The norm of all means of a step, before they are here: what clipping and `GradScaler` ask for.

Owners of slices add up the squares of what they reduce. Means of factors and rows have no owner:
each rank makes them when their blocks are here, and adds their squares.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable

from torch import Tensor

from gradlane.training.core import Channel, CoreModule
from gradlane.training.model.exact_norm import add_squares


class StepNorm:
    """Measures the steps for which all ranks ask for it."""

    def __init__(
        self,
        core: CoreModule,
        channel: Channel,
        means: int,
        blocks: Collection[int],
        rebuild: Callable[[int], Tensor | None],
    ) -> None:
        """Measure nothing yet.

        Args:
            core: adds up squares.
            channel: the channel.
            means: number of leading tensors of the channel among which all means are.
            blocks: trained parameters that travel as factors or rows.
            rebuild: makes the mean of one of those, once its blocks are here.
        """
        self._core = core
        self._channel = channel
        self._means = means
        self._blocks = blocks
        self._rebuild = rebuild
        self._may_measure = channel.has_measurable_squares(means)
        self.is_measured = False
        """Whether the norm of this step can be had before its means."""
        self._squares = core.SquareSum()
        """Of the means of blocks in this step."""
        self._unmeasured: set[int] = set()
        """Tensors of blocks whose squares are missing in it."""
        self._rebuilt: dict[int, Tensor | None] = {}
        """Means of the others, until they are taken."""
        self._lock = threading.Lock()

    def begin(self, step: int, *, wanted: bool) -> None:
        """Begin a step; `wanted`: all ranks ask for its norm."""
        self.is_measured = wanted and self._may_measure
        self._squares, self._rebuilt = self._core.SquareSum(), {}
        self._unmeasured = set(self._blocks) if self.is_measured else set()
        if self.is_measured:
            self._channel.measure_squares(self._means, step)

    def add_blocks(self, indices: Iterable[int]) -> None:
        """Make means of blocks that are here, and add up their squares, once each.

        At once: what is taken may be weighted or clipped in place by then.
        """
        with self._lock:
            for index in self._unmeasured.intersection(indices):
                self._unmeasured.discard(index)
                mean = self._rebuilt[index] = self._rebuild(index)
                if mean is not None:
                    add_squares(self._squares, mean)

    def take(self, index: int) -> Tensor | None:
        """Return the mean of blocks that are here, once, or None if no rank has any."""
        self.add_blocks([index])
        return self._rebuilt.pop(index)

    def wait(self, step: int) -> float:
        """Wait for the norm of a step, all of whose blocks are here."""
        return self._channel.wait_norm(step, self._squares if self._blocks else None)
