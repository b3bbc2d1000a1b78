"""What ports and ranks did during the measured steps of a run, interval after interval.

As in figures 8 and 9 of the P3 paper, which sampled one machine's interface every 10 ms. Here all
ports are sampled, in real time: with a dilation of D, 10 ms are 10/D nominal milliseconds.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradlane.lab.cluster.counters import Recording

INTERVAL_S = 0.01
"""Real time of an interval."""
IDLE_BELOW = 0.05
"""A port that carries less than this share of its goodput in an interval is idle in it."""


def activity_of(recording: Recording, dilation: float) -> dict[str, Any]:
    """Return the activity of a run as it is kept in its row.

    Returns:
        `wall_interval_s`, `wall_sample_gap_s_median` and `_max` (what the sampler really kept);
        `step_starts_s` (nominal, since the window began, the last one's end included);
        `received_bytes` and `sent_bytes`: a list of intervals for each node; `rank_cpu_s`: real
        processor seconds in each interval, a list for each rank.
    """
    start_s, end_s = recording.boundaries_s[0], recording.boundaries_s[-1]
    count = max(1, int((end_s - start_s) / INTERVAL_S))
    edges_s = [start_s + index * INTERVAL_S for index in range(count + 1)]
    received, sent = recording.record.port_bins(edges_s)
    gaps_s = recording.record.sample_gaps_s(start_s, end_s) or [0.0]
    return {
        "wall_interval_s": INTERVAL_S,
        "wall_sample_gap_s_median": statistics.median(gaps_s),
        "wall_sample_gap_s_max": max(gaps_s),
        "step_starts_s": [(edge_s - start_s) / dilation for edge_s in recording.boundaries_s],
        "received_bytes": received,
        "sent_bytes": sent,
        "rank_cpu_s": recording.record.process_bins(edges_s),
    }


@dataclass(frozen=True)
class PortUse:
    """One direction of one node's port over the measured steps."""

    node: int
    direction: str
    """`in` or `out`."""
    bytes_per_step: float
    idle_share: float
    """Share of the intervals in which it carried almost nothing."""
    unused_share: float
    """Share of what it could have carried that it did not."""


def ports_of(row: Mapping[str, Any]) -> list[PortUse]:
    """Return the use of every port and direction in a row with `activity`."""
    activity = row["activity"]
    real_bps = float(row["goodput_bps"]) / float(row["dilation"])
    carriable = real_bps / 8 * float(activity["wall_interval_s"])
    found = []
    for direction, name in (("in", "received_bytes"), ("out", "sent_bytes")):
        for node, moved in enumerate(activity[name]):
            idle = sum(count < IDLE_BELOW * carriable for count in moved)
            found.append(
                PortUse(
                    node,
                    direction,
                    sum(moved) / int(row["steps"]),
                    idle / len(moved),
                    1.0 - sum(moved) / (carriable * len(moved)),
                )
            )
    return found


def busiest_port(row: Mapping[str, Any]) -> PortUse:
    """Return the port and direction that carried the most bytes."""
    return max(ports_of(row), key=lambda port: port.bytes_per_step)


def is_communication_bound(row: Mapping[str, Any]) -> bool:
    """Whether even perfect overlap would leave compute waiting, so that a port need not be idle."""
    bound_s = row.get("bound_step_s")
    return bound_s is not None and float(bound_s) > 1.001 * float(row["compute_s"])


def least_unused(row: Mapping[str, Any]) -> float | None:
    """Return the share of its capacity that the busiest port must leave unused even at the bound.

    It is above nothing where the bound is set by what comes late and is needed early.
    """
    if not row.get("bound_step_s"):
        return None
    port_s = 8 * busiest_port(row).bytes_per_step / float(row["goodput_bps"])
    return max(0.0, 1.0 - port_s / float(row["bound_step_s"]))


def summed(values: Sequence[float], together: int) -> list[float]:
    """Return sums of so many neighbouring intervals; a rest at the end is left out."""
    whole = len(values) // together
    return [sum(values[index * together : (index + 1) * together]) for index in range(whole)]
