"""Predictions of the simulator for runs of the lab, beside the measurements.

A run with dilation D is simulated as it was run: compute takes D times longer and ports are D times
slower, while the host takes its real time for frames and sums. Results are converted back.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from gradlane.lab.cluster.shaping import PortShape
from gradlane.lab.runs.rows import NO_EVIDENCE, Row
from gradlane.lab.runs.strategy import parse_strategy
from gradlane.lab.workloads import REPLAY_NAMES
from gradlane.planning.models import ARCHITECTURES
from gradlane.planning.models.schedule import layers_from_architecture, merge_short_layers
from gradlane.planning.simulation.costs import MachineCosts
from gradlane.planning.simulation.ddp import ddp_step_s
from gradlane.planning.simulation.grid import simulate
from gradlane.planning.simulation.hosts import Host
from gradlane.planning.simulation.profiles import Profile, profile_of_layers
from gradlane.planning.simulation.scenarios import (
    ENGINE_STRATEGIES,
    SCHEME_STRATEGIES,
    Cluster,
    run_scenario,
    scenario_of,
)
from gradlane.report.markdown import markdown_table

STEPS = 4
"""Simulated steps."""
SEEDS = (0, 1, 2)
"""Connections are unequal in a way that is drawn: the mean over these draws is the prediction."""


@dataclass(frozen=True)
class Prediction:
    """One run of the lab and what was predicted for it."""

    workload: str
    strategy: str
    workers: int
    rate_bps: float
    dilation: float
    measured_step_s: float
    predicted_step_s: float
    error: float
    """Predicted over measured, minus one."""

    @property
    def figures(self) -> tuple[str, str, str]:
        """Measured step, predicted step and error, as tables show them."""
        return (
            f"{self.measured_step_s * 1e3:.1f} ms",
            f"{self.predicted_step_s * 1e3:.1f} ms",
            f"{self.error * 100:+.1f} %",
        )

    def to_json(self) -> dict[str, Any]:
        """Return the prediction with the units in its keys."""
        return asdict(self)


def can_predict(row: Row) -> bool:
    """Return whether a row is evidence of a replay by the engine's own strategies, not encoded."""
    return (
        parse_strategy(row.strategy).setting in (*ENGINE_STRATEGIES, *SCHEME_STRATEGIES)
        and row.workload in REPLAY_NAMES
        and row.codec == "raw"
        and row.is_evidence
    )


def predicted_ddp_step_s(row: Row) -> float:
    """Return the step of a row of DDP by `gradlane.planning.simulation.ddp`, in nominal seconds.

    Args:
        row: a replay with a rank a node, not encoded; compute and goodput are its own.
    """
    step_s = ddp_step_s(
        replayed_profile(row.workload, row.dilation, row.compute_s),
        workers=row.workers,
        goodput_bps=row.goodput_bps / row.dilation,
        buckets_mb=[parse_strategy(row.strategy).bucket_mb],
    )
    return step_s / row.dilation


@dataclass(frozen=True)
class LeftOut:
    """How many rows are not predicted."""

    rows: int
    """All of them, predicted or not."""
    no_evidence: int
    """Rows of a machine that was too busy."""
    other_kinds: int
    """Evidence that is no unencoded replay by gradlane's strategies."""

    @staticmethod
    def of(rows: Sequence[Row]) -> LeftOut:
        """Count the rows that cannot be predicted."""
        out = [row for row in rows if not can_predict(row)]
        busy = sum(row.cpu_bound for row in out)
        return LeftOut(len(rows), busy, len(out) - busy)

    @property
    def text(self) -> str:
        """How many rows are left out, and why; empty if none is."""
        parts = [f"{self.no_evidence} with {NO_EVIDENCE}"] if self.no_evidence else []
        if self.other_kinds:
            parts.append(
                f"{self.other_kinds} of other kinds: only unencoded replays by gradlane's "
                "strategies are predicted"
            )
        out = self.no_evidence + self.other_kinds
        return f"{out} of {self.rows} rows are left out, {'; '.join(parts)}" if out else ""

    def to_json(self) -> dict[str, int]:
        """Return the counts by name."""
        return asdict(self)


