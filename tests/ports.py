"""TCP ports for programs that a test starts."""

from __future__ import annotations

import fcntl
import random
import socket
import tempfile
from pathlib import Path
from typing import IO

_LOCKS = Path(tempfile.gettempdir()) / "gradlane-test-ports"
_held: dict[int, IO[bytes]] = {}


def reserve_port() -> int:
    """Return a TCP port that only this process hands out until it ends.

    The port is below those that the kernel gives to outgoing connections, so none of them takes it
    before the program under test binds it; a file lock keeps other tests of this machine away.

    Raises:
        OSError: every port is taken.
    """
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    _LOCKS.mkdir(exist_ok=True)
    ports = list(range(10_000, max(lowest, 10_100)))
    random.SystemRandom().shuffle(ports)
    for port in ports:
        if port in _held:
            continue
        lock = (_LOCKS / str(port)).open("wb")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("127.0.0.1", port))
        except OSError:
            lock.close()
            continue
        _held[port] = lock
        return port
    raise OSError(f"no port from 10000 to {lowest - 1} is free")
