"""The choice of simulated clusters whose step is pictured on a page, and the pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gradlane.formats.timeline.step import Bar, StepView, view_of_step
from gradlane.planning.simulation.profiles import Profile
from gradlane.planning.simulation.scenarios import FORMULAS, Cluster
from gradlane.planning.simulation.timeline import simulated_timeline

PICTURES_MAX = 96
"""Pictures on a page; each takes some 25,000 bytes."""


@dataclass(frozen=True)
class Picture:
    """A step of rank 0 of one cluster."""

    row: int
    """Number of the cluster's row."""
    view: StepView

    def to_json(self) -> dict[str, Any]:
        """Return the picture for a page; times in microseconds, bars as lists to keep pages
        small."""
        lanes = {lane: [_bar(bar) for bar in bars] for lane, bars in self.view.lanes.items()}
        return {
            "row": self.row,
            "length_us": round(self.view.length_s * 1e6),
            "resolution_us": round(self.view.resolution_s * 1e6, 1),
            "lanes": lanes,
            "shares": {lane: round(share, 4) for lane, share in self.view.shares.items()},
        }


def _bar(bar: Bar) -> list[float | int]:
    """Return begin, length, tensor (-1: none), bytes, spans, and percent of the length that is
    covered."""
    tensor = -1 if bar.tensor is None else bar.tensor
    begin_us, length_us = round(bar.begin_s * 1e6), round(bar.length_s * 1e6, 1)
    covered = max(1, round(100 * bar.covered))
    return [begin_us, length_us, tensor, bar.size_bytes, bar.spans, covered]


def clusters_with_pictures(clusters: Sequence[Cluster]) -> list[int]:
    """Return the numbers of the clusters that get a picture.

    These are all if they are few; else those with the least compression, at evenly chosen numbers
    of workers and rates, each with all strategies.
    """
    candidates = [number for number, it in enumerate(clusters) if it.strategy not in FORMULAS]
    if len(candidates) <= PICTURES_MAX:
        return candidates
    least = min(clusters[number].compression for number in candidates)
    candidates = [number for number in candidates if clusters[number].compression == least]
    groups_by_cluster: dict[tuple[int, float], list[int]] = {}
    for number in candidates:
        cluster_key = (clusters[number].workers, clusters[number].rate_bps)
        groups_by_cluster.setdefault(cluster_key, []).append(number)
    groups = list(groups_by_cluster.values())
    count = max(1, min(len(groups), PICTURES_MAX // max(len(group) for group in groups)))
    chosen = {round(index * (len(groups) - 1) / max(1, count - 1)) for index in range(count)}
    return [number for index in sorted(chosen) for number in groups[index]][:PICTURES_MAX]


def picture_of(
    profile: Profile, cluster: Cluster, number: int, trace: dict[str, Any]
) -> Picture | None:
    """Return the picture of a cluster from its trace; None if the trace has no whole step."""
    numbers = {tensor.name: index for index, tensor in enumerate(profile.tensors)}
    timeline = simulated_timeline(trace, rate_bps=cluster.rate_bps, compression=cluster.compression)
    view = view_of_step(timeline, 0, numbers)
    return None if view is None else Picture(number, view)
