"""Bytes through the ports in a run: their balance over nodes and owners, and their course.

The course is as in figures 8 and 9 of the P3 paper, which sampled one machine's interface every
10 ms. Here all ports are sampled, in real time: with a dilation of D, 10 ms are 10/D nominal
milliseconds.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradlane.lab.cluster.counters import Recording

INTERVAL_S = 0.01
"""Real time of an interval."""


@dataclass(frozen=True)
class NodeTraffic:
    """Bytes of a step through a node's port."""

    node: int
    rx_bytes_per_step: float
    tx_bytes_per_step: float

    @property
    def busier_bytes(self) -> float:
        """Bytes of a step in the direction that carried more."""
        return max(self.rx_bytes_per_step, self.tx_bytes_per_step)


@dataclass(frozen=True)
class OwnerTraffic:
    """Bytes of a step of payloads to and from a rank as an owner of gradients."""

    rank: int
    owned_bytes: int
    """Of gradients that it adds up or makes for all."""
    rx_bytes_per_step: float
    tx_bytes_per_step: float


@dataclass(frozen=True)
class OwnerCounters:
    """Counters of a rank's work as an owner of gradients."""

    owned_bytes: int
    """Of gradients that it adds up or makes for all ranks."""
    rx_bytes: int
    """Of payloads that it got for these."""
    tx_bytes: int
    """Of payloads that it sent for these."""

    @staticmethod
    def from_json(content: Mapping[str, Any] | None) -> OwnerCounters | None:
        """Return the counters that a rank has sent; None: nobody owns anything."""
        return None if content is None else OwnerCounters(**content)

    def since(self, before: OwnerCounters) -> OwnerCounters:
        """Return what was counted since then."""
        return OwnerCounters(
            self.owned_bytes, self.rx_bytes - before.rx_bytes, self.tx_bytes - before.tx_bytes
        )


@dataclass(frozen=True)
class Balance:
    """How evenly a run's traffic was spread."""

    nodes: list[NodeTraffic]
    owners: list[OwnerTraffic]
    """Empty where nobody owns anything."""
    port_imbalance: float
    """Of the busier direction of each port, largest over mean."""
    owned_imbalance: float
    """Of owned bytes, largest over mean."""

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> Balance:
        """Return the balance that a row's file has."""
        return Balance(
            [NodeTraffic(**node) for node in content["nodes"]],
            [OwnerTraffic(**owner) for owner in content.get("owners", ())],
            float(content["port_imbalance"]),
            float(content.get("owned_imbalance", 1.0)),
        )


def imbalance(values: Sequence[float]) -> float:
    """Return the largest over the mean; 1.0 where there is nothing."""
    mean = statistics.fmean(values) if values else 0.0
    return max(values) / mean if mean > 0 else 1.0


def balance_of(
    ports: Sequence[tuple[float, float]], ranks: Sequence[OwnerCounters], steps: int
) -> Balance:
    """Return the balance of a run.

    Args:
        ports: (received, sent) bytes of each node in all these steps.
        ranks: what each rank counted in them as an owner; empty where nobody owns anything.
        steps: between two moments at which nobody had anything to send.
    """
    return Balance(
        [NodeTraffic(node, rx / steps, tx / steps) for node, (rx, tx) in enumerate(ports)],
        [
            OwnerTraffic(number, rank.owned_bytes, rank.rx_bytes / steps, rank.tx_bytes / steps)
            for number, rank in enumerate(ranks)
        ],
        imbalance([max(pair) for pair in ports]),
        imbalance([rank.owned_bytes for rank in ranks]),
    )


@dataclass(frozen=True)
class Activity:
    """Activity of ports and ranks during the measured steps of a run, by interval.

    Attributes:
        wall_interval_s: real time of an interval.
        wall_sample_gap_s_median: what the sampler really kept.
        wall_sample_gap_s_max: the longest time between two samples.
        step_starts_s: nominal, since the window began; the last one's end included.
        received_bytes: a list of intervals for each node.
        sent_bytes: a list of intervals for each node.
        rank_cpu_s: real processor seconds in each interval, a list for each rank.
    """

    wall_interval_s: float
    wall_sample_gap_s_median: float
    wall_sample_gap_s_max: float
    step_starts_s: list[float]
    received_bytes: list[list[int]]
    sent_bytes: list[list[int]]
    rank_cpu_s: list[list[float]]

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> Activity:
        """Return the activity that a row's file has."""
        return Activity(**content)


def activity_of(recording: Recording, dilation: float) -> Activity:
    """Return the activity of a run that was sampled."""
    start_s, end_s = recording.boundaries_s[0], recording.boundaries_s[-1]
    count = max(1, int((end_s - start_s) / INTERVAL_S))
    edges_s = [start_s + index * INTERVAL_S for index in range(count + 1)]
    received, sent = recording.record.port_bins(edges_s)
    gaps_s = recording.record.sample_gaps_s(start_s, end_s) or [0.0]
    return Activity(
        wall_interval_s=INTERVAL_S,
        wall_sample_gap_s_median=statistics.median(gaps_s),
        wall_sample_gap_s_max=max(gaps_s),
        step_starts_s=[(edge_s - start_s) / dilation for edge_s in recording.boundaries_s],
        received_bytes=received,
        sent_bytes=sent,
        rank_cpu_s=recording.record.process_bins(edges_s),
    )
