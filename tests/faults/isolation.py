"""Sets a process of one run apart: its own session, the parent to end with, a network.

It imports little: every rank that is forked loads it.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import tempfile
from typing import Any

_PR_SET_PDEATHSIG = 1
_CLONE_NEWNET = 0x40000000


def isolate(job: dict[str, Any], node: int) -> None:
    """Begin a session of processes, end with the parent, and enter the node's namespace."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getsid(0) != os.getpid():
        os.setsid()
    # The parent has looked up its own.
    tempfile.tempdir = None
    # A signal tells where the program stands, for the report of a hang.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    if job["namespaces"] is not None:
        enter_namespace(job["namespaces"][node])


def enter_namespace(path: str) -> None:
    """Move the calling thread, and all that it starts, into a network namespace."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {path}")
    finally:
        os.close(descriptor)
