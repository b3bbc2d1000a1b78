"""A page over HTTP for a few clients at a time, served by one thread.

Clients can use only a bounded part of that thread, `CLIENTS_MAX` descriptors, and a new page every
`PAGE_AGE_S`. No text of a client is repeated, printed or logged.
"""

from __future__ import annotations

import contextlib
import math
import select
import socket
import threading
import time
from collections.abc import Callable

CLIENTS_MAX = 8
"""Most connections at a time. A new one closes the oldest, so slow clients block no others."""
REQUEST_TIMEOUT_S = 5.0
"""Seconds from a connection to the last byte of its response."""
REQUEST_BYTES_MAX = 8192
PAGE_AGE_S = 1.0
"""Seconds for which a page is served before a new one is made."""
_LOOP_MIN_S = 0.01
"""Least seconds between iterations of the loop; each accepts one client and reads once from
each."""
_READ_BYTES = 4096
_CLOSE_TIMEOUT_S = 5.0


class _Client:
    """A connection: reads a request, writes a response, and drops further input."""

    def __init__(self, connection: socket.socket, deadline_s: float) -> None:
        self.connection = connection
        self.deadline_s = deadline_s
        self.request = b""
        self.response: memoryview | None = None

    @property
    def poll_events(self) -> int:
        return select.POLLOUT if self.response else select.POLLIN


class Endpoint:
    """Serves a page for `GET /metrics` and `GET /`."""

    def __init__(self, host: str, port: int, page: Callable[[], bytes], content_type: str) -> None:
        """Start to listen.

        Args:
            host: address or name to listen on; `0.0.0.0` and `::` are all.
            port: port to listen on; 0 for any that is free.
            page: makes the page; called in another thread, once in `PAGE_AGE_S` at most.
            content_type: of the page.

        Raises:
            OSError: the address cannot be listened on.
            ValueError: the host is no name, or the port is out of range.
        """
        self._page = page
        self._content_type = content_type
        self._cached_page: tuple[float, bytes] = (-math.inf, b"")
        self._clients: list[_Client] = []
        self._closing = threading.Event()
        self._listener = _listen(host, port)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._thread = threading.Thread(target=self._run, name="gradlane-metrics", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port number."""
        return self.address[1]

    def close(self) -> None:
        """Stop, and disconnect all clients."""
        self._closing.set()
        with contextlib.suppress(OSError):
            # Wakes the thread, which sleeps until a client connects.
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(_CLOSE_TIMEOUT_S)
        self._close_sockets()

    def forget_in_child(self) -> None:
        """Close all sockets in a forked child, which has no thread to serve them."""
        self._close_sockets()

    def _close_sockets(self) -> None:
        self._listener.close()
        for client in self._clients:
            client.connection.close()
        self._clients.clear()

    def _run(self) -> None:
        while not self._closing.is_set():
            ready = self._wait()
            now_s = time.monotonic()
            for client in tuple(self._clients):
                is_ready = client.connection.fileno() in ready
                if now_s >= client.deadline_s or (is_ready and not self._serve(client)):
                    self._disconnect(client)
            if self._listener.fileno() in ready:
                self._accept(now_s)
            self._closing.wait(_LOOP_MIN_S)

    def _wait(self) -> set[int]:
        """Wait for a client or a deadline, and return the descriptors that are ready."""
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        for client in self._clients:
            poll.register(client.connection, client.poll_events)
        deadline_s = min((one.deadline_s for one in self._clients), default=None)
        if deadline_s is None:
            return {descriptor for descriptor, _ in poll.poll()}
        wait_ms = max(0.0, 1000 * (deadline_s - time.monotonic()))
        return {descriptor for descriptor, _ in poll.poll(wait_ms)}

    def _accept(self, now_s: float) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            # The client is gone, or descriptors have run out for a while.
            return
        connection.setblocking(False)
        if len(self._clients) == CLIENTS_MAX:
            self._disconnect(self._clients[0])
        self._clients.append(_Client(connection, now_s + REQUEST_TIMEOUT_S))

    def _disconnect(self, client: _Client) -> None:
        self._clients.remove(client)
        client.connection.close()

    def _serve(self, client: _Client) -> bool:
        """Read or write once; return whether the connection stays open."""
        try:
            if client.response:
                sent = client.connection.send(client.response)
                client.response = client.response[sent:]
                if not client.response:
                    # Closing with unread bytes would take the answer back.
                    client.connection.shutdown(socket.SHUT_WR)
                return True
            chunk = client.connection.recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return True
        except OSError:
            return False
        if client.response is None:
            client.request += chunk
            is_whole = b"\r\n\r\n" in client.request or b"\n\n" in client.request
            if is_whole or len(client.request) > REQUEST_BYTES_MAX:
                client.response = memoryview(self._respond(client.request))
        return bool(chunk)

    def _respond(self, request: bytes) -> bytes:
        if len(request) > REQUEST_BYTES_MAX:
            return _response("431 Request Header Fields Too Large")
        words = request.split(b"\n", 1)[0].split()
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            return _response("400 Bad Request")
        method, target, _ = words
        if method not in (b"GET", b"HEAD"):
            return _response("405 Method Not Allowed", ["Allow: GET, HEAD"])
        if target.partition(b"?")[0] not in (b"/", b"/metrics"):
            return _response("404 Not Found", body=b"the metrics are at /metrics\n")
        try:
            page = self._fresh_page()
        except Exception:
            # The session may be ending. A report ends no training, and clients get no reason.
            return _response("503 Service Unavailable")
        headers = [f"Content-Type: {self._content_type}"]
        return _response("200 OK", headers, page, is_head=method == b"HEAD")

    def _fresh_page(self) -> bytes:
        made_s, page = self._cached_page
        if time.monotonic() - made_s >= PAGE_AGE_S:
            page = self._page()
            self._cached_page = time.monotonic(), page
        return page


def _response(
    status: str, headers: list[str] | None = None, body: bytes = b"", *, is_head: bool = False
) -> bytes:
    lines = [
        f"HTTP/1.1 {status}",
        *(headers or []),
        f"Content-Length: {len(body)}",
        "Connection: close",
        "\r\n",
    ]
    return "\r\n".join(lines).encode() + (b"" if is_head else body)


def _listen(host: str, port: int) -> socket.socket:
    """Listen on the first address of a host, without blocking."""
    if not 0 <= port <= 65535:
        raise ValueError("there are ports 0 to 65535")
    flags = socket.AI_PASSIVE
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=flags)
    family, _, _, _, (literal, _, *zone) = found[0]
    # `::` accepts clients over IPv4 as well, if the system can.
    both = host == "::" and socket.has_dualstack_ipv6()
    address = (literal, port, *zone)
    listener = socket.create_server(address, family=family, dualstack_ipv6=both)
    listener.setblocking(False)
    return listener
