"""Findings of an experiment's rows: gains, distances to the bound, and their order.

Each comparison is of rows of one cluster: the same network, ranks, rate and dilation.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from gradlane.lab.runs.rows import ClusterKey, Row, grouped, text_of_no_evidence
from gradlane.lab.workloads import REPLAY_NAMES
from gradlane.training.options.strategy import ASGD
from gradlane_papers.experiments.simulated import bound_of

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
class Reversal:
    """Two strategies whose order is not the expected one."""

    faster: Row
    slower: Row
    """The one that ought to be at least as fast."""
    ratio: float
    """Step time of what ought to be faster over the other's."""
    simulated_ratio: float | None
    """The same in the simulator; None where it was not simulated."""
    spread: float
    """How far the measured steps of the two lie apart, over their median."""

    @property
    def explanation(self) -> str:
        """The verdict of the simulator and of the repeats on it."""
        if self.spread > self.ratio - 1.0:
            return f"steps of one run differ by {self.spread:.1%}, more than the two runs do"
        if self.simulated_ratio is None:
            return "not simulated"
        if self.simulated_ratio > 1.0 + TOLERANCE / 4:
            return f"the simulator has it too ({self.simulated_ratio - 1:+.1%}): not noise"
        return f"the simulator has the expected order ({self.simulated_ratio - 1:+.1%})"


class Findings:
    """Rows of an experiment, and what they show beside one another.

    Attributes:
        rows: all of them.
        measured: the measured ones that are evidence; where none of these communicates, all of
            them, since compute alone leaves even a busy machine idle.
        note: how many measured ones are no evidence, which whatever shows the others has to say;
            empty where all are.
        simulated: the simulated ones.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        """Compare rows."""
        self.rows = rows
        evidence = [row for row in rows if row.is_evidence]
        runs = [row for row in rows if not row.is_simulated]
        self.measured = evidence if any(row.communicates for row in evidence) else runs
        self.note = text_of_no_evidence(rows)
        if self.note:
            self.note += "; marked *, these count only where there are no others"
        self.simulated = [row for row in rows if row.is_simulated]

    def of_workload(self, workload: str) -> Findings:
        """Return what the rows of one network show."""
        return Findings([row for row in self.rows if row.workload == workload])

    @cached_property
    def clusters(self) -> dict[ClusterKey, list[Row]]:
        """The evidence by cluster: by network as it comes, then by workers and rate."""
        return clusters_of(self.measured)

    @cached_property
    def _baselines(self) -> dict[ClusterKey, Row]:
        fastest_first = sorted(self.measured, key=lambda row: row.step_s_median)
        return {row.cluster: row for row in reversed(fastest_first) if row.is_baseline}

    @cached_property
    def _simulations(self) -> dict[tuple[ClusterKey, str, int | None], Row]:
        return {
            (row.cluster, row.strategy, row.slice_elems): row for row in reversed(self.simulated)
        }

    def baseline(self, cluster: ClusterKey) -> Row | None:
        """Return the fastest measured DDP of a cluster, or None."""
        return self._baselines.get(cluster)

    @property
    def baselines(self) -> list[Row]:
        """The fastest measured DDP of each cluster that has one."""
        return [self._baselines[one] for one in self.clusters if one in self._baselines]

    def speedup(self, row: Row) -> float | None:
        """Return the best DDP's step time over a row's; None without DDP."""
        baseline = self.baseline(row.cluster)
        return None if baseline is None else baseline.step_s_median / row.step_s_median

    def counterpart(self, row: Row) -> Row | None:
        """Return the simulated row of the same cluster and settings, or None."""
        return self._simulations.get((row.cluster, row.strategy, row.slice_elems))

    def prediction_error(self, row: Row) -> float | None:
        """Return predicted over measured step, minus one; None without a simulated row."""
        other = self.counterpart(row)
        return None if other is None else other.step_s_median / row.step_s_median - 1.0

    def gains(self, strategy: str) -> list[tuple[Row, float]]:
        """Return a strategy's measured rows that have DDP beside them, with their `speedup`."""
        own = [row for row in self.measured if row.strategy == strategy]
        return [(row, ratio) for row in own if (ratio := self.speedup(row)) is not None]

    def over_bound(self, strategy: str) -> list[tuple[Row, float]]:
        """Return a strategy's measured rows that have a bound, with step time over bound."""
        own = [row for row in self.measured if row.strategy == strategy]
        return [(row, row.over_bound) for row in own if row.over_bound is not None]

    def prediction_errors(self) -> list[float]:
        """Return the errors of all measured rows that were simulated."""
        errors = map(self.prediction_error, self.measured)
        return [error for error in errors if error is not None]

    def reversals(self) -> Iterator[Reversal]:
        """Find where the order of two strategies is not the expected one."""
        for rows in self.clusters.values():
            here = {row.strategy: row for row in rows}
            for first, second, _ in ORDER:
                if first not in here or second not in here:
                    continue
                ought, other = here[first], here[second]
                ratio = ought.step_s_median / other.step_s_median
                if ratio > 1.0 + TOLERANCE:
                    a, b = self.counterpart(ought), self.counterpart(other)
                    yield Reversal(
                        faster=other,
                        slower=ought,
                        ratio=ratio,
                        simulated_ratio=a.step_s_median / b.step_s_median if a and b else None,
                        spread=max(_spread(ought), _spread(other)),
                    )

    def faster_than_bound(self) -> list[Row]:
        """Return measured rows that beat their bound by more than runs differ: all are wrong."""
        return [
            row
            for row in self.measured
            if row.communicates and row.over_bound and row.over_bound < 1.0 - TOLERANCE
        ]


def clusters_of(rows: Sequence[Row]) -> dict[ClusterKey, list[Row]]:
    """Return rows by cluster: by network as it comes, then by workers and rate."""
    workloads = list(dict.fromkeys(row.workload for row in rows))
    keys = sorted({row.cluster for row in rows}, key=lambda it: (workloads.index(it[0]), it[1:]))
    by_cluster = grouped(rows, lambda row: row.cluster)
    return {key: by_cluster[key] for key in keys}


def _spread(row: Row) -> float:
    steps = row.step_s
    return (max(steps) - min(steps)) / statistics.median(steps) if steps else 0.0


def completed(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with the figures that need other rows: compute time, bound, gain over DDP.

    Runs of one cluster may come from several calls, so these are worked out anew from all rows.
    `compute_s` is that of the cluster's `none` row; `bound_step_s` follows from it and from the
    row's own goodput; rows that are no evidence keep what they have.
    """
    found = Findings(rows)
    alone = {row.cluster: row.step_s_median for row in found.measured if not row.communicates}

    def complete(row: Row) -> Row:
        row = replace(row, compute_s=alone.get(row.cluster, row.compute_s))
        if row.strategy == ASGD:
            # The bound is that of steps which wait for their own gradients.
            row = replace(row, bound_step_s=None, bound_binding=None)
        elif row.workload in REPLAY_NAMES:
            bound = bound_of(
                row.workload,
                row.dilation,
                workers=row.workers,
                goodput_bps=row.goodput_bps,
                compute_s=row.compute_s,
            )
            row = replace(row, bound_step_s=bound.step_s, bound_binding=bound.binding)
        if not row.communicates:
            return row
        return replace(row, step_over_bound=row.over_bound, speedup_over_ddp=found.speedup(row))

    return [complete(row) if row.is_evidence else row for row in rows]
