"""Step times of a model, and the share of them that its program waited for other ranks.

One clock reading and one counter of the core a step, when the first gradient of a step is there and
the previous step is finished. Listeners that act between two steps are called then.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable

from gradlane.training.monitoring.metrics import StepTimes

RECENT_STEPS = 128


class StepTimer:
    """The step times of one model, across channels."""

    def __init__(self, clock_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        """Start before the first step.

        Args:
            clock_ns: a clock that only goes forward, in nanoseconds.
        """
        self._clock_ns = clock_ns
        self._waited_ns: Callable[[], int] = lambda: 0
        # Reentrant: a signal handler may read in the middle of a note.
        self._lock = threading.RLock()
        self._step_begin_ns: int | None = None
        self._waited_before_ns = 0
        self._recent: deque[tuple[int, int]] = deque(maxlen=RECENT_STEPS)
        self._count = 0
        self._sum_ns = 0
        self._max_ns = 0
        self._wait_sum_ns = 0

    def use_channel(self, waited_ns: Callable[[], int]) -> None:
        """Use the wait counter of another channel; the step in progress is not counted.

        Args:
            waited_ns: returns the program's wait time on it so far, in nanoseconds.
        """
        self._waited_ns = waited_ns
        self._step_begin_ns = None

    def step_begins(self) -> None:
        """Record that a step has finished and the next one begins."""
        now_ns, waited_ns = self._clock_ns(), self._waited_ns()
        if self._step_begin_ns is not None:
            took_ns, wait_ns = now_ns - self._step_begin_ns, waited_ns - self._waited_before_ns
            with self._lock:
                self._recent.append((took_ns, wait_ns))
                self._count += 1
                self._sum_ns += took_ns
                self._max_ns = max(self._max_ns, took_ns)
                self._wait_sum_ns += wait_ns
        self._step_begin_ns, self._waited_before_ns = now_ns, waited_ns

    def times(self) -> StepTimes:
        """Return the step times; zeros before the second step. May be called in any thread."""
        with self._lock:
            recent = list(self._recent)
            count, sum_ns, max_ns = self._count, self._sum_ns, self._max_ns
            wait_sum_ns = self._wait_sum_ns
        last_ns, wait_last_ns = recent[-1] if recent else (0, 0)
        return {
            "count": count,
            "last_s": last_ns / 1e9,
            "mean_s": sum_ns / count / 1e9 if count else 0.0,
            "median_s": statistics.median(took for took, _ in recent) / 1e9 if recent else 0.0,
            "max_s": max_ns / 1e9,
            "wait_last_s": wait_last_ns / 1e9,
            "wait_median_s": statistics.median(wait for _, wait in recent) / 1e9 if recent else 0.0,
            "wait_share": wait_sum_ns / sum_ns if sum_ns else 0.0,
        }
