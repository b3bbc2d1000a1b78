"""Endings that come from outside: SIGTERM unwinds like Ctrl-C, so that nothing is left behind.

The default is to die at once. The kernel would remove the namespaces and the ranks would notice,
but files under way and temporary folders would stay.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import NoReturn

import typer


class Terminated(BaseException):
    """SIGTERM came; not an error of the program, so no handler of those catches it."""


def _raise(number: int, frame: FrameType | None) -> NoReturn:
    # Whoever asks again must not interrupt the cleaning up.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Terminated


def end_in_order(context: typer.Context) -> None:
    """Raise `Terminated` on SIGTERM until the command is over, unless someone else listens."""
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return
    signal.signal(signal.SIGTERM, _raise)
    context.call_on_close(lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