def replayed_profile(workload: str, dilation: float, compute_s: float) -> Profile:
    """Return what a replay workload computes, in real seconds.

    Args:
        workload: one of the replay workloads.
        dilation: real over nominal time. Layers too short to sleep exactly lend their time to a
            neighbour, as in the replay.
        compute_s: nominal compute time that was measured without communication.
    """
    architecture = ARCHITECTURES[workload]()
    layers = merge_short_layers(layers_from_architecture(architecture), dilation)
    profile = profile_of_layers(workload, architecture.batch_size, layers)
    profile = replace(profile, flops=architecture.operations * architecture.batch_size)
    return profile.scaled(dilation * compute_s / profile.compute_s)


def reports_of(
    row: Row, costs: MachineCosts | None = None, *, seeds: Sequence[int] = SEEDS, steps: int = STEPS
) -> list[dict[str, Any]]:
    """Simulate the cluster that a row of a lab run was, or would be, measured on.

    Args:
        row: says workload, strategy, workers, rate, dilation, slices and compute time.
        costs: constants of the machine; the simulator's own if None.
        seeds: draws of how unequal connections are, one simulation each.
        steps: simulated steps.

    Returns:
        The simulator's report of each draw; its times are real, not nominal.
    """
    profile = replayed_profile(row.workload, row.dilation, row.compute_s)
    cluster = _cluster_of(row, costs, steps)
    return [
        run_scenario(scenario_of(profile, replace(cluster, share_seed=seed)))["report"]
        for seed in seeds
    ]


def _cluster_of(row: Row, costs: MachineCosts | None, steps: int) -> Cluster:
    """Return the cluster of a row, in real time."""
    strategy = parse_strategy(row.strategy)
    rate_bps = row.rate_bps / row.dilation
    return Cluster(
        workers=row.workers,
        rate_bps=rate_bps,
        strategy=strategy.setting,
        servers=row.servers,
        serving=row.serving,
        ranks_per_node=row.ranks_per_node,
        local=strategy.local.mode,
        update=strategy.rounds,
        seal=strategy.sealed,
        host=Host(strategy.lanes or 1),
        slice_elems=row.slice_elems,
        steps=steps,
        port_burst_bytes=PortShape(round(rate_bps)).burst_bytes,
        costs=costs or MachineCosts(),
    )


def predict(row: Row, costs: MachineCosts | None = None) -> Prediction:
    """Simulate the cluster that a row of a lab run was measured on.

    Args:
        row: a row for which `can_predict` holds.
        costs: constants of the machine that it was measured on; the simulator's own if None.
    """
    if parse_strategy(row.strategy).rounds is None:
        steps_s = [float(report["step_s"]) for report in reports_of(row, costs)]
    else:
        profile = replayed_profile(row.workload, row.dilation, row.compute_s)
        cluster = _cluster_of(row, costs, STEPS)
        rounds = [simulate(profile, replace(cluster, share_seed=seed))[0] for seed in SEEDS]
        steps_s = [one.step_s for one in rounds]
    predicted_s = statistics.fmean(steps_s) / row.dilation
    return Prediction(
        workload=row.workload,
        strategy=row.strategy,
        workers=row.workers,
        rate_bps=float(row.rate_bps),
        dilation=row.dilation,
        measured_step_s=row.step_s_median,
        predicted_step_s=predicted_s,
        error=predicted_s / row.step_s_median - 1.0,
    )


def summary_of(
    predictions: Sequence[Prediction], left_out: LeftOut | None = None
) -> dict[str, float]:
    """Return `median_error` and `worst_error`, both without sign.

    Args:
        predictions: of rows.
        left_out: the rows without one, for the error.

    Raises:
        ValueError: there are no predictions.
    """
    if not predictions:
        why = f" ({left_out.text})" if left_out and left_out.text else ""
        raise ValueError(
            "nothing to predict: the file has no replay rows of gradlane's own strategies "
            f"that were measured on an idle machine{why}"
        )
    errors = [abs(prediction.error) for prediction in predictions]
    return {"median_error": statistics.median(errors), "worst_error": max(errors)}


def markdown_of(predictions: Sequence[Prediction]) -> str:
    """Return a table for documents."""
    columns = ("workload", "strategy", "workers", "rate", "measured", "predicted", "error")
    rows = [
        (it.workload, it.strategy, it.workers, f"{it.rate_bps / 1e9:g} Gbit/s", *it.figures)
        for it in predictions
    ]
    return markdown_table(columns, rows, numbers="--nnnnn")
