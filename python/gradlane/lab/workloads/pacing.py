"""A clock that stretches each operation of a model to a fixed time, as an accelerator would take.

Operations follow each other on a nominal time line. Sleeping too long, or working past a
deadline, is forgiven: the next operation starts where the last one should have ended. Every gap
between operations is counted in full, because there the training loop, a hook or the network
kept the accelerator waiting.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable


class PacingClock:
    """Paces operations against absolute, cumulative deadlines.

    Call `begin` when an operation starts, do its work, then call `finish`, which sleeps for what
    is left. Sleeping does not hold the interpreter lock. One thread drives a clock: on the CPU,
    autograd runs backward in the thread that calls it, so forward and backward share the clock.
    """

    def __init__(
        self,
        dilation: float = 1.0,
        *,
        enabled: bool = True,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Create a clock whose operations take `dilation` times their nominal duration.

        Args:
            dilation: factor from nominal to real seconds; positive.
            enabled: when false, `finish` returns at once, and the work takes what it takes.
            now: source of monotonic real time in seconds.
            sleep: waits for a number of real seconds, or a little longer.

        Raises:
            ValueError: if `dilation` is not positive.
        """
        if not dilation > 0.0:
            raise ValueError(f"dilation must be positive, got {dilation}")
        self.dilation = dilation
        self.enabled = enabled
        self.wall_lag_s = 0.0
        """Real time by which the last operation ended after its nominal end. Steadily growing,
        it says that the machine cannot keep up and that more dilation is needed."""
        self.forgiven_s_max = math.inf
        """Lag beyond this is lost: later operations are not shortened to make up for it."""
        self.overruns = 0
        """Operations whose work alone took longer than their duration."""
        self.now = now
        self.sleep = sleep
        self._deadline_s = 0.0
        self._work_limit_s = 0.0

    def beside(self) -> PacingClock:
        """Return another clock of the same pace, for operations of another thread."""
        return PacingClock(self.dilation, enabled=self.enabled, now=self.now, sleep=self.sleep)

    def begin(self, duration_s: float) -> None:
        """Start an operation of `duration_s` nominal seconds."""
        now_s = self.now()
        wall_duration_s = duration_s * self.dilation
        # Nominal end of the last operation, plus the gap since it really ended, equals now - lag.
        forgiven_s = min(self.wall_lag_s, self.forgiven_s_max)
        self._deadline_s = now_s - forgiven_s + wall_duration_s
        # An operation without duration has its time in another stage and cannot overrun.
        self._work_limit_s = now_s + wall_duration_s if duration_s > 0.0 else math.inf

    def remaining_s(self) -> float:
        """Return real seconds until the current operation should end; negative when it is late."""
        return self._deadline_s - self.now() if self.enabled else 0.0

    def finish(self) -> None:
        """Sleep until the current operation should end."""
        if not self.enabled:
            return
        now_s = self.now()
        if now_s > self._work_limit_s:
            self.overruns += 1
        while now_s < self._deadline_s:
            self.sleep(self._deadline_s - now_s)
            now_s = self.now()
        self.wall_lag_s = now_s - self._deadline_s
