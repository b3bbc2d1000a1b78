"""Does a profile predict its training? Profiles a real workload, simulates it, and measures it.

The workload of the lab (really computed, paced) is profiled in this process without communication.
From that profile alone the simulator predicts the step of each strategy at each rate; then the lab
trains it on nodes with ports of those rates. Needs the privilege to make network namespaces.

    python benchmarks/profile_prediction.py --workload digits-cnn --json prediction.json
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import asdict, dataclass
from typing import Any

import torch

from gradlane.formats.profile import Profile
from gradlane.formats.rates import format_rate, parse_rate
from gradlane.lab.runs.options import LabOptions
from gradlane.lab.runs.rows import Row
from gradlane.lab.runs.run import run_lab
from gradlane.lab.runs.strategy import parse_strategies, parse_strategy
from gradlane.lab.workloads import REAL_NAMES, WorkloadSpec, build
from gradlane.planning.profiler.recorder import Recorder
from gradlane.planning.simulation.scenarios import Cluster, run_scenario, scenario_of

WARM_UP_STEPS = 3
SIMULATED_STEPS = 6


@dataclass(frozen=True)
class Comparison:
    """One run of the lab, and what its profile predicted."""

    workload: str
    strategy: str
    workers: int
    rate_bps: float
    compute_s: float
    """Step of the profile, without communication."""
    predicted_step_s: float
    measured_step_s: float
    error: float
    """Predicted over measured, minus one."""
    cpu_share: float
    """Of the machine, while it was measured."""


def main() -> None:
    """Profile, predict, measure, print a table, and write JSON where asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", default="digits-cnn", choices=REAL_NAMES)
    parser.add_argument("--strategy", default="p3,slicing,wfbp,kvstore")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rate", default="60mbit,120mbit,240mbit")
    parser.add_argument("--steps", type=int, default=20, help="of the profile and of each run")
    parser.add_argument("--profile", metavar="PATH", help="keep the profile there")
    parser.add_argument("--json", metavar="PATH", help="write the rows there")
    arguments = parser.parse_args()
    options = LabOptions(
        workload=arguments.workload,
        strategies=parse_strategies(arguments.strategy),
        workers=arguments.workers,
        rates_bps=[parse_rate(text) for text in arguments.rate.split(",")],
        steps=arguments.steps,
        warmup=WARM_UP_STEPS,
    )
    profile = record(options.workload, options.workers, options.steps)
    if arguments.profile:
        profile.save(arguments.profile)
    print(
        f"{profile.model}: {profile.size_bytes / 1e6:.2f} MB, step {profile.compute_s * 1e3:.1f} "
        f"ms, forward {profile.forward_s * 1e3:.1f} ms; now measuring"
    )
    rows = [compare(profile, row) for row in run_lab(options)]
    print(f"{'strategy':<14}{'rate':>14}{'predicted, ms':>16}{'measured, ms':>15}{'error':>9}")
    for row in rows:
        print(
            f"{row.strategy:<14}{format_rate(row.rate_bps):>14}{row.predicted_step_s * 1e3:>16.1f}"
            f"{row.measured_step_s * 1e3:>15.1f}{row.error * 100:>8.1f}%"
        )
    errors = [abs(row.error) for row in rows]
    print(f"median error {statistics.median(errors):.1%}, worst {max(errors):.1%}")
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump([asdict(row) for row in rows], file, indent=2)


def record(workload_name: str, workers: int, steps: int, *, paced: bool = True) -> Profile:
    """Train a workload of the lab alone, with a recorder on it.

    Args:
        workload_name: one of the real ones.
        workers: how many ranks share the data.
        steps: recorded steps.
        paced: whether operations are stretched to their times.
    """
    torch.set_num_threads(1)
    workload = build(WorkloadSpec(workload_name, paced=paced), 0, workers)
    optimizer = workload.make_optimizer(workload.model)
    recorder = Recorder(workload.model, batch_size=workload.batch_size)
    recorder.attach()
    for step in range(WARM_UP_STEPS + steps):
        if step >= WARM_UP_STEPS:
            recorder.begin_step()
        workload.begin_step(step)
        loss = workload.loss(workload.model, workload.batch(step))
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if step >= WARM_UP_STEPS:
            recorder.end_step()
    recorder.detach()
    return recorder.profile(workload_name)


def compare(profile: Profile, row: Row) -> Comparison:
    """Predict a row of the lab from a profile of its workload."""
    cluster = Cluster(
        workers=row.workers,
        rate_bps=float(row.rate_bps),
        strategy=parse_strategy(row.strategy).setting,
        slice_elems=row.slice_elems,
        steps=SIMULATED_STEPS,
    )
    report: dict[str, Any] = run_scenario(scenario_of(profile, cluster))["report"]
    predicted_s = float(report["step_s"])
    return Comparison(
        workload=row.workload,
        strategy=row.strategy,
        workers=row.workers,
        rate_bps=row.rate_bps,
        compute_s=profile.compute_s,
        predicted_step_s=predicted_s,
        measured_step_s=row.step_s_median,
        error=predicted_s / row.step_s_median - 1.0,
        cpu_share=row.cpu_share,
    )


if __name__ == "__main__":
    main()
