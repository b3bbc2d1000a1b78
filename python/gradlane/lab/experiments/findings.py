"""What rows of the bandwidth experiment show: gains, distances to the bound, and their order.

Each comparison is of rows of one cluster: the same network, ranks, rate and dilation.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradlane.lab.experiments.simulated import SIMULATED
from gradlane.lab.runs.cells import CEILING, MEASURED
from gradlane.lab.runs.strategy import parse_strategy

Row = Mapping[str, Any]
ORDER = (
    ("p3", "slicing", "the same slices, the most urgent first"),
    ("slicing", "wfbp", "finer slices, and no barrier between steps"),
    ("wfbp", "kvstore", "broadcast at once, large tensors spread evenly"),
    ("kvstore", "deferred-pull", "results are pulled before the next step begins"),
)
"""Of each pair the first ought to be at least as fast, and why."""
TOLERANCE = 0.02
"""Steps that differ by less are taken as equal: runs repeat within this."""
GOAL_OVER_BOUND = 1.05


@dataclass(frozen=True)
class Gain:
    """A strategy beside the best DDP of the same cluster."""

    row: Row
    baseline: str
    ratio: float
    """The best DDP's step time over this one's."""


@dataclass(frozen=True)
class Reversal:
    """Two strategies whose order is not the expected one."""

    faster: Row
    slower: Row
    """The one that ought to be at least as fast."""
    reason: str
    """Why it ought to be."""
    ratio: float
    """Step time of what ought to be faster over the other's."""
    simulated_ratio: float | None
    """The same in the simulator; None where it was not simulated."""
    spread: float
    """How far the measured steps of the two lie apart, over their median."""

    @property
    def explanation(self) -> str:
        """What the simulator and the repeats say about it."""
        if self.spread > self.ratio - 1.0:
            return f"steps of one run differ by {self.spread:.1%}, more than the two runs do"
        if self.simulated_ratio is None:
            return "not simulated"
        if self.simulated_ratio > 1.0 + TOLERANCE / 4:
            return f"the simulator has it too ({self.simulated_ratio - 1:+.1%}): not noise"
        return f"the simulator has the expected order ({self.simulated_ratio - 1:+.1%})"


def measured(rows: Sequence[Row]) -> list[Row]:
    """Return the measured rows that are evidence."""
    return [row for row in rows if row.get("source", MEASURED) == MEASURED and not row["cpu_bound"]]


def simulated(rows: Sequence[Row]) -> list[Row]:
    """Return the simulated rows."""
    return [row for row in rows if row.get("source") == SIMULATED]


def cluster_of(row: Row) -> tuple[Any, ...]:
    """Return what rows that are compared have in common."""
    return row["workload"], row.get("workers"), row["rate_bps"], row.get("dilation")


def clusters_of(rows: Sequence[Row]) -> list[tuple[Any, ...]]:
    """Return the clusters in the rows, by network as it comes, then by rate."""
    workloads = list(dict.fromkeys(str(row["workload"]) for row in rows))
    found = dict.fromkeys(cluster_of(row) for row in rows)
    return sorted(found, key=lambda it: (workloads.index(it[0]), it[1] or 0, it[2], it[3] or 0))


def best_baseline(rows: Sequence[Row], cluster: tuple[Any, ...]) -> Row | None:
    """Return the fastest measured DDP of a cluster, or None."""
    found = [
        row
        for row in measured(rows)
        if cluster_of(row) == cluster and parse_strategy(str(row["strategy"])).is_baseline
    ]
    return min(found, key=lambda row: float(row["step_s_median"]), default=None)


def gains(rows: Sequence[Row], strategy: str) -> list[Gain]:
    """Return a strategy's gain over the best DDP for each cluster that has both."""
    found = []
    for row in measured(rows):
        baseline = best_baseline(rows, cluster_of(row))
        if row["strategy"] == strategy and baseline is not None:
            ratio = float(baseline["step_s_median"]) / float(row["step_s_median"])
            found.append(Gain(row, str(baseline["strategy"]), ratio))
    return found


def over_bound(rows: Sequence[Row], strategy: str) -> list[tuple[Row, float]]:
    """Return a strategy's measured rows that have a bound, with step time over bound."""
    return [
        (row, float(row["step_s_median"]) / float(row["bound_step_s"]))
        for row in measured(rows)
        if row["strategy"] == strategy and row.get("bound_step_s")
    ]


def counterpart(row: Row, rows: Sequence[Row]) -> Row | None:
    """Return the simulated row of the same cluster and settings, or None."""
    return next(
        (
            other
            for other in simulated(rows)
            if cluster_of(other) == cluster_of(row)
            and other["strategy"] == row["strategy"]
            and other.get("slice_elems") == row.get("slice_elems")
        ),
        None,
    )


def prediction_errors(rows: Sequence[Row]) -> list[tuple[Row, float]]:
    """Return measured rows that were simulated, with predicted over measured step, minus one."""
    found = []
    for row in measured(rows):
        other = counterpart(row, rows)
        if other is not None:
            found.append((row, float(other["step_s_median"]) / float(row["step_s_median"]) - 1.0))
    return found


def reversals(rows: Sequence[Row]) -> list[Reversal]:
    """Return where the order of two strategies is not the expected one."""
    found = []
    evidence = measured(rows)
    for cluster in clusters_of(evidence):
        here = {str(row["strategy"]): row for row in evidence if cluster_of(row) == cluster}
        for first, second, reason in ORDER:
            if first not in here or second not in here:
                continue
            ratio = float(here[first]["step_s_median"]) / float(here[second]["step_s_median"])
            if ratio > 1.0 + TOLERANCE:
                found.append(
                    Reversal(
                        here[second],
                        here[first],
                        reason,
                        ratio,
                        _simulated_ratio(here[first], here[second], rows),
                        max(_spread(here[first]), _spread(here[second])),
                    )
                )
    return found


def faster_than_bound(rows: Sequence[Row]) -> list[Row]:
    """Return measured rows that beat their bound by more than runs differ: something is wrong."""
    return [
        row
        for row in measured(rows)
        if row["strategy"] != CEILING
        and row.get("bound_step_s")
        and float(row["step_s_median"]) < (1.0 - TOLERANCE) * float(row["bound_step_s"])
    ]


def _simulated_ratio(first: Row, second: Row, rows: Sequence[Row]) -> float | None:
    a, b = counterpart(first, rows), counterpart(second, rows)
    return None if a is None or b is None else float(a["step_s_median"]) / float(b["step_s_median"])


def _spread(row: Row) -> float:
    steps = [float(step_s) for step_s in row.get("step_s") or ()]
    return (max(steps) - min(steps)) / statistics.median(steps) if steps else 0.0
