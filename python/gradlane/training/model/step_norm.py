"""The norm of all means of a step, before they are here: what clipping and `GradScaler` ask for.

Owners of slices add up the squares of what they reduce. Means of factors and rows have no owner:
each rank makes them when their blocks are here, and adds their squares.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterable, Sequence

from torch import Tensor

from gradlane.training.core import Channel, CoreModule
from gradlane.training.model.exact_norm import add_squares, exact_norm
from gradlane.training.model.failure_latch import FailureLatch
from gradlane.training.rendezvous.wait_notifier import WAIT_NOTIFIER

WaitContext = Callable[[int, list[int] | None], contextlib.AbstractContextManager[None]]
"""A context around a wait for a step's tensors, or for the step."""


class StepNorm:
    """Measures the steps for which all ranks ask for it."""

    def __init__(
        self,
        core: CoreModule,
        channel: Channel,
        means: int,
        blocks: Collection[int],
        rebuild: Callable[[int], Tensor | None],
        failure: FailureLatch,
        waiting: WaitContext,
    ) -> None:
        """Measure nothing yet.

        Args:
            core: adds up squares.
            channel: the channel.
            means: number of leading tensors of the channel among which all means are.
            blocks: trained parameters that travel as factors or rows.
            rebuild: makes the mean of one of those, once its blocks are here.
            failure: the model's.
            waiting: a context around every wait for a step's tensors, or for the step.
        """
        self._core = core
        self._channel = channel
        self._means = means
        self._blocks = blocks
        self._rebuild = rebuild
        self._failure = failure
        self._waiting = waiting
        self._step = self._training_step = 0
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

    def begin(self, step: int, training_step: int, *, wanted: bool) -> None:
        """Begin a step.

        Args:
            step: number of the channel's.
            training_step: number of the step of training.
            wanted: whether all ranks ask for its norm.
        """
        self._step, self._training_step = step, training_step
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

    def take_mean(self, index: int) -> Tensor | None:
        """Return the mean of blocks that are here, once, or None if no rank has any."""
        self.add_blocks([index])
        return self._rebuilt.pop(index)

    def wait(self) -> float:
        """Wait for the norm of all averaged gradients of a step; means may be still to come."""
        doing = f"waiting for the norm of all gradients in step {self._training_step}"
        blocks, squares = list(self._blocks), self._squares if self._blocks else None
        with self._failure.translating(self._core, doing), WAIT_NOTIFIER:
            if blocks:
                with self._waiting(self._step, blocks):
                    self._channel.wait(blocks, self._step)
                self.add_blocks(blocks)
            with self._waiting(self._step, None):
                return self._channel.wait_norm(self._step, squares)

    def of(self, gradients: Sequence[Tensor]) -> float:
        """Return the norm of gradients that are here: the same bits as `wait`."""
        return exact_norm(self._core, gradients)
