"""Clocks that tests wind: what comes when is then exact, whatever the machine does."""

from __future__ import annotations

from collections.abc import Sequence

from gradlane.planning.profiler.tape import Clock, Mark


class CountingClock(Clock):
    """Every look at it moves it on by a second."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self.now = self._look

    def _look(self) -> float:
        self._now_s += 1.0
        return self._now_s

    def pass_time(self, seconds: float) -> None:
        """Move the clock on."""
        self._now_s += seconds

    def seconds(self, marks: Sequence[Mark]) -> list[tuple[int, float]]:
        return list(marks)
