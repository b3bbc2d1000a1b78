"""Pages over HTTP for a few clients at a time, served by one thread.

Clients can use only a bounded part of that thread, `CLIENTS_MAX` descriptors, and each page anew
every `PAGE_AGE_S`. No text of a client is repeated, printed or logged. On the loopback interface
only requests for an address or `localhost` are answered: a page of another site whose name leads
here (DNS rebinding) reads nothing.
"""

from __future__ import annotations

import contextlib
import ipaddress
import math
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gradlane.errors import RefusedError
from gradlane.formats.live_state import NEXT_QUERY
from gradlane.training.options.endpoint import LOOPBACK, parse_address
from gradlane.training.rendezvous.environment import find_local_rank

CLIENTS_MAX = 8
"""Most connections at a time. A new one closes the oldest, so slow clients block no others."""
REQUEST_TIMEOUT_S = 5.0
"""Seconds from a connection to the last byte of its response."""
REQUEST_BYTES_MAX = 8192
PAGE_AGE_S = 1.0
"""Seconds for which a page is served before a new one is made."""
FAREWELL_S = 0.5
"""Longest time in which those who follow a page are told its last state at the end."""
_LOOP_MIN_S = 0.01
"""Least seconds between iterations of the loop; each accepts one client and reads once from
each."""
_READ_BYTES = 4096
_CLOSE_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Page:
    """A page that is made when it is asked for.

    Attributes:
        content_type: the header of that name.
        make: makes it; called in another thread, once in `PAGE_AGE_S` at most.
        headers: further headers.
    """

    content_type: str
    make: Callable[[], bytes]
    headers: tuple[str, ...] = ()


class _Client:
    """A connection: reads a request, writes a response, and drops further input."""

    def __init__(self, connection: socket.socket, deadline_s: float) -> None:
        self.connection = connection
        self.deadline_s = deadline_s
        self.request = b""
        self.response: memoryview | None = None
        self.due_s: float | None = None
        """When a request for the next state of a page is answered."""

    @property
    def poll_events(self) -> int:
        return select.POLLOUT if self.response else select.POLLIN


