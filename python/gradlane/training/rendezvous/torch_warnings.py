"""Torch's own warnings of a lost store, which are C++ frames, kept from the terminal.

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

_WARNING, _ERROR = 1, 2
_lock = threading.Lock()
_calls = 0


@contextlib.contextmanager
def hidden_warnings() -> Iterator[None]:
    """Hide torch's C++ warnings inside, unless `TORCH_CPP_LOG_LEVEL=INFO` asks for everything."""
    global _calls
    level = _level()
    with _lock:
        _calls += 1
        if _calls == 1 and level.value == _WARNING:
            level.value = _ERROR
    try:
        yield
    finally:
        with _lock:
            _calls -= 1
            if _calls == 0 and level.value == _ERROR:
                level.value = _WARNING


@functools.cache
def _level() -> ctypes.c_int:
    """Return torch's level; a number that nobody reads in a build that has none of this name."""
    path = Path(torch.__file__).parent / "lib" / "libc10.so"
    try:
        return ctypes.c_int.in_dll(ctypes.CDLL(str(path)), "FLAGS_caffe2_log_level")
    except (OSError, ValueError):
        return ctypes.c_int(_ERROR)
