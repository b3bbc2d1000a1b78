"""How long a thread has waited for somebody, while this process was running.

A process can be stopped from outside for any time, by a batch system that suspends a job or a
virtual machine that moves; clocks go on meanwhile, and whoever wakes up would think that all others
have kept it waiting. So of each pause that took much longer than it should a second counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable

_OVERSLEEP_MAX_S = 1.0


class SuspendAwareDeadline:
    """A limit to one wait that looks again and again."""

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin to wait.

        Args:
            limit_s: how long, in seconds.
            clock: seconds of a clock that only goes forward.
        """
        self.limit_s = limit_s
        self._clock = clock
        self._polled_s = clock()
        self._waited_s = 0.0

    def renew(self) -> None:
        """Begin anew: something has moved."""
        self._polled_s = self._clock()
        self._waited_s = 0.0

    @property
    def remaining_s(self) -> float:
        """Seconds until the limit, as of the last look; not negative."""
        return max(0.0, self.limit_s - self._waited_s)

    def is_over(self, slept_s: float = 0.0) -> bool:
        """Whether the limit is passed; to be called after each pause.

        Args:
            slept_s: how long the pause should have been, in seconds.
        """
        now_s = self._clock()
        self._waited_s += min(now_s - self._polled_s, slept_s + _OVERSLEEP_MAX_S)
        self._polled_s = now_s
        return self._waited_s > self.limit_s
