"""Where training stands still for the other ranks, told to whom it may concern.

A profile is what the compute takes alone, so it has to know which part of a step was spent waiting
for averaged gradients. All such waits of this process's sessions go through `WAIT_NOTIFIER`.
"""

from __future__ import annotations

from types import TracebackType
from typing import Protocol


class WaitObserver(Protocol):
    """Whoever wants to know; called in the thread that waits."""

    def wait_begins(self) -> None:
        """A wait for other ranks begins."""

    def wait_ends(self) -> None:
        """It is over, or has failed."""


class WaitNotifier:
    """A context to wait in: `with WAIT_NOTIFIER: channel.wait(...)`. Waits do not nest."""

    def __init__(self) -> None:
        """Start with nobody to tell."""
        self._observers: tuple[WaitObserver, ...] = ()

    def add_observer(self, observer: WaitObserver) -> None:
        """Tell an observer of all waits from now on."""
        self._observers = (*self._observers, observer)

    def remove_observer(self, observer: WaitObserver) -> None:
        """Tell an observer no more; unknown ones do not matter."""
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
"""Of this process: a session waits in whatever thread needs a result."""
