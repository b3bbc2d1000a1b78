"""The lock of a model's steps, for waits for updates: one that is long is told of."""

from __future__ import annotations

import threading
from types import TracebackType

from gradlane.training.log import log

UPDATE_NOTICE_S = 30.0
"""Seconds that a thread waits for another one's update before that is told of."""


class UpdateLock:
    """Takes a lock; says so where another thread is long in an update."""

    def __init__(self, lock: threading.RLock) -> None:
        """Take this lock as a context."""
        self._lock = lock
        self._updating_thread = ""
        self._step = 0

    def begin_update(self, step: int) -> None:
        """Note that this thread runs an update from now on."""
        self._updating_thread, self._step = threading.current_thread().name, step

    def end_update(self) -> None:
        """Note that it does so no more."""
        self._updating_thread = ""

    def __enter__(self) -> None:
        """Wait for the lock."""
        if self._lock.acquire(timeout=UPDATE_NOTICE_S):
            return
        if self._updating_thread:
            log.warning(
                "step %d: thread %r has waited %g s for an update that thread %r is in; if the "
                "optimizer has threads of its own that touch the model, each waits for the other: "
                "pass defer=False to prepare()",
                self._step,
                threading.current_thread().name,
                UPDATE_NOTICE_S,
                self._updating_thread,
            )
        self._lock.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Release it."""
        self._lock.release()
