"""Bandwidth and latency measured between the ranks of a cluster."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, field
from typing import Any

from gradlane.formats.rates import format_rate

PAYLOAD_SHARE = 1448 / 1514
"""Payload of a full TCP segment over its bytes on an Ethernet."""


@dataclass(frozen=True)
class PortFigures:
    """The measured rates of one rank's port.

    Attributes:
        rank: of the port.
        send_bps: sent payload bits a second without receiving; None if not measured.
        receive_bps: received payload bits a second without sending; None if not measured.
        both_send_bps: sent while receiving as much.
        both_receive_bps: received while sending as much.
    """

    rank: int
    send_bps: float | None
    receive_bps: float | None
    both_send_bps: float
    both_receive_bps: float


@dataclass(frozen=True)
class RoundTrip:
    """Round-trip time between two ranks without other traffic: a median."""

    rank: int
    peer: int
    round_trip_s: float


@dataclass(frozen=True)
class LinkReport:
    """The measured links between all ranks.

    Attributes:
        workers: number of ranks.
        window_s: seconds of each measurement.
        ports: one a rank, in their order; empty with one rank.
        round_trips: some pairs; empty with one rank.
    """

    workers: int
    window_s: float
    ports: tuple[PortFigures, ...] = field(default=())
    round_trips: tuple[RoundTrip, ...] = field(default=())

    def __repr__(self) -> str:
        if not self.ports:
            return f"<LinkReport of {self.workers} ranks: no links>"
        rate = format_rate(self.rate_bps)
        delay = f", {self.latency_s * 1e6:.0f} us one way" if self.round_trips else ""
        return f"<LinkReport of {self.workers} ranks: {rate}{delay}>"

    @property
    def rate_bps(self) -> float:
        """Rate of the slowest port in both directions at once, packet headers included."""
        goodput_bps = min(min(port.both_send_bps, port.both_receive_bps) for port in self.ports)
        return goodput_bps / PAYLOAD_SHARE

    @property
    def latency_s(self) -> float:
        """One-way time between two ranks: half the median round trip."""
        return statistics.median(pair.round_trip_s for pair in self.round_trips) / 2.0

    def to_json(self) -> dict[str, Any]:
        """Return all fields with the units in the keys."""
        figures: dict[str, Any] = {"workers": self.workers, "window_s": self.window_s}
        if self.ports:
            figures |= {"rate_bps": self.rate_bps, "latency_s": self.latency_s}
        return {
            **figures,
            "ports": [asdict(port) for port in self.ports],
            "round_trips": [asdict(pair) for pair in self.round_trips],
        }
