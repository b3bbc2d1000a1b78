"""What is called at the end of each training step of a model."""

from __future__ import annotations

from collections.abc import Callable


class StepListeners:
    """Calls functions once a training step has ended for all optimizers of a model."""

    def __init__(self) -> None:
        """Call nothing yet."""
        self._listeners: list[Callable[[], None]] = []

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Call a function after each training step, behind those that subscribed before.

        Args:
            listener: may remove all hooks.
        """
        self._listeners.append(listener)

    def step_ended(self) -> None:
        """Call the listeners; a training step has ended."""
        for listener in tuple(self._listeners):
            listener()
