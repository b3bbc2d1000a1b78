"""Ports for the rendezvous stores of many trainings at once, and listeners that are no store."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading

_ports = itertools.cycle(range(21_000 + os.getpid() % 1000, 31_000))
_lock = threading.Lock()


def free_port() -> int:
    """Return a port below those that the kernel gives to callers, and that nobody listens to."""
    while True:
        with _lock:
            port = next(_ports)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port


class Listener:
    """Something on MASTER_PORT that is no store."""

    def __init__(self, port: int, how: str) -> None:
        """Listen.

        Args:
            port: on all addresses of IPv4.
            how: one of `LISTENERS`.
        """
        self._how = how
        self._callers: list[socket.socket] = []
        self._socket = socket.create_server(("", port), backlog=64)
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                caller, _ = self._socket.accept()
            except OSError:
                return
            if self._how == "silent":
                self._callers.append(caller)
                continue
            with contextlib.suppress(OSError):
                if self._how == "speaks HTTP":
                    caller.sendall(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")
            caller.close()

    def close(self) -> None:
        """Listen no longer."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()
        for caller in self._callers:
            caller.close()
