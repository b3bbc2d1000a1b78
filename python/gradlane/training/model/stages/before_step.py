"""Something of the session that happens between two steps."""

from __future__ import annotations

from collections.abc import Callable

from gradlane.training.model.stages.stage import StepStage


class BeforeStep(StepStage):
    """Calls a function before each step, while all is settled."""

    def __init__(self, name: str, reason: str, call: Callable[[int], None]) -> None:
        """Name the stage.

        Args:
            name: as `session.explain()` shows it.
            reason: which option or call it is in force for.
            call: given the number of the step that is about to begin.
        """
        super().__init__(name, reason)
        self._call = call

    def before_step(self, step: int) -> None:
        """Call the function."""
        self._call(step)
