"""Callers of the metrics page: slow, many and strange ones cost the program a few descriptors."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator

import pytest

from gradlane.training.monitoring import endpoint as module
from gradlane.training.monitoring.endpoint import CLIENTS_MAX, REQUEST_BYTES_MAX, Endpoint, Page
from tests.waiting import eventually, threads_named

GET = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nUser-Agent: Prometheus/3\r\n\r\n"
PATIENCE_S = 60.0

StartEndpoint = Callable[..., Endpoint]


def pages(make: Callable[[], bytes]) -> dict[str, Page]:
    """The same page at two paths."""
    page = Page("text/plain", make)
    return {"/": page, "/metrics": page}


@pytest.fixture
def start() -> Iterator[StartEndpoint]:
    """Endpoints that end with the test."""
    with contextlib.ExitStack() as stack:

        def begin(
            page: Callable[[], bytes] = lambda: b"a 1\n", host: str = "127.0.0.1"
        ) -> Endpoint:
            one = Endpoint(host, 0, pages(page))
            stack.callback(one.close)
            return one

        yield begin


class Clock:
    """The endpoints' clock, which may be ahead; notes which threads have read it."""

    sleep = staticmethod(time.sleep)

    def __init__(self) -> None:
        self.ahead_s = 0.0
        self.askers: set[threading.Thread] = set()

    def monotonic(self) -> float:
        self.askers.add(threading.current_thread())
        return time.monotonic() + self.ahead_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of endpoints that are started later."""
    one = Clock()
    monkeypatch.setattr(module, "time", one)
    return one


def call(one: Endpoint) -> socket.socket:
    return socket.create_connection(one.address, timeout=PATIENCE_S)


def read_all(client: socket.socket) -> bytes:
    """Everything until the other side closes; what a reset leaves counts as closed."""
    read = b""
    with contextlib.suppress(ConnectionResetError):
        while chunk := client.recv(65_536):
            read += chunk
    return read


def ask(one: Endpoint, request: bytes = GET) -> tuple[str, bytes]:
    """Status line and body of an answer."""
    with call(one) as client:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            client.sendall(request)
        head, _, body = read_all(client).partition(b"\r\n\r\n")
        return head.split(b"\r\n")[0].decode(), body


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_page_is_answered_also_over_ipv6_and_on_all_addresses(start: StartEndpoint) -> None:
    hosts = ["127.0.0.1", "localhost", "0.0.0.0"]
    with contextlib.suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        hosts += ["::1", "::"]
    for host in hosts:
        one = start(host=host)
        assert ask(one) == ("HTTP/1.1 200 OK", b"a 1\n")
        if host == "::":
            client = socket.create_connection(("127.0.0.1", one.port), timeout=PATIENCE_S)
            with client:
                client.sendall(GET)
                assert read_all(client).endswith(b"a 1\n")


def test_250_slow_clients_take_a_few_descriptors_and_block_no_other(start: StartEndpoint) -> None:
    one = start()
    before, threads = descriptors(), threading.active_count()
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(call(one)) for _ in range(250)]
        for client in slow:
            with contextlib.suppress(OSError):
                client.sendall(b"GET /metr")
        assert ask(one) == ("HTTP/1.1 200 OK", b"a 1\n")
        assert descriptors() - before <= 250 + CLIENTS_MAX
        assert threading.active_count() == threads
        # All but the last ones are hung up on, by the deadline or for the sake of later ones.
        assert all(read_all(client) == b"" for client in slow[: 250 - CLIENTS_MAX])


@pytest.mark.parametrize("drip", [b"x", b"\r", b" "])
def test_a_caller_that_drips_has_one_deadline_for_all(
    start: StartEndpoint, monkeypatch: pytest.MonkeyPatch, drip: bytes
) -> None:
    """A deadline for each read would be renewed by each byte."""
    monkeypatch.setattr(module, "REQUEST_TIMEOUT_S", 0.3)
    one = start()
    with call(one) as client:

        def is_hung_up_on() -> bool:
            try:
                client.sendall(drip)
            except OSError:
                return True
            return False

        assert eventually(is_hung_up_on, within_s=PATIENCE_S)


def test_a_caller_that_does_not_read_its_answer_is_hung_up_on(
    start: StartEndpoint, clock: Clock
) -> None:
    made = threading.Event()

    def page() -> bytes:
        # The time is up once the answer has begun, however slow the machine is.
        clock.ahead_s = module.REQUEST_TIMEOUT_S - 0.2
        made.set()
        return bytes(64 << 20)

    one = start(page)
    before = descriptors()
    with call(one) as client:
        client.sendall(GET)
        assert made.wait(PATIENCE_S)
        assert eventually(lambda: descriptors() == before + 1, within_s=PATIENCE_S)
        assert len(read_all(client)) < 64 << 20


def test_a_caller_that_stays_after_its_answer_is_hung_up_on(
    start: StartEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REQUEST_TIMEOUT_S", 0.3)
    one = start()
    before = descriptors()
    with call(one) as client:
        client.sendall(GET)
        read_all(client)
        assert eventually(lambda: descriptors() == before + 1, within_s=PATIENCE_S)


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "200"),
        (b"GET /metrics?x=\x1b[2J HTTP/1.0\n\n", "200"),
        (b"HEAD /metrics HTTP/1.1\r\n\r\n", "200"),
        (b"GET /other HTTP/1.1\r\n\r\n", "404"),
        (b"GET /../metrics HTTP/1.1\r\n\r\n", "404"),
        (b"POST /metrics HTTP/1.1\r\nContent-Length: 9\r\n\r\n123456789", "405"),
        (b"DELETE / HTTP/1.1\r\n\r\n", "405"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "400"),
        (b"GET /metrics\r\n\r\n", "400"),
        (b"\r\n\r\n", "400"),
        (b"\x16\x03\x01\x02\x00 tls\n\n", "400"),
        (b"GET /" + b"a" * REQUEST_BYTES_MAX + b" HTTP/1.1\r\n\r\n", "431"),
        (b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * REQUEST_BYTES_MAX, "431"),
    ],
)
def test_requests_are_answered_by_their_first_line(
    start: StartEndpoint, request_: bytes, status: str
) -> None:
    line, body = ask(start(), request_)
    assert line.split(" ")[1] == status
    assert (body == b"a 1\n") == (status == "200" and not request_.startswith(b"HEAD"))
    assert b"\x1b" not in body


def test_noise_ends_nothing_and_is_not_repeated(
    start: StartEndpoint, capfd: pytest.CaptureFixture[str]
) -> None:
    one = start()
    draw = random.Random(16)
    for _ in range(40):
        noise = draw.randbytes(draw.randrange(1, 12_000))
        with call(one) as client:
            with contextlib.suppress(OSError):
                client.sendall(noise)
                client.shutdown(socket.SHUT_WR)
            answer = read_all(client)
        assert answer == b"" or answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 431"))
    assert ask(one) == ("HTTP/1.1 200 OK", b"a 1\n")
    assert capfd.readouterr() == ("", "")


def test_clients_do_not_make_the_page_anew(
    start: StartEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    age_s = 3600.0
    monkeypatch.setattr(module, "PAGE_AGE_S", age_s)
    one = start(lambda: b"%d\n" % len(made) if not made.append(1) else b"")  # type: ignore[func-returns-value]
    assert {ask(one) for _ in range(5)} == {("HTTP/1.1 200 OK", b"1\n")}
    monkeypatch.setattr(module, "PAGE_AGE_S", 0.0)
    assert ask(one)[1] == b"2\n"


def test_numbers_that_cannot_be_had_are_no_traceback(
    start: StartEndpoint, capfd: pytest.CaptureFixture[str]
) -> None:
    def page() -> bytes:
        raise RuntimeError("the session is closed")

    one = start(page)
    assert ask(one) == ("HTTP/1.1 503 Service Unavailable", b"")
    assert capfd.readouterr() == ("", "")


def test_closing_disconnects_at_once_and_frees_the_port(start: StartEndpoint) -> None:
    before = descriptors()
    one = start()
    with call(one) as client:
        client.sendall(b"GET /metr")
        one.close()
        assert read_all(client) == b""
    one.close()
    assert descriptors() == before
    Endpoint("127.0.0.1", one.port, {}).close()


@pytest.mark.parametrize(
    ("host", "is_answered"),
    [
        *((name, True) for name in ("localhost", "LocalHost:9400", "127.0.0.1:1", "[::1]:9400")),
        *((name, True) for name in ("10.0.0.7", "[fe80::1]")),
        *((name, False) for name in ("", "evil.example", "evil.example:9400", "localhost.evil")),
        *((name, False) for name in ("127.0.0.1.evil.example", "[evil]:1", "\xff", "a\r\nHost: b")),
        ("localhost\r\nhost: evil.example", False),
    ],
)
def test_on_loopback_names_of_other_sites_are_not_answered(
    start: StartEndpoint, host: str, is_answered: bool
) -> None:
    """A page whose name leads here after it was loaded (DNS rebinding) is not of this server."""
    request = f"GET / HTTP/1.1\r\nHost: {host}\r\n\r\n".encode("latin-1")
    line, body = ask(start(), request)
    assert line == "HTTP/1.1 200 OK" if is_answered else line.startswith("HTTP/1.1 421 ")
    assert (body == b"a 1\n") == is_answered
    # Who asks for an address by name has said which name is this machine's.
    assert ask(start(host="localhost"), GET)[0] == "HTTP/1.1 200 OK"
    assert ask(start(host="0.0.0.0"), request)[0] == "HTTP/1.1 200 OK"


def test_a_follower_has_the_next_state_when_it_is_due_and_the_last_one_at_the_end(
    start: StartEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = iter(range(1000))
    one = start(lambda: b"%d" % next(states))
    follow = GET.replace(b"/metrics", b"/metrics?next")
    assert ask(one, follow)[1] == b"0"
    assert ask(one, follow)[1] == b"1"
    monkeypatch.setattr(module, "PAGE_AGE_S", 3600.0)
    with call(one) as client:
        client.sendall(follow)
        # Requests are read in the order of their connections.
        assert ask(one)[1] == b"1"
        one.close()
        assert read_all(client).endswith(b"\r\n\r\n2")
    with pytest.raises(ConnectionRefusedError):
        call(one)


def test_a_follower_between_two_requests_is_waited_for_at_the_end(
    start: StartEndpoint, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    monkeypatch.setattr(module, "PAGE_AGE_S", 0.05)
    monkeypatch.setattr(module, "FAREWELL_S", PATIENCE_S)
    states = [b"state"]
    one = start(lambda: states[-1])
    follow = GET.replace(b"/metrics", b"/?next")
    assert ask(one, follow)[1] == b"state"
    states.append(b"last")
    closing = threading.Thread(target=one.close)
    closing.start()
    assert eventually(lambda: closing in clock.askers, within_s=PATIENCE_S)
    assert ask(one, follow)[1] == b"last"
    closing.join(PATIENCE_S)
    assert not closing.is_alive()


def test_followers_that_are_gone_or_do_not_read_delay_no_end(start: StartEndpoint) -> None:
    others = threads_named("gradlane-metrics")
    one = start(lambda: bytes(16 << 20))
    with contextlib.ExitStack() as stack:
        for _ in range(CLIENTS_MAX - 1):
            stack.enter_context(call(one)).sendall(b"GET /?next HTTP/1.1\r\n\r\n")
        # Requests are read in the order of their connections.
        assert ask(one)[0] == "HTTP/1.1 200 OK"
        one.close()
        assert threads_named("gradlane-metrics") <= others


def test_a_forked_child_keeps_no_connection_open(start: StartEndpoint) -> None:
    """A child that held a caller's socket would keep it open for as long as the child lives."""
    one = start()
    before = descriptors()
    with call(one) as client:
        assert eventually(lambda: descriptors() == before + 2, within_s=PATIENCE_S)
        reader, writer = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            os.close(writer)
            one.forget_in_child()
            os.read(reader, 1)
            os._exit(0)
        os.close(reader)
        try:
            client.sendall(GET)
            assert read_all(client).endswith(b"a 1\n")
            one.close()
            with pytest.raises(ConnectionRefusedError):
                call(one)
        finally:
            os.close(writer)
            os.waitpid(child, 0)
