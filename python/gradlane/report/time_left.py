"""How long something with known parts still takes, learned from the parts that are over."""

from __future__ import annotations

import time
from collections.abc import Callable

_TRUSTED_SHARE = 0.02
"""Before this share is over, its pace says little, and the estimate is taken as it is."""


class TimeLeft:
    """Scales an estimate by how long its parts really took."""

    def __init__(self, estimate_s: float, now: Callable[[], float] = time.monotonic) -> None:
        """Start the clock.

        Args:
            estimate_s: what everything together is thought to take.
            now: a clock, in seconds.
        """
        self._estimate_s = estimate_s
        self._now = now
        self._start_s = now()
        self.done_s = 0.0
        """Estimated seconds of the parts that are over."""

    @property
    def left_s(self) -> float:
        """Seconds that the rest takes, at the pace so far."""
        rest_s = max(0.0, self._estimate_s - self.done_s)
        if self.done_s < _TRUSTED_SHARE * self._estimate_s or self.done_s <= 0.0:
            return rest_s
        return rest_s * (self._now() - self._start_s) / self.done_s


def format_duration(seconds: float) -> str:
    """Return a short text for a duration, rounded as one would say it."""
    minutes = round(seconds / 60)
    if minutes < 1:
        return "less than a minute"
    if minutes < 60:
        return f"about {minutes} min"
    return f"about {minutes // 60} h {minutes % 60:02d} min"
