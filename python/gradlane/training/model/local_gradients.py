"""Gradients that only accumulate on this rank, as inside `session.no_sync()`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from gradlane.errors import UsageError
from gradlane.training.modules.gradient_intake import raw_grad
from gradlane.training.rendezvous.tensor_table import TensorEntry
from gradlane.training.torch_internals import version_of


class LocalGradients:
    """Finds gradients that the program changed before they were averaged."""

    def __init__(self, trained: Sequence[TensorEntry]) -> None:
        """Start with nothing accumulated; `trained` are table entries by tensor number."""
        self._trained = trained
        self._accumulated: dict[int, tuple[int, int]] = {}

    def keep(self, index: int, gradient: Tensor) -> None:
        """Keep a gradient as backward leaves it."""
        self._accumulated[index] = (id(gradient), version_of(gradient))

    def clear(self) -> None:
        """Forget all gradients."""
        self._accumulated.clear()

    def forget(self, indices: Iterable[int]) -> None:
        """Forget the gradients of some parameters, which the program resets."""
        for index in indices:
            self._accumulated.pop(index, None)

    def check(self, step: int) -> None:
        """Check that each gradient is as backward left it: no rule covers changes by one rank.

        Args:
            step: the step that is about to average them.

        Raises:
            UsageError: a gradient was replaced or changed in place.
        """
        gradients = {
            index: gradient
            for index in self._accumulated
            if (gradient := raw_grad(self._trained[index].tensor)) is not None
        }
        newest: dict[int, int] = {}
        for index, gradient in gradients.items():
            # Views of one memory, as cat() gives them, count their changes together.
            memory = _memory(gradient)
            newest[memory] = max(newest.get(memory, 0), self._accumulated[index][1])
        for index, gradient in gradients.items():
            memory = _memory(gradient)
            known, _ = self._accumulated[index]
            if id(gradient) != known or version_of(gradient) != newest[memory]:
                how = "changed in place" if id(gradient) == known else "replaced"
                raise UsageError(
                    f"the gradient of {self._trained[index].name!r} was {how} before it was "
                    f"averaged in step {step}: every backward() of the step was inside "
                    "session.no_sync(), so clipping and unscaling saw this rank's own gradients; "
                    "run the last backward() of a step outside of it"
                )


def _memory(gradient: Tensor) -> int:
    """Return a number that gradients have in common that are views of one memory."""
    if gradient.layout is not torch.strided:
        return id(gradient)
    return gradient.untyped_storage().data_ptr()
