"""A rendezvous store in a process of its own, which no rank's end ends.

Torch is imported once the port is bound, so that a mistake is answered at once.
"""

from __future__ import annotations

import datetime
import errno
import socket
from typing import TYPE_CHECKING

from gradlane.formats.reported_error import ReportedError
from gradlane.training.rendezvous import addresses

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

_OPEN_S = 30.0
_LOOPBACKS = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Addresses at which this machine reaches a socket that listens on all of its addresses."""


def bind_store(host: str, port: int) -> socket.socket:
    """Return a socket for `host_store`.

    Args:
        host: an address of this machine or a name that leads to it; `0.0.0.0` or `::`: all.
        port: 0: any that is free.

    Raises:
        ReportedError: the port is taken, or the address is not this machine's.
    """
    try:
        return addresses.bind(host, port)
    except OSError as error:
        remedy = (
            "another process listens there: end it, or give another --port (0: any that is free)"
            if error.errno == errno.EADDRINUSE
            else "give --host an address of this machine and --port one that this account may use"
        )
        at = addresses.endpoint(host, port)
        raise ReportedError(f"no store can listen at {at}: {error.strerror}; {remedy}") from error


def host_store(bound: socket.socket) -> TCPStore:
    """Return a c10d store that this process hosts for as long as it keeps the result.

    It listens on the socket's address alone, where torch's own would listen on all.

    Args:
        bound: by `bind_store`; the store owns it from now on.
    """
    from torch._C._distributed_c10d import TCPStore

    from gradlane.training.rendezvous.rendezvous import listening_on

    address, port = bound.getsockname()[:2]
    return TCPStore(
        _LOOPBACKS.get(address, address),
        port,
        is_master=True,
        timeout=datetime.timedelta(seconds=_OPEN_S),
        wait_for_workers=False,
        **listening_on(bound),
    )
