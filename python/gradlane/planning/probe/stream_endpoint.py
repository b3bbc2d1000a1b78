"""One rank's end of the streams that `links` measures with; every socket operation has a time
limit.

A connection identifies itself with a keyed hash, so that connections of other programs do not
count.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import select
import selectors
import socket
import statistics
import threading
import time
from collections.abc import Sequence
from types import TracebackType

from gradlane.formats.untrusted import EscapedError
from gradlane.planning.probe.goodput_reference import part_rates, receive_until, send_until

CONNECT_TIMEOUT_S = 10.0
_TOKEN_BYTES = 32
_CALLERS_MAX = 64
_RAMP_SHARE = 0.25
_ECHO_TIMEOUT_S = 5.0
_PART_SHARE = 0.1


class StreamError(EscapedError):
    """A connection failed; the text names the peer and its address."""


class StreamEndpoint:
    """A rank's listening socket, and the connections of the current phase."""

    def __init__(
        self,
        rank: int,
        hosts: Sequence[str],
        ports: tuple[int, int] | None,
        secret: bytes,
        window_s: float,
    ) -> None:
        """Start to listen.

        Args:
            rank: this rank.
            hosts: addresses to try to listen on.
            ports: lowest and highest port, or None for any.
            secret: of all ranks, for this measurement alone.
            window_s: seconds of a measurement.

        Raises:
            OSError: none of the addresses and ports is free.
        """
        self._rank = rank
        self._secret = secret
        self._window_s = window_s
        self._listener = listen_on(hosts, ports)
        self._listener.setblocking(False)
        self.host: str = self._listener.getsockname()[0]
        self.port: int = self._listener.getsockname()[1]
        self._sending: list[socket.socket] = []
        self._receiving: dict[int, socket.socket] = {}

    def __enter__(self) -> StreamEndpoint:
        """Return the node itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close all sockets."""
        self._close_all()
        self._listener.close()

    @property
    def connected_ranks(self) -> list[int]:
        """Ranks that have connected to this one."""
        return list(self._receiving)

    def connect(self, peers: Sequence[str], sends: Sequence[int], receives: Sequence[int]) -> None:
        """Connect to the ranks that this one sends to, and accept the others.

        Args:
            peers: every rank's `host:port`.
            sends: ranks to connect to.
            receives: ranks that connect to this one.

        Raises:
            StreamError: one cannot be reached, or did not come.
        """
        self._close_all()
        deadline_s = time.monotonic() + CONNECT_TIMEOUT_S
        for rank in sends:
            self._sending.append(self._connect_to(rank, peers[rank], deadline_s))
        expected = {_token(self._secret, rank, self._rank): rank for rank in receives}
        callers: dict[socket.socket, bytes] = {}
        try:
            while expected:
                self._read_callers(callers, expected, deadline_s)
        finally:
            for caller in callers:
                caller.close()

    def stream(self) -> dict[int, float]:
        """Send and receive at full rate; return payload bits a second by sending rank.

        Raises:
            StreamError: nothing arrived.
        """
        ramp_s = _RAMP_SHARE * self._window_s
        # The receiver ends the stream: its window opens when its program gets to read.
        end_s = time.monotonic() + 2 * CONNECT_TIMEOUT_S + ramp_s + self._window_s
        senders = [threading.Thread(target=send_until, args=(one, end_s)) for one in self._sending]
        rates: dict[int, float] = {}
        for sender in senders:
            sender.start()
        try:
            for rank, connection in self._receiving.items():
                connection.settimeout(ramp_s + self._window_s + _ECHO_TIMEOUT_S)
                rates[rank] = self._receive(connection, rank, ramp_s)
        finally:
            for connection in self._receiving.values():
                connection.close()
            for sender in senders:
                sender.join()
            self._close_all()
        return rates

    def echo(self, count: int) -> list[float]:
        """Measure round trips of one byte with the connected rank; return the times.

        Raises:
            StreamError: the other rank does not answer.
        """
        for connection in (*self._sending, *self._receiving.values()):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.settimeout(_ECHO_TIMEOUT_S)
        echo_thread = threading.Thread(
            target=_echo_bytes, args=(list(self._receiving.values()), count)
        )
        echo_thread.start()
        times = []
        try:
            for connection in self._sending:
                for _ in range(count):
                    start_s = time.perf_counter()
                    connection.sendall(b"?")
                    if connection.recv(1) != b"!":
                        raise StreamError("the other end of a round trip closed the connection")
                    times.append(time.perf_counter() - start_s)
        except TimeoutError as error:
            raise StreamError(f"no answer to a byte in {_ECHO_TIMEOUT_S:g} s") from error
        finally:
            echo_thread.join()
            self._close_all()
        return times

    def _receive(self, connection: socket.socket, rank: int, ramp_s: float) -> float:
        # The clocks of two machines have nothing in common: the window opens when bytes arrive.
        ready, _, _ = select.select([connection], [], [], CONNECT_TIMEOUT_S)
        if not ready:
            raise StreamError(f"nothing came from rank {rank} in {CONNECT_TIMEOUT_S:g} s")
        open_s = time.monotonic() + ramp_s
        limit_s = open_s + CONNECT_TIMEOUT_S
        while True:
            close_s = open_s + self._window_s
            arrivals = receive_until(connection, close_s)
            rates_bps = part_rates(arrivals, open_s, _PART_SHARE * self._window_s)
            if rates_bps:
                return statistics.median(rates_bps)
            # A process that got no processor for a whole window measures another one.
            open_s = time.monotonic()
            if not arrivals or arrivals[-1][0] < close_s or open_s > limit_s:
                raise StreamError(f"the stream from rank {rank} broke off")

    def _connect_to(self, rank: int, address: str, deadline_s: float) -> socket.socket:
        host, _, port = address.rpartition(":")
        host = host.strip("[]")
        try:
            remaining_s = max(0.1, deadline_s - time.monotonic())
            connection = socket.create_connection((host, int(port)), timeout=remaining_s)
            connection.sendall(_token(self._secret, self._rank, rank))
        except OSError as error:
            raise StreamError(f"rank {rank} at {address} cannot be reached ({error})") from error
        return connection

    def _read_callers(
        self, callers: dict[socket.socket, bytes], expected: dict[bytes, int], deadline_s: float
    ) -> None:
        """Read from all callers once.

        Args:
            callers: bytes of each so far, the first caller first.
            expected: missing ranks, by their token.
            deadline_s: for all of them, on the clock of `time.monotonic`.

        Raises:
            StreamError: a rank did not come in time.
        """
        with selectors.DefaultSelector() as selector:
            for connection in (self._listener, *callers):
                selector.register(connection, selectors.EVENT_READ)
            remaining_s = deadline_s - time.monotonic()
            ready = selector.select(max(0.0, remaining_s))
        if not ready or remaining_s <= 0:
            raise StreamError(
                f"rank {min(expected.values())} did not connect to {self.host}:{self.port} in "
                f"{CONNECT_TIMEOUT_S:g} s"
            )
        for key, _ in ready:
            ready_socket = key.fileobj
            assert isinstance(ready_socket, socket.socket)
            if ready_socket is self._listener:
                # The caller may have disconnected.
                with contextlib.suppress(BlockingIOError):
                    caller, _ = self._listener.accept()
                    caller.setblocking(False)
                    callers[caller] = b""
            elif ready_socket in callers:
                self._read(ready_socket, callers, expected)
        if len(callers) > _CALLERS_MAX:
            # A rank sends its token at once, so the oldest caller without one is no rank.
            first = next(iter(callers))
            del callers[first]
            first.close()

    def _read(
        self,
        connection: socket.socket,
        callers: dict[socket.socket, bytes],
        expected: dict[bytes, int],
    ) -> None:
        """Read a caller's token; keep a rank's connection, and close any other."""
        received = callers.pop(connection)
        try:
            part = connection.recv(_TOKEN_BYTES - len(received))
        except OSError:
            part = b""
        received += part
        if part and len(received) < _TOKEN_BYTES:
            callers[connection] = received
            return
        for token, rank in expected.items():
            if hmac.compare_digest(token, received):
                del expected[token]
                connection.setblocking(True)
                self._receiving[rank] = connection
                return
        connection.close()

    def _close_all(self) -> None:
        for connection in (*self._sending, *self._receiving.values()):
            connection.close()
        self._sending.clear()
        self._receiving.clear()


def _token(secret: bytes, caller: int, called: int) -> bytes:
    return hmac.new(secret, f"gradlane probe {caller} {called}".encode(), hashlib.sha256).digest()


def _echo_bytes(connections: Sequence[socket.socket], count: int) -> None:
    """Reply with a byte to each received one."""
    for connection in connections:
        with contextlib.suppress(OSError):
            for _ in range(count):
                if not connection.recv(1):
                    break
                connection.sendall(b"!")


def listen_on(hosts: Sequence[str], ports: tuple[int, int] | None) -> socket.socket:
    """Return a socket that listens on the first address and port that are free.

    Raises:
        OSError: none is.
    """
    last: OSError | None = None
    for host in hosts:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        for port in range(ports[0], ports[1] + 1) if ports else (0,):
            try:
                return socket.create_server((host, port), family=family)
            except OSError as error:
                last = error
    raise OSError(f"cannot listen on {', '.join(hosts)}: {last}")
