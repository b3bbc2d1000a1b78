"""A session's numbers for Prometheus: the text format, and a small server for it.

The text format 0.0.4 is a page of rules that have not changed in years, and the server is Python's
own; so this asks for no package (see decision 21).
"""

from __future__ import annotations

import contextlib
import socketserver
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from gradlane.observability.metrics import Metrics, waited_s
from gradlane.ranks.environment import find_local_rank

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_STOP_WITHIN_S = 0.1
ASK_WITHIN_S = 10.0
"""Who has called is heard for so long."""


@dataclass(frozen=True)
class _Family:
    """One metric: name without prefix, kind, help, and values by labels."""

    name: str
    kind: str
    text: str
    samples: Sequence[tuple[Mapping[str, object], float]]


def exposition(metrics: Metrics) -> str:
    """Return the numbers in Prometheus' text format."""
    lines = []
    always = {"rank": metrics["rank"]}
    for family in _families(metrics):
        name = f"gradlane_{family.name}"
        lines.append(f"# HELP {name} {_escaped(family.text, quotes=False)}")
        lines.append(f"# TYPE {name} {family.kind}")
        for labels, value in family.samples:
            pairs = {**always, **labels}.items()
            text = ",".join(f'{key}="{_escaped(str(one))}"' for key, one in pairs)
            lines.append(f"{name}{{{text}}} {float(value)!r}")
    return "\n".join(lines) + "\n"


def _families(metrics: Metrics) -> Iterable[_Family]:
    steps = metrics["steps"]
    peers: list[Mapping[str, Any]] = [
        row for row in metrics["peers"] if row["rank"] != metrics["rank"]
    ]

    def one(name: str, kind: str, text: str, value: float) -> _Family:
        return _Family(name, kind, text, [({}, value)])

    def by_peer(name: str, kind: str, text: str, key: str) -> _Family:
        samples = [({"peer": row["rank"]}, float(row[key])) for row in peers]
        return _Family(name, kind, text, samples)

    yield one("steps_total", "counter", "Training steps begun.", metrics["step"])
    yield one("step_seconds", "gauge", "Median time of a recent step.", steps["median_s"])
    yield one("step_wait_seconds", "gauge", "Median wait of a recent step.", steps["wait_median_s"])
    yield one("wait_seconds_total", "counter", "Waits for other ranks.", metrics["wait_s"])
    yield one("wait_share", "gauge", "Share of steps spent waiting.", steps["wait_share"])
    for way, direction in (("sent", "tx"), ("received", "rx")):
        yield by_peer(f"{way}_bytes_total", "counter", f"Bytes {way}.", f"{direction}_bytes")
        yield by_peer(
            f"{way}_payload_bytes_total",
            "counter",
            f"Bytes {way}, without headers.",
            f"{direction}_payload_bytes",
        )
    yield one("codec_ratio", "gauge", "Bytes before encoding through sent.", metrics["codec_ratio"])
    yield by_peer("queued_bytes", "gauge", "Bytes that wait to be sent.", "queued_bytes")
    yield by_peer("queued_messages", "gauge", "Messages that wait to be sent.", "queued_messages")
    yield one("queued_works", "gauge", "Works that wait for a thread.", metrics["queued_works"])
    yield one("scratch_bytes", "gauge", "Memory of the engine's own.", metrics["scratch_bytes"])
    for thread in ("io", "work"):
        used = metrics["io_cpu_s"] if thread == "io" else metrics["work_cpu_s"]
        yield one(f"{thread}_cpu_seconds_total", "counter", f"CPU of {thread} threads.", used)
    yield _Family(
        "layer_wait_seconds_total",
        "counter",
        "Waits for the parameters of a layer.",
        [
            ({"model": wait["model"], "layer": wait["name"]}, waited_s(wait))
            for wait in metrics["layer_waits"]
        ],
    )
    yield one(
        "gathered_slices_total",
        "counter",
        "Slices of this rank that all have contributed to.",
        metrics["gathered_slices"],
    )
    yield _Family(
        "last_contributions_total",
        "counter",
        "Slices of this rank that a rank was the last to contribute to.",
        [({"from": row["rank"]}, row["last_count"]) for row in metrics["stragglers"]],
    )
    yield _Family(
        "late_seconds_total",
        "counter",
        "Time that these came after the contribution before them.",
        [({"from": row["rank"]}, row["late_s"]) for row in metrics["stragglers"]],
    )
    yield one(
        "refused_connections_total",
        "counter",
        "Callers that were refused.",
        metrics["refused_connections"],
    )


