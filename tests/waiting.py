"""Waiting for what happens by itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


def eventually(condition: Callable[[], bool], within_s: float = 10.0) -> bool:
    """Return whether a condition comes true before a generous limit."""
    deadline_s = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.02)
    return True


def threads_named(name: str) -> set[threading.Thread]:
    """Return the threads of that name that run."""
    return {thread for thread in threading.enumerate() if thread.name == name}
