"""The first failure of a model's training, raised again by every later call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import NoReturn

from gradlane.errors import GradlaneError
from gradlane.training.core import CoreModule, translate_error


class FailureLatch:
    """Keeps the first failure: nobody sees some parameters of one step and some of another."""

    def __init__(self) -> None:
        """Start without a failure."""
        self.error: GradlaneError | None = None
        self._listeners: list[Callable[[], None]] = []

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Call a function once the first failure is kept, in the thread that fails."""
        self._listeners.append(listener)

    def fail(self, error: GradlaneError) -> None:
        """Keep an error, unless there is one already."""
        if self.error is None:
            self.error = error
            for listener in self._listeners:
                listener()

    def fail_and_raise(self, error: GradlaneError, cause: Exception | None = None) -> NoReturn:
        """Keep an error, unless there is one already, and raise the one that is kept."""
        self.fail(error)
        assert self.error is not None
        raise self.error from cause

    def raise_failure(self) -> None:
        """Raise the failure, if there is one."""
        if self.error is not None:
            # The same object each time: without the old traceback, or they would pile up.
            raise self.error.with_traceback(None)

    @contextlib.contextmanager
    def translating(self, core: CoreModule, doing: str) -> Iterator[None]:
        """Turn errors of a channel into the package's own, and keep the first.

        Args:
            core: defines the errors.
            doing: what this rank does meanwhile, for the message.
        """
        try:
            yield
        except core.ChannelError as error:
            self.fail_and_raise(translate_error(core, error, doing), error)
