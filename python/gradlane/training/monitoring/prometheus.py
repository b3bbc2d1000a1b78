"""Metrics for Prometheus: the text format, and the endpoint.

The text format 0.0.4 is a page of rules that have not changed in years, so this needs no package
(see decision 21).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradlane.training.monitoring.endpoint import Endpoint, Page, open_endpoint
from gradlane.training.monitoring.metrics import Metrics, waited_s

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True)
class _Family:
    """A metric: name without prefix, kind, help, and values by labels."""

    name: str
    kind: str
    text: str
    samples: Sequence[tuple[Mapping[str, object], float]]


def exposition(metrics: Metrics, residual_norm: float | None = None) -> str:
    """Return the metrics in Prometheus' text format.

    Args:
        metrics: the session's.
        residual_norm: of all residuals together; None: no codec keeps one, or none was read yet.
    """
    lines = []
    always = {"rank": metrics["rank"]}
    residuals = _Family(
        "residual_norm",
        "gauge",
        "Norm of what codecs have yet to send.",
        [] if residual_norm is None else [({}, residual_norm)],
    )
    for family in (*_families(metrics), residuals):
        name = f"gradlane_{family.name}"
        lines.append(f"# HELP {name} {_label(family.text, quotes=False)}")
        lines.append(f"# TYPE {name} {family.kind}")
        for labels, value in family.samples:
            pairs = {**always, **labels}.items()
            text = ",".join(f'{key}="{_label(str(one))}"' for key, one in pairs)
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
    yield one("members", "gauge", "Ranks that train.", len(metrics["members"]))
    yield one(
        "lost_ranks_total", "counter", "Ranks that training goes on without.", len(metrics["lost"])
    )
    yield one(
        "lost_residuals_total",
        "counter",
        "Tensors of which a lost rank had not sent all, each time.",
        sum(row["residuals"] for row in metrics["lost"]),
    )
    yield one("joined_ranks_total", "counter", "Ranks that have joined.", len(metrics["joined"]))
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
    calls, clipped = metrics["clip_steps"], metrics["clipped_steps"]
    factor = metrics["clip_factor"]
    yield one("clip_steps_total", "counter", "Steps with a limit of the norm.", calls)
    yield one("clipped_steps_total", "counter", "Steps whose gradients were scaled down.", clipped)
    yield one("clip_factor", "gauge", "Factor of the last step's gradients.", factor)
    yield by_peer("queued_bytes", "gauge", "Bytes that wait to be sent.", "queued_bytes")
    yield by_peer("queued_messages", "gauge", "Messages that wait to be sent.", "queued_messages")
    yield one("queued_jobs", "gauge", "Jobs that wait for a thread.", metrics["queued_jobs"])
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


def _label(text: str, *, quotes: bool = True) -> str:
    text = text.replace("\\", r"\\").replace("\n", r"\n")
    return text.replace('"', r"\"") if quotes else text


def serve(
    host: str,
    port: int,
    metrics: Callable[[], Metrics],
    residual_norm: Callable[[], float | None] = lambda: None,
) -> Endpoint:
    """Start to serve the metrics.

    Args:
        host: address to listen on.
        port: port to listen on; 0 for any that is free.
        metrics: returns the numbers; called in another thread, once a second at most.
        residual_norm: as in `exposition`; called likewise.

    Raises:
        ValueError: the address cannot be listened on; the message names it.
    """
    page = Page(CONTENT_TYPE, lambda: exposition(metrics(), residual_norm()).encode())
    return open_endpoint(
        host,
        port,
        {"/": page, "/metrics": page},
        name="the Prometheus endpoint",
        option="prometheus",
        remedy="; ranks of one node take the ports from it on, by their local rank",
    )
