"""What the simulator predicts for runs of the lab, beside what was measured.

A run with dilation D is simulated as it was run: compute takes D times longer and ports are D times
slower, while the host takes its real time for frames and sums. Results are converted back.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from gradlane.lab.cluster.shaping import PortShape
from gradlane.lab.runs.cells import MEASURED
from gradlane.lab.runs.strategy import parse_strategy
from gradlane.lab.workloads import REPLAY_NAMES
from gradlane.planning.models import ARCHITECTURES
from gradlane.planning.models.schedule import layers_from_architecture, merge_short_layers
from gradlane.planning.simulation.costs import MachineCosts
from gradlane.planning.simulation.profiles import Profile, profile_of_layers
from gradlane.planning.simulation.scenarios import (
    ENGINE_STRATEGIES,
    SCHEME_STRATEGIES,
    Cluster,
    run_scenario,
    scenario_of,
)

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

    def to_json(self) -> dict[str, Any]:
        """Return the prediction with the units in its keys."""
        return asdict(self)


def can_predict(row: Mapping[str, Any]) -> bool:
    """Whether a row of a lab run is a replay under one of the engine's strategies, uncompressed."""
    strategy = parse_strategy(str(row["strategy"]))
    return (
        strategy.setting in (*ENGINE_STRATEGIES, *SCHEME_STRATEGIES)
        and row["workload"] in REPLAY_NAMES
        and row["codec"] == "raw"
        and row.get("source", MEASURED) == MEASURED
        and not row["cpu_bound"]
    )


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
    row: Mapping[str, Any],
    costs: MachineCosts | None = None,
    *,
    seeds: Sequence[int] = SEEDS,
    steps: int = STEPS,
) -> list[dict[str, Any]]:
    """Simulate the cluster that a row of a lab run was, or would be, measured on.

    Args:
        row: with `workload`, `strategy`, `workers`, `rate_bps`, `dilation`, `slice_elems` and
            `compute_s`, as in the rows of a lab run.
        costs: constants of the machine; the simulator's own if None.
        seeds: draws of how unequal connections are, one simulation each.
        steps: simulated steps.

    Returns:
        The simulator's report of each draw; its times are real, not nominal.
    """
    dilation = float(row["dilation"])
    strategy = parse_strategy(str(row["strategy"]))
    profile = replayed_profile(str(row["workload"]), dilation, float(row["compute_s"]))
    cluster = Cluster(
        workers=int(row["workers"]),
        rate_bps=float(row["rate_bps"]) / dilation,
        strategy=strategy.setting,
        servers=row.get("servers"),
        serving=int(row.get("serving", 0)),
        ranks_per_node=int(row.get("ranks_per_node", 1)),
        local=strategy.local,
        slice_elems=row["slice_elems"],
        steps=steps,
        port_burst_bytes=PortShape(round(float(row["rate_bps"]) / dilation)).burst_bytes,
        costs=costs or MachineCosts(),
    )
    return [
        run_scenario(scenario_of(profile, replace(cluster, share_seed=seed)))["report"]
        for seed in seeds
    ]


def predict(row: Mapping[str, Any], costs: MachineCosts | None = None) -> Prediction:
    """Simulate the cluster that a row of a lab run was measured on.

    Args:
        row: a row for which `can_predict` holds.
        costs: constants of the machine that it was measured on; the simulator's own if None.
    """
    dilation = float(row["dilation"])
    steps_s = [float(report["step_s"]) for report in reports_of(row, costs)]
    predicted_s = statistics.fmean(steps_s) / dilation
    measured_s = float(row["step_s_median"])
    return Prediction(
        workload=str(row["workload"]),
        strategy=str(row["strategy"]),
        workers=int(row["workers"]),
        rate_bps=float(row["rate_bps"]),
        dilation=dilation,
        measured_step_s=measured_s,
        predicted_step_s=predicted_s,
        error=predicted_s / measured_s - 1.0,
    )


def summary_of(predictions: Sequence[Prediction]) -> dict[str, float]:
    """Return `median_error` and `worst_error`, both without sign.

    Raises:
        ValueError: there are no predictions.
    """
    if not predictions:
        raise ValueError(
            "nothing to predict: the file has no replay rows of gradlane's own strategies "
            "that were measured on an idle machine"
        )
    errors = [abs(prediction.error) for prediction in predictions]
    return {"median_error": statistics.median(errors), "worst_error": max(errors)}


def markdown_of(predictions: Sequence[Prediction]) -> str:
    """Return a table for documents."""
    lines = [
        "| workload | strategy | workers | rate | measured | predicted | error |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {it.workload} | {it.strategy} | {it.workers} | {it.rate_bps / 1e9:g} Gbit/s "
        f"| {it.measured_step_s * 1e3:.1f} ms | {it.predicted_step_s * 1e3:.1f} ms "
        f"| {it.error * 100:+.1f} % |"
        for it in predictions
    ]
    return "\n".join(lines)