class Endpoint:
    """Serves pages for `GET`.

    A query `?next` has an answer held back for `PAGE_AGE_S`, or until the endpoint closes: who
    follows a page by such requests gets its last state, too.
    """

    def __init__(self, host: str, port: int, pages: Mapping[str, Page]) -> None:
        """Start to listen.

        Args:
            host: address or name to listen on; `0.0.0.0` and `::` are all.
            port: port to listen on; 0 for any that is free.
            pages: by path.

        Raises:
            OSError: the address cannot be listened on.
            ValueError: the host is no name, or the port is out of range.
        """
        self._host = host
        self._pages = {path.encode(): page for path, page in pages.items()}
        self._made: dict[Page, tuple[float, bytes]] = {}
        self._clients: list[_Client] = []
        self._closing = threading.Event()
        self._closed_s = -math.inf
        self._absent, self._left_s = 0, 0.0
        """Followers between two requests, and when the last of them was answered."""
        self._listener = _listen(host, port)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self.is_loopback = ipaddress.ip_address(self.address[0].split("%")[0]).is_loopback
        self._wakeup: tuple[int, int] | None = os.pipe()
        self._thread = threading.Thread(target=self._run, name="gradlane-metrics", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port number."""
        return self.address[1]

    def close(self) -> None:
        """Stop, and disconnect all clients; those who follow a page get it once more."""
        if self._wakeup is None:
            return
        self._closed_s = time.monotonic()
        self._closing.set()
        os.write(self._wakeup[1], b"1")
        self._thread.join(_CLOSE_TIMEOUT_S)
        with contextlib.suppress(OSError):
            # Children that were forked a moment ago may still hold it.
            self._listener.shutdown(socket.SHUT_RDWR)
        self._close_sockets()

    def forget_in_child(self) -> None:
        """Close all sockets in a forked child, which has no thread to serve them."""
        self._close_sockets()

    def _close_sockets(self) -> None:
        wakeup, self._wakeup = self._wakeup, None
        for descriptor in wakeup or ():
            os.close(descriptor)
        self._listener.close()
        for client in self._clients:
            client.connection.close()
        self._clients.clear()

    def _run(self) -> None:
        while not self._closing.is_set():
            self._turn()
        deadline_s = time.monotonic() + FAREWELL_S
        while time.monotonic() < deadline_s and self._is_followed():
            self._turn()

    def _is_followed(self) -> bool:
        """Return whether someone waits for the last state, or is between two requests."""
        if any(client.response or client.due_s is not None for client in self._clients):
            return True
        return self._absent > 0 and time.monotonic() - self._left_s < FAREWELL_S

    def _turn(self) -> None:
        ready = self._wait()
        now_s = time.monotonic()
        for client in tuple(self._clients):
            if client.due_s is not None and (now_s >= client.due_s or self._closing.is_set()):
                self._answer_next(client)
                continue
            is_ready = client.connection.fileno() in ready
            if now_s >= client.deadline_s or (is_ready and not self._serve(client)):
                self._disconnect(client)
        if self._listener.fileno() in ready:
            self._accept(now_s)
        time.sleep(_LOOP_MIN_S)

    def _wait(self) -> set[int]:
        """Wait for a client, a deadline or the end; return the descriptors that are ready."""
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        times_s = []
        if self._closing.is_set():
            times_s.append(time.monotonic())
        elif self._wakeup is not None:
            poll.register(self._wakeup[0], select.POLLIN)
        for client in self._clients:
            poll.register(client.connection, client.poll_events)
            times_s.append(client.deadline_s if client.due_s is None else client.due_s)
        if not times_s:
            return {descriptor for descriptor, _ in poll.poll()}
        wait_ms = max(0.0, 1000 * (min(times_s) - time.monotonic()))
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
        if client.response is None and client.due_s is None:
            client.request += chunk
            is_whole = b"\r\n\r\n" in client.request or b"\n\n" in client.request
            if is_whole or len(client.request) > REQUEST_BYTES_MAX:
                self._take_request(client)
        return bool(chunk)

    def _take_request(self, client: _Client) -> None:
        """Answer a request, or note when to."""
        line = client.request.split(b"\n", 1)[0].split()
        if len(line) == 3 and line[1].endswith(b"?" + NEXT_QUERY.encode()):
            client.due_s = time.monotonic() + PAGE_AGE_S
            self._absent = max(0, self._absent - 1)
        else:
            client.response = memoryview(self._respond(client.request))

    def _answer_next(self, client: _Client) -> None:
        client.due_s = None
        client.response = memoryview(self._respond(client.request))
        if not self._closing.is_set():
            now_s = time.monotonic()
            self._absent = 1 + (self._absent if now_s - self._left_s < FAREWELL_S else 0)
            self._left_s = now_s

    def _respond(self, request: bytes) -> bytes:
        if len(request) > REQUEST_BYTES_MAX:
            return _response("431 Request Header Fields Too Large")
        lines = request.splitlines()
        words = lines[0].split() if lines else []
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            return _response("400 Bad Request")
        method, target, _ = words
        if not self._is_meant(lines[1:]):
            return _response("421 Misdirected Request", body=b"ask for localhost or an address\n")
        if method not in (b"GET", b"HEAD"):
            return _response("405 Method Not Allowed", ["Allow: GET, HEAD"])
        page = self._pages.get(target.partition(b"?")[0])
        if page is None:
            paths = b", ".join(self._pages)
            return _response("404 Not Found", body=b"there are the pages %s\n" % paths)
        try:
            content = self._content(page)
        except Exception:
            # The session may be ending. A report ends no training, and clients get no reason.
            return _response("503 Service Unavailable")
        headers = [
            f"Content-Type: {page.content_type}",
            "Cache-Control: no-store",
            "X-Content-Type-Options: nosniff",
            *page.headers,
        ]
        return _response("200 OK", headers, content, is_head=method == b"HEAD")

    def _is_meant(self, lines: list[bytes]) -> bool:
        """Return whether a request's `Host` is this server's; browsers always send one."""
        hosts = [
            value
            for name, colon, value in (line.partition(b":") for line in lines)
            if colon and name.strip().lower() == b"host"
        ]
        if not self.is_loopback or not hosts:
            return True
        name = hosts[0].strip().decode("latin-1").lower()
        name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
        if len(hosts) == 1 and name in ("localhost", self._host.lower()):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return len(hosts) == 1

    def _content(self, page: Page) -> bytes:
        made_s, content = self._made.get(page, (-math.inf, b""))
        if time.monotonic() - made_s >= PAGE_AGE_S or made_s < self._closed_s:
            content = page.make()
            self._made[page] = time.monotonic(), content
        return content


def wanted_address(
    option: int | str | None, environment: Mapping[str, str], name: str
) -> tuple[str, int] | None:
    """Return the address at which this rank answers; None for no endpoint.

    Ranks of one node take one port each, by their local rank.

    Args:
        option: the option of `Monitoring` that asks for it.
        environment: the launcher's variables.
        name: of the option.

    Raises:
        ValueError: the option is neither a port nor `HOST:PORT`.
    """
    if option is None:
        return None
    if isinstance(option, int):
        host, first = LOOPBACK, option
    else:
        host, first = parse_address(option, name)
    return host, first + find_local_rank(environment) if first else 0


def open_endpoint(
    host: str, port: int, pages: Mapping[str, Page], *, name: str, option: str, remedy: str
) -> Endpoint:
    """Start an endpoint that an option asks for.

    Args:
        host: as for `Endpoint`.
        port: as for `Endpoint`.
        pages: as for `Endpoint`.
        name: of the endpoint, for the message.
        option: of `Monitoring`.
        remedy: what to do where the address cannot be had, for the message.

    Raises:
        ValueError: the address cannot be listened on; the message names it.
    """
    try:
        return Endpoint(host, port, pages)
    except (OSError, OverflowError, ValueError) as error:
        raise RefusedError(
            f"{name} cannot listen on {host!r}, port {port} ({error}): give another "
            f"Monitoring({option}=...){remedy}"
        ) from error


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
        raise RefusedError("there are ports 0 to 65535")
    flags = socket.AI_PASSIVE
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=flags)
    family, _, _, _, (literal, _, *zone) = found[0]
    # `::` accepts clients over IPv4 as well, if the system can.
    both = host == "::" and socket.has_dualstack_ipv6()
    address = (literal, port, *zone)
    listener = socket.create_server(address, family=family, dualstack_ipv6=both)
    listener.setblocking(False)
    return listener
