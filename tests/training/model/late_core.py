"""The core where a result lands no earlier than somebody waits for it.

So a read that does not wait sees the value of the step before, every time: the tests that look for
early reads need no timers and no luck.
"""

from __future__ import annotations

from typing import Any

from tests.training.model.held_core import HeldChannel, HeldCore


class LateChannel(HeldChannel):
    """One rank's end, for which every tensor is late."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.awaited: set[int] = set()

    def holds(self, tensor: int) -> bool:
        return tensor not in self.awaited

    def step_begin(self, step: int) -> None:
        self.awaited.clear()
        self.channel.step_begin(step)

    def wait(self, tensors: list[int], step: int) -> None:
        self.awaited.update(tensors)
        super().wait(tensors, step)

    def wait_step(self, step: int) -> None:
        self.awaited.update(self.members)
        super().wait_step(step)


class LateCore(HeldCore):
    """Stands in for `gradlane._core`; its channels are late."""

    channel_type = LateChannel