def _escaped(text: str, *, quotes: bool = True) -> str:
    text = text.replace("\\", r"\\").replace("\n", r"\n")
    return text.replace('"', r"\"") if quotes else text


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def server_bind(self) -> None:
        # As HTTPServer does, but without asking name servers who this machine is.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "gradlane", int(self.server_address[1])


class Endpoint:
    """Answers `GET /metrics` in threads of its own."""

    def __init__(self, host: str, port: int, metrics: Callable[[], Metrics]) -> None:
        """Listen from now on.

        Args:
            host: address to listen on; empty for all.
            port: port to listen on; 0 for any that is free.
            metrics: returns the numbers; called in another thread for each question.

        Raises:
            ValueError: the address cannot be listened on; the message names it.
        """

        class Answer(BaseHTTPRequestHandler):
            # Who calls and asks nothing, or is cut off, must not keep thread and socket for good.
            timeout = ASK_WITHIN_S

            def do_GET(self) -> None:
                if self.path.partition("?")[0] not in ("/", "/metrics"):
                    self.send_error(404, "the metrics are at /metrics")
                    return
                page = exposition(metrics()).encode()
                self.send_response(200)
                self.send_header("Content-Type", CONTENT_TYPE)
                self.send_header("Content-Length", str(len(page)))
                self.end_headers()
                # Whoever asked may be gone.
                with contextlib.suppress(OSError):
                    self.wfile.write(page)

            def log_message(self, format: str, *arguments: object) -> None:
                """Say nothing: a question every few seconds is no news."""

        try:
            self._server = _Server((host, port), Answer)
        except (OSError, OverflowError) as error:
            raise ValueError(
                f"the Prometheus endpoint cannot listen on {host or '*'}:{port} ({error}): give "
                "another prometheus_port; ranks of one node take the ports from it on, by their "
                "local rank"
            ) from error
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            args=(_STOP_WITHIN_S,),
            name="gradlane-prometheus",
            daemon=True,
        )
        self._thread.start()

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Stop answering."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def forget_in_child(self) -> None:
        """Let go of the socket in a forked child, which has no thread to answer."""
        self._server.socket.close()


def wanted_address(port: int | None, environment: Mapping[str, str]) -> tuple[str, int] | None:
    """Return where this rank is to answer: as the program says, else as `GRADLANE_PROMETHEUS` does.

    Ranks of one node take one port each, by their local rank.

    Args:
        port: the program's, for all of this machine's addresses; or None.
        environment: the variables.

    Returns:
        Host (empty for all addresses) and port, or None for no endpoint.

    Raises:
        ValueError: the variable is neither a port nor `host:port`.
    """
    text = environment.get("GRADLANE_PROMETHEUS")
    if port is None and not text:
        return None
    host, first = ("", port) if port is not None else parse_address(text or "")
    return host, first + find_local_rank(environment) if first else 0


def parse_address(text: str) -> tuple[str, int]:
    """Read `PORT` or `HOST:PORT`, as `GRADLANE_PROMETHEUS` has it.

    Raises:
        ValueError: it is neither.
    """
    host, _, port = text.rpartition(":")
    if not port.isdigit() or int(port) > 65535:
        raise ValueError(f"GRADLANE_PROMETHEUS is {text!r}; it must be PORT or HOST:PORT")
    return host.strip("[]"), int(port)
