"""Figures of a measured row that need other rows: compute time, bound, gain over DDP.

Runs of one cluster may come from several calls, so these are worked out anew from all rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gradlane.lab.experiments.findings import best_baseline, cluster_of, measured
from gradlane.lab.experiments.simulated import bound_of
from gradlane.lab.runs.cells import CEILING
from gradlane.lab.workloads import REPLAY_NAMES
from gradlane.training.options.options import ASGD


def completed(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows with these figures as all rows together give them.

    `compute_s` is that of the cluster's `none` row; `bound_step_s` follows from it and from the
    row's own goodput; rows that are no evidence keep what they have.
    """
    evidence = measured(rows)
    alone = {
        cluster_of(row): float(row["step_s_median"])
        for row in evidence
        if row["strategy"] == CEILING
    }
    return [_completed(row, rows, alone) if row in evidence else dict(row) for row in rows]


def _completed(
    row: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    alone: Mapping[tuple[Any, ...], float],
) -> dict[str, Any]:
    full = {**row, "compute_s": alone.get(cluster_of(row), row["compute_s"])}
    if row["strategy"] == ASGD:
        # The bound is that of steps which wait for their own gradients.
        full["bound_step_s"] = full["bound_binding"] = None
    elif row["workload"] in REPLAY_NAMES:
        bound = bound_of(
            str(row["workload"]),
            float(row["dilation"]),
            workers=int(row["workers"]),
            goodput_bps=float(row["goodput_bps"]),
            compute_s=float(full["compute_s"]),
        )
        full["bound_step_s"], full["bound_binding"] = bound.step_s, bound.binding
    if row["strategy"] != CEILING:
        step_s = float(row["step_s_median"])
        full["step_over_bound"] = step_s / full["bound_step_s"] if full["bound_step_s"] else None
        baseline = best_baseline(rows, cluster_of(row))
        full["speedup_over_ddp"] = float(baseline["step_s_median"]) / step_s if baseline else None
    return full
