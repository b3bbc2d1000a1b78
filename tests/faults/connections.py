"""Connections of processes, taken from outside: what their owners do not see coming."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
from pathlib import Path

_PIDFD_GETFD = 438
_ESTABLISHED = "01"
Ends = tuple[str, str]


def connection_between(first: int, second: int) -> socket.socket | None:
    """Return the first process's socket of a connection of two processes, or None: there is none.

    Both are in this process's network namespace or another one, the same or not.
    """
    remote = set(_connections(second))
    for (local, peer), descriptor in _connections(first).items():
        if (peer, local) in remote:
            with contextlib.suppress(OSError):
                return socket.socket(fileno=_take(first, descriptor))
    return None


def _connections(pid: int) -> dict[Ends, int]:
    """Return a process's descriptors of connections, by their own and their far address."""
    sockets: dict[str, int] = {}
    try:
        descriptors = list(Path(f"/proc/{pid}/fd").iterdir())
        table = Path(f"/proc/{pid}/net/tcp").read_text()
    except OSError:
        return {}  # it has ended
    for path in descriptors:
        with contextlib.suppress(OSError):
            sockets[os.readlink(path)] = int(path.name)
    found = {}
    for line in table.splitlines()[1:]:
        _, local, peer, state, *rest = line.split()
        descriptor = sockets.get(f"socket:[{rest[5]}]")
        if state == _ESTABLISHED and descriptor is not None:
            found[local, peer] = descriptor
    return found


def _take(pid: int, descriptor: int) -> int:
    """Return a descriptor of this process for one of another process."""
    process = os.pidfd_open(pid)
    try:
        taken = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, process, descriptor, 0)
        if taken < 0:
            raise OSError(ctypes.get_errno(), "cannot take a descriptor of another process")
        return int(taken)
    finally:
        os.close(process)
