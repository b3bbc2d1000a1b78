"""A bar for what takes longer than a second."""

from __future__ import annotations

import threading
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

DELAY_S = 1.0
"""Seconds after which the bar is there."""


class LateProgress:
    """Shows a bar on a terminal from one second on, and takes it away at the end."""

    def __init__(self, console: Console, what: str) -> None:
        """Prepare a bar.

        Args:
            console: where it stands; nothing is shown on what is no terminal.
            what: stands before it.
        """
        columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console, transient=True)
        self._task = self._progress.add_task("", total=0)
        self._total = 0
        self._timer = threading.Timer(DELAY_S, self._progress.start)
        self._timer.daemon = True
        self._is_shown = console.is_terminal

    def __enter__(self) -> LateProgress:
        """Start the clock."""
        if self._is_shown:
            self._timer.start()
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Take the bar away."""
        if self._is_shown:
            self._timer.cancel()
            self._timer.join()
            self._progress.stop()

    def expect(self, more: int) -> None:
        """Count more that is to be done."""
        self._total += more
        self._progress.update(self._task, total=self._total)

    def advance(self) -> None:
        """Count one that is done."""
        self._progress.advance(self._task)
