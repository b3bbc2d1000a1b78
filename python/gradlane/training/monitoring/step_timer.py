"""Step times of a model, and the share of them that its program waited for other ranks.

One clock reading and one counter of the core a step, when the first gradient of a step is there and
the previous step is finished. Listeners that act between two steps are called then. A history
of the whole run, for a live page, has a bounded number of rows.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from gradlane.formats.live_state import StepRow, StepTimes

RECENT_STEPS = 128
HISTORY_ROWS = 256
"""Most rows of the history; an even number. A full history joins its rows in pairs."""


class _Row:
    """The sums of some steps that followed one another."""

    __slots__ = ("count", "end_ns", "max_ns", "sum_ns", "wait_sum_ns")

    def __init__(self, end_ns: int, took_ns: int, wait_ns: int) -> None:
        """Start with one step."""
        self.count = 1
        self.end_ns = end_ns
        self.sum_ns = self.max_ns = took_ns
        self.wait_sum_ns = wait_ns

    def join(self, later: _Row) -> None:
        """Add the steps that followed."""
        self.count += later.count
        self.end_ns = later.end_ns
        self.sum_ns += later.sum_ns
        self.max_ns = max(self.max_ns, later.max_ns)
        self.wait_sum_ns += later.wait_sum_ns


class StepHistory:
    """Step times of a whole run: rows of equally many steps, the last one of as many or fewer."""

    def __init__(self) -> None:
        """Start before the first step."""
        self.rows: list[_Row] = []
        self._row_steps = 1

    def add(self, end_ns: int, took_ns: int, wait_ns: int) -> None:
        """Add a step."""
        step = _Row(end_ns, took_ns, wait_ns)
        if self.rows and self.rows[-1].count < self._row_steps:
            self.rows[-1].join(step)
            return
        if len(self.rows) == HISTORY_ROWS:
            for first, second in zip(self.rows[::2], self.rows[1::2], strict=True):
                first.join(second)
            del self.rows[1::2]
            self._row_steps *= 2
        self.rows.append(step)


class StepTimer:
    """The step times of one model, across channels."""

    def __init__(
        self,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
        *,
        keeps_history: bool = False,
    ) -> None:
        """Start before the first step.

        Args:
            clock_ns: a clock that only goes forward, in nanoseconds.
            keeps_history: whether the history of the whole run is kept, too.
        """
        self._clock_ns = clock_ns
        self._waited_ns: Callable[[], int] = lambda: 0
        # Reentrant: a signal handler may read in the middle of a note.
        self._lock = threading.RLock()
        self._step_begin_ns: int | None = None
        self._waited_before_ns = 0
        self._recent: deque[tuple[int, int, int]] = deque(maxlen=RECENT_STEPS)
        self._history = StepHistory() if keeps_history else None
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
                self._recent.append((now_ns, took_ns, wait_ns))
                if self._history is not None:
                    self._history.add(now_ns, took_ns, wait_ns)
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
        _, last_ns, wait_last_ns = recent[-1] if recent else (0, 0, 0)
        return {
            "count": count,
            "last_s": last_ns / 1e9,
            "mean_s": sum_ns / count / 1e9 if count else 0.0,
            "median_s": statistics.median(took for _, took, _ in recent) / 1e9 if recent else 0.0,
            "max_s": max_ns / 1e9,
            "wait_last_s": wait_last_ns / 1e9,
            "wait_median_s": statistics.median(wait for _, _, wait in recent) / 1e9
            if recent
            else 0.0,
            "wait_share": wait_sum_ns / sum_ns if sum_ns else 0.0,
        }

    @property
    def count(self) -> int:
        """Number of timed steps."""
        return self._count

    @property
    def last_begin_ns(self) -> int | None:
        """When the last step began, on the timer's clock; None before the first on a channel."""
        return self._step_begin_ns

    def recent_rows(self, start_ns: int) -> list[StepRow]:
        """Return the last steps, one a row; their times are since a start on the timer's clock."""
        with self._lock:
            recent = list(self._recent)
            before = self._count - len(recent)
        return _step_rows((_Row(*one) for one in recent), before, start_ns)

    def history_rows(self, start_ns: int) -> list[StepRow]:
        """Return the whole run, if its history is kept; times are since a start on the clock."""
        with self._lock:
            rows = [] if self._history is None else self._history.rows
            return _step_rows(rows, 0, start_ns)


def _step_rows(rows: Iterable[_Row], before: int, start_ns: int) -> list[StepRow]:
    """Return rows for reading; `before` steps came before the first."""
    found: list[StepRow] = []
    for row in rows:
        before += row.count
        found.append(
            {
                "last": before,
                "steps": row.count,
                "end_s": round((row.end_ns - start_ns) / 1e9, 6),
                "mean_s": round(row.sum_ns / row.count / 1e9, 6),
                "max_s": round(row.max_ns / 1e9, 6),
                "wait_mean_s": round(row.wait_sum_ns / row.count / 1e9, 6),
            }
        )
    return found
