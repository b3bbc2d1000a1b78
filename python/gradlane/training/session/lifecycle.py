"""End open sessions when the program ends.

A normal end closes sessions in order. An uncaught exception, SIGTERM, and `sys.exit` with a status
that is not 0 abort them with the reason, which every other rank then names. A forked child drops
them at once.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any, NoReturn

from gradlane.training.session.ending import SessionEnding

_open: set[SessionEnding] = set()
"""Sessions that are not closed. They stay alive, since the core's threads use their memory."""

_installed = False
_last_exit: tuple[SystemExit, list[int]] | None = None
"""The last `sys.exit` of the main thread, and the steps that the open sessions had taken then."""


def watch(session: SessionEnding) -> None:
    """End a session when the program ends."""
    global _installed
    _open.add(session)
    if not _installed:
        _installed = True
        atexit.register(_at_exit)
        os.register_at_fork(after_in_child=_in_child)
        _wrap_excepthook()
        _wrap_exit()
    on_main_thread = threading.current_thread() is threading.main_thread()
    if on_main_thread and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _on_sigterm)


def unwatch(session: SessionEnding) -> None:
    """Forget a session that has ended."""
    _open.discard(session)


def abort_all(error: BaseException) -> None:
    """Abort all open sessions, naming the exception that has ended the program or its script."""
    for session in list(_open):
        session.abort(describe_exception(error))


def _at_exit() -> None:
    sessions = list(_open)
    if _last_exit is not None and _last_exit[1] == [session.step for session in sessions]:
        # The program has not gone on since, so it was not caught.
        for session in sessions:
            session.abort(describe_exception(_last_exit[0]))
    for session in list(_open):
        session.close_at_exit()


def _in_child() -> None:
    for session in list(_open):
        session.forget_in_child()
    _open.clear()
    if signal.getsignal(signal.SIGTERM) is _on_sigterm:
        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    for session in list(_open):
        session.abort("received SIGTERM")
    # The default action ends the program with the status that a launcher expects.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)


def _wrap_excepthook() -> None:
    previous = sys.excepthook

    def excepthook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        # Peers learn the reason first: printing may take a while.
        abort_all(error)
        previous(kind, error, traceback)

    sys.excepthook = excepthook


def _wrap_exit() -> None:
    """Note the status of `sys.exit`: at the end nothing tells of it any more."""
    previous = sys.exit

    @functools.wraps(previous)
    def exit(status: Any = None, /) -> NoReturn:
        global _last_exit
        error = SystemExit(status)
        if threading.current_thread() is threading.main_thread():
            _last_exit = (error, [session.step for session in _open]) if failed(error) else None
        previous(status)

    sys.exit = exit


def failed(error: BaseException) -> bool:
    """Return whether an exception that ends the program says that it has failed."""
    return not (isinstance(error, SystemExit) and error.code in (None, 0))


def describe_exception(error: BaseException) -> str:
    """Return an exception's type and first line for a message to other ranks."""
    if isinstance(error, SystemExit):
        status = error.code if isinstance(error.code, int) else 1
        said = "" if isinstance(error.code, int) else f" ({str(error.code)[:300]})"
        return f"its program ended with exit status {status}{said}"
    lines = str(error).splitlines()
    name = type(error).__name__
    return f"{name}: {lines[0][:300]}" if lines and lines[0] else name
