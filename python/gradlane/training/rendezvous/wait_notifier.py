"""Notification of waits for other ranks.

A profile holds the compute time alone, so its recorder has to know which part of a step was spent
waiting for averaged gradients. All such waits of this process's sessions use `WAIT_NOTIFIER`.
"""

from __future__ import annotations

from types import TracebackType
from typing import Protocol


class WaitObserver(Protocol):
    """Observes waits; called in the thread that waits."""

    def wait_begins(self) -> None:
        """Note the begin of a wait for other ranks."""

    def wait_ends(self) -> None:
        """Note its end, also by an error."""


class WaitNotifier:
    """A context for a wait: `with WAIT_NOTIFIER: channel.wait(...)`. Waits do not nest."""

    def __init__(self) -> None:
        self._observers: tuple[WaitObserver, ...] = ()

    def add_observer(self, observer: WaitObserver) -> None:
        """Notify an observer of all waits from now on."""
        self._observers = (*self._observers, observer)

    def remove_observer(self, observer: WaitObserver) -> None:
        """Stop notifying an observer; an unknown one is ignored."""
        self._observers = tuple(one for one in self._observers if one is not observer)

    def __enter__(self) -> None:
        for observer in self._observers:
            observer.wait_begins()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for observer in self._observers:
            observer.wait_ends()


WAIT_NOTIFIER = WaitNotifier()
"""The process's notifier: a session waits in any thread that needs a result."""
