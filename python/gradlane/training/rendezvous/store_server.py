"""A rendezvous store in a process of its own, which no rank's end ends.

Torch is imported once the port is bound, so that a mistake is answered at once.
"""

from __future__ import annotations

import datetime
import errno
import socket
from typing import TYPE_CHECKING, Any

from gradlane.formats.reported_error import ReportedError
from gradlane.training.rendezvous import addresses

if TYPE_CHECKING:
    from gradlane.training.torch_internals import TCPStore

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

    Args:
        bound: by `bind_store`; the store owns it from now on.
    """
    address, port = bound.getsockname()[:2]
    timeout = datetime.timedelta(seconds=_OPEN_S)
    return serve_on(
        bound,
        _LOOPBACKS.get(address, address),
        port,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
    )


def serve_on(bound: socket.socket, host: str, port: int, **options: Any) -> TCPStore:
    """Return a `TCPStore` that listens on a socket alone; by itself it would on all addresses.

    Torch's libuv server keeps parts of requests until the rest has come. The other one, which
    torch 2.4 takes a socket with, reads each request to its end first: a client that sends half of
    one keeps all others waiting, and the store from its end.

    Args:
        bound: to its address; the store owns it from now on.
        host: at which this process reaches the socket.
        port: of the socket.
        options: of `TCPStore`.

    Raises:
        RuntimeError: no store can listen there.
    """
    from gradlane.training.rendezvous.torch_reports import hide_reports_of
    from gradlane.training.torch_internals import TCPStore

    options["master_listen_fd"] = bound.detach()
    try:
        store = TCPStore(host, port, use_libuv=True, **options)
    except RuntimeError as error:
        if "libuv" not in str(error):
            raise
        store = TCPStore(host, port, use_libuv=False, **options)
    hide_reports_of(store)
    return store
