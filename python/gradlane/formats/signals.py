"""SIGTERM as an exception that unwinds like Ctrl-C, so that nothing is left behind.

By default the process would die at once. The kernel would remove the namespaces and the ranks would
notice, but partial files and temporary folders would stay.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    import typer


class Terminated(BaseException):
    """SIGTERM was received; not an `Exception`, so no handler of the program's errors catches
    it."""


def _raise(number: int, frame: FrameType | None) -> NoReturn:
    # A second signal must not interrupt the cleanup.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Terminated


def unwind_on_sigterm(context: typer.Context) -> None:
    """Raise `Terminated` on SIGTERM until the command ends, unless another handler is installed."""
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return
    signal.signal(signal.SIGTERM, _raise)
    context.call_on_close(lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Delay Ctrl-C and SIGTERM until the end of the block, which must take well under a second.

    Libraries with an event loop of their own do not tolerate an exception inside it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = {
        number: signal.signal(number, lambda number, frame: came.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if came:
            os.kill(os.getpid(), came[0])
