"""What a model's updates have used since some step, for a rank that joins.

An update is repeated elsewhere, with the same bits, from each gradient as the optimizer has used it
(averaged, clipped, changed by the program) and from the hyper-parameters of that step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_LOOK_EVERY_S = 0.1


@dataclass(frozen=True)
class LoggedStep:
    """What the update of one step has used.

    Attributes:
        groups: the optimizer's groups without their parameters.
        gradients: on the CPU, by tensor number, laid out like the parameters.
    """

    groups: list[dict[str, Any]]
    gradients: dict[int, Tensor]


class UpdateLog:
    """Keeps copies of what updates use, until another thread takes them."""

    def __init__(self, indices: Collection[int], limit_bytes: int) -> None:
        """Begin between two steps.

        Args:
            indices: numbers of the tensors whose gradients are kept.
            limit_bytes: of gradients that nobody has taken; with more the log is full, and ends.
        """
        self.is_full = False
        """Whether a step is missing because it was too much."""
        self._indices = frozenset(indices)
        self._left_bytes = limit_bytes
        self._groups: list[dict[str, Any]] | None = None
        """Of the update that is under way; None: none is."""
        self._gradients: dict[int, Tensor] = {}
        self._steps: list[LoggedStep] = []
        self._is_closed = False
        self._changed = threading.Condition()

    def begin(self, groups: list[dict[str, Any]]) -> None:
        """Note the hyper-parameters of the next update."""
        self._groups = groups

    def note_gradient(self, index: int, gradient: Tensor) -> None:
        """Note a gradient that the update is about to use."""
        if index in self._indices and not self._is_closed:
            try:
                with torch.inference_mode(False), torch.no_grad():
                    self._gradients[index] = gradient.detach().to("cpu", copy=True)
            except (RuntimeError, MemoryError):
                # No memory is left for a copy: the update itself needs none.
                with self._changed:
                    self._is_closed = self.is_full = True

    def end(self) -> None:
        """Note that the update is done, with all gradients that it uses."""
        if self._groups is None:
            return
        step = LoggedStep(self._groups, self._gradients)
        self._groups, self._gradients = None, {}
        with self._changed:
            if not self._is_closed:
                self._left_bytes -= _nbytes(step)
                self._is_closed = self.is_full = self._left_bytes < 0
                self._steps.append(step)
            self._changed.notify()

    def close(self) -> None:
        """Keep nothing more; what is there can still be taken."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def drop(self) -> None:
        """Keep nothing more, and forget what is there: nobody is left to take it."""
        with self._changed:
            self._is_closed = True
            self._steps = []

    def wait_for_steps(self, look: Callable[[], object]) -> tuple[list[LoggedStep], bool]:
        """Wait for an update that is done, or the end; return all that are there.

        Args:
            look: called while waiting; raises where waiting is in vain.

        Returns:
            The updates, the first one first, and whether they are the last.
        """
        with self._changed:
            while not (self._steps or self._is_closed):
                look()
                self._changed.wait(_LOOK_EVERY_S)
            steps, self._steps = self._steps, []
            self._left_bytes += sum(map(_nbytes, steps))
            return steps, self._is_closed


def _nbytes(step: LoggedStep) -> int:
    return sum(gradient.nbytes for gradient in step.gradients.values())
