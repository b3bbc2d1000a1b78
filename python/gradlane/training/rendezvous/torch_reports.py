"""Torch's own reports of a store, which are C++ frames, kept from the terminal.

A client logs them before it raises the error, which names the store in a sentence. A server logs
each request that is none, which any process that reaches its port can send. Torch's level of
logging is one number of the process: it is changed while a call on a store is made, and less far
while this process hosts one, where errors of torch's other parts stay visible.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import torch

_INFO, _ERROR, _FATAL = 0, 2, 3
_lock = threading.RLock()
"""A store may be released, and its reports be shown again, wherever Python collects garbage."""
_active: list[int] = []
"""Levels that somebody needs now; the highest is in force."""
_before = _FATAL


@contextlib.contextmanager
def hidden_reports() -> Iterator[None]:
    """Hide torch's C++ reports inside, unless `TORCH_CPP_LOG_LEVEL=INFO` asks for everything."""
    _hide(_FATAL)
    try:
        yield
    finally:
        _show(_FATAL)


def hide_reports_of(hosted: object) -> None:
    """Hide a hosted store's reports, which are warnings, until it is released."""
    _hide(_ERROR)
    # Not at the end of the process, which ends the store as well.
    weakref.finalize(hosted, _show, _ERROR).atexit = False


def _hide(at: int) -> None:
    global _before
    with _lock:
        if not _active:
            _before = log_level().value
        _active.append(at)
        _apply()


def _show(at: int) -> None:
    with _lock:
        _active.remove(at)
        _apply()


def _apply() -> None:
    if _before != _INFO:
        log_level().value = max([_before, *_active])


@functools.cache
def log_level() -> ctypes.c_int:
    """Return torch's level; a number that nobody reads in a build that has none of this name."""
    path = Path(torch.__file__).parent / "lib" / "libc10.so"
    try:
        return ctypes.c_int.in_dll(ctypes.CDLL(str(path)), "FLAGS_caffe2_log_level")
    except (OSError, ValueError):
        return ctypes.c_int(_FATAL)
