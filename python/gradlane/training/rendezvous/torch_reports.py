"""Torch's own reports of a lost store, which are C++ frames, kept from the terminal.

Torch logs them before it raises the error, which names the store in a sentence. Its level of
logging is one number of the process, so it is changed while a call on a store is made only.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Iterator
from pathlib import Path

import torch

_INFO, _FATAL = 0, 3
_lock = threading.Lock()
_calls = 0
_before = _FATAL


@contextlib.contextmanager
def hidden_reports() -> Iterator[None]:
    """Hide torch's C++ reports inside, unless `TORCH_CPP_LOG_LEVEL=INFO` asks for everything."""
    global _calls, _before
    level = _level()
    with _lock:
        _calls += 1
        if _calls == 1:
            _before = level.value
            if _before != _INFO:
                level.value = _FATAL
    try:
        yield
    finally:
        with _lock:
            _calls -= 1
            if _calls == 0 and level.value == _FATAL:
                level.value = _before


@functools.cache
def _level() -> ctypes.c_int:
    """Return torch's level; a number that nobody reads in a build that has none of this name."""
    path = Path(torch.__file__).parent / "lib" / "libc10.so"
    try:
        return ctypes.c_int.in_dll(ctypes.CDLL(str(path)), "FLAGS_caffe2_log_level")
    except (OSError, ValueError):
        return ctypes.c_int(_FATAL)
