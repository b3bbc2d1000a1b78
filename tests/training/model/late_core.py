"""A double of the core where a result arrives no earlier than somebody waits for it.

So a read that does not wait sees the value of the step before, every time: the tests that look for
early reads need no timers and no luck. For worlds of one rank.
"""

from __future__ import annotations

import json
from typing import Any

from tests.training.model.fake_core import FakeChannel, FakeCore, World


class LateChannel(FakeChannel):
    """One rank's end, for which every tensor is late."""

    def step_begin(self, step: int) -> None:
        """Begin a step whose results are all held back."""
        super().step_begin(step)
        self.world.held = set(self.world.members(step))

    def wait(self, tensors: list[int], step: int) -> None:
        """Let these tensors arrive, now that they are waited for."""
        self.world.release(*tensors)
        super().wait(tensors, step)

    def wait_step(self, step: int) -> None:
        """Let everything arrive."""
        self.world.release(*self.world.members(step))
        super().wait_step(step)


class LateCore(FakeCore):
    """Stands in for `gradlane._core`; its channels are late."""

    def Channel(  # noqa: N802
        self, listener: Any, options_json: str, plan_json: str, peers: list[str], secret: bytes
    ) -> FakeChannel:
        """Connect the only rank."""
        options = json.loads(options_json)
        assert options["world_size"] == 1, "a late world has one rank"
        world = self.worlds.setdefault(options["job"], World(json.loads(plan_json)))
        return LateChannel(world, options["rank"], self.timeout_s)
