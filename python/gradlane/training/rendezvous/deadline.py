"""Deadlines that count only the time in which this process runs.

A batch system or a moving virtual machine can suspend a process for any time while clocks go on. A
resumed process would then find all others late. So of each sleep at most a second more than
requested counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable

_OVERSLEEP_MAX_S = 1.0


class SuspendAwareDeadline:
    """A time limit of a wait that polls."""

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Start the wait.

        Args:
            limit_s: in seconds.
            clock: seconds of a clock that only goes forward.
        """
        self.limit_s = limit_s
        self._clock = clock
        self._polled_s = clock()
        self._waited_s = 0.0

    def renew(self) -> None:
        """Restart the wait after progress."""
        self._polled_s = self._clock()
        self._waited_s = 0.0

    @property
    def remaining_s(self) -> float:
        """Seconds until the limit, as of the last poll; not negative."""
        return max(0.0, self.limit_s - self._waited_s)

    def is_over(self, slept_s: float = 0.0) -> bool:
        """Return whether the limit has passed; call it after each sleep.

        Args:
            slept_s: requested length of the sleep, in seconds.
        """
        now_s = self._clock()
        self._waited_s += min(now_s - self._polled_s, slept_s + _OVERSLEEP_MAX_S)
        self._polled_s = now_s
        return self._waited_s > self.limit_s
