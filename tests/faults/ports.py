"""Networks in which many trainings at once find their ports, and listeners that are no store."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import threading
from collections.abc import Iterator

from gradlane.lab.cluster.namespaces import Namespace
from gradlane.lab.cluster.privilege import why_no_namespaces
from tests.faults.isolation import enter_namespace
from tests.ports import reserve_port

_PORT = 29500


@contextlib.contextmanager
def own_loopback() -> Iterator[tuple[str | None, int]]:
    """Yield the path of a namespace with nothing but a loopback interface, and a port there.

    So no other process takes the port of a store whose rank was killed. Where no namespace can be
    made the path is None, and the port one of the machine's.
    """
    if _why_not() is not None:
        yield None, reserve_port()
        return
    namespace = Namespace()
    try:
        namespace.route.link("set", index=namespace.interface("lo"), state="up")
        yield f"/proc/{os.getpid()}/fd/{namespace.descriptor}", _PORT
    finally:
        namespace.close()


@functools.cache
def _why_not() -> str | None:
    return why_no_namespaces()


class Listener:
    """Something on MASTER_PORT that is no store."""

    def __init__(self, namespace: str | None, port: int, how: str) -> None:
        """Listen.

        Args:
            namespace: path of the network namespace, None for the machine's.
            port: on all addresses of IPv4.
            how: one of `LISTENERS`.
        """
        self._how = how
        self._callers: list[socket.socket] = []
        self._is_up = threading.Event()
        arguments = (namespace, port)
        self._thread = threading.Thread(target=self._accept, args=arguments, daemon=True)
        self._thread.start()
        assert self._is_up.wait(60)

    def _accept(self, namespace: str | None, port: int) -> None:
        if namespace is not None:
            enter_namespace(namespace)
        self._socket = socket.create_server(("", port), backlog=64)
        self._is_up.set()
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
