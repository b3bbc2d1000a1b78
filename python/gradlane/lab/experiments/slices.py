"""Throughput against the size of slices, as in figure 12 of the P3 paper.

Smaller slices let urgent ones pass sooner and share a tensor more evenly among its owners; each
costs every rank a frame and a piece of work. The best is somewhere between, and the planner's
choice is shown beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradlane.lab.calibration.prediction import SEEDS, replayed_profile
from gradlane.lab.experiments import findings
from gradlane.lab.experiments.bandwidth import GBIT, chosen_workloads
from gradlane.lab.experiments.completed import completed
from gradlane.lab.experiments.preset import Preset, Rows
from gradlane.lab.experiments.simulated import Simulation, compute_times
from gradlane.lab.runs.cells import CEILING, MEASURED, STEPS, WORKERS, Cell, usual_dilation
from gradlane.planning.planner.search import search
from gradlane.training.plans.settings import ClusterFacts, Settings

NAME = "slices"
STRATEGY = "p3"
SLICES = (1_000, 2_000, 5_000, 16_667, 33_334, 50_000, 100_000, 200_000, 500_000, 1_000_000)
"""From the smallest to the largest of the paper; all that the planner tries is among them."""
RATES_BPS: Mapping[str, tuple[int, ...]] = {"resnet50": (4 * GBIT,), "vgg19": (10 * GBIT,)}
_PLAN_BUDGET_S = 60.0
_MANY_SLICES = 5_000
"""Below this size a simulation takes long, and one draw has to do."""


def slices(
    *,
    workloads: Sequence[str] = (),
    rates_bps: Sequence[int] = (),
    sizes: Sequence[int] = (),
    workers: int = WORKERS,
    dilation: float | None = None,
    steps: int = STEPS,
) -> Preset:
    """Return the preset.

    Args:
        workloads: only these networks; all of the preset where none is named.
        rates_bps: nominal rates in place of the preset's.
        sizes: elements of a slice at most, in place of the preset's.
        workers: ranks, each on a node of its own.
        dilation: real over nominal time; None: what two cores carry with ease.
        steps: measured steps of a run.

    Raises:
        ValueError: a network is not in the preset, or a size is below 1.
    """
    chosen_sizes = sorted(set(sizes or SLICES))
    cells = [
        Cell(
            workload,
            rate_bps,
            # Compute alone knows no slices: once is enough.
            (CEILING, STRATEGY) if size == chosen_sizes[0] else (STRATEGY,),
            usual_dilation(workload, rate_bps) if dilation is None else dilation,
            workers=workers,
            slice_elems=size,
            steps=steps,
        )
        for workload in chosen_workloads(workloads, tuple(RATES_BPS)) or RATES_BPS
        for rate_bps in rates_bps or RATES_BPS[workload]
        for size in chosen_sizes
    ]
    return Preset(NAME, cells, _simulations, finish=_with_plans)


def _simulations(rows: Rows) -> list[Simulation]:
    compute_s = compute_times(rows)
    return [
        Simulation(
            str(row["workload"]),
            STRATEGY,
            int(row["workers"]),
            int(row["rate_bps"]),
            float(row["dilation"]),
            compute_s[str(row["workload"])],
            slice_elems=int(row["slice_elems"]),
            seeds=SEEDS if int(row["slice_elems"]) >= _MANY_SLICES else SEEDS[:1],
        )
        for row in rows
        if row.get("source") == MEASURED and row["strategy"] == STRATEGY
    ]


def _with_plans(rows: Rows) -> list[dict[str, Any]]:
    """Add the planner's choice for each cluster to its rows, unless it is there."""
    full = completed(rows)
    for cluster in findings.clusters_of(full):
        here = [row for row in full if findings.cluster_of(row) == cluster]
        known = [row["planned_slice_elems"] for row in here if "planned_slice_elems" in row]
        size = known[0] if known else planned_slice_elems(here)
        for row in here:
            row["planned_slice_elems"] = size
    return full


def planned_slice_elems(rows: Rows) -> int | None:
    """Return the slice size that the planner chooses for the emulated cluster, as it really is.

    Compute takes dilation times longer and ports are that much slower, while the host takes its
    own time; so the planner is asked about that cluster, with the same strategy.

    Args:
        rows: of one cluster.
    """
    row = rows[0]
    dilation = float(row["dilation"])
    compute_s = compute_times(rows).get(str(row["workload"]), float(row["compute_s"]))
    found = search(
        replayed_profile(str(row["workload"]), dilation, compute_s),
        ClusterFacts(int(row["workers"]), float(row["rate_bps"]) / dilation, 0.0, "worker"),
        Settings(),
        budget_s=_PLAN_BUDGET_S,
    )
    return None if found is None else found.settings.slice_elems_in_force


@dataclass(frozen=True)
class Sweep:
    """The slice sizes of one cluster, smallest first."""

    cluster: tuple[Any, ...]
    rows: Sequence[Mapping[str, Any]]
    """Measured, and evidence."""

    @property
    def best(self) -> Mapping[str, Any]:
        """The fastest row."""
        return min(self.rows, key=lambda row: float(row["step_s_median"]))

    @property
    def is_interior(self) -> bool:
        """Whether both smaller and larger slices were slower than the best."""
        return self.best is not self.rows[0] and self.best is not self.rows[-1]

    @property
    def planned(self) -> Mapping[str, Any] | None:
        """The row with the planner's choice; None where it was not measured."""
        size = self.rows[0].get("planned_slice_elems")
        return next((row for row in self.rows if row["slice_elems"] == size), None)

    @property
    def planned_over_best(self) -> float | None:
        """Step time with the planner's choice over the best one."""
        planned = self.planned
        if planned is None:
            return None
        return float(planned["step_s_median"]) / float(self.best["step_s_median"])


def sweeps_of(rows: Rows) -> list[Sweep]:
    """Return the measured sweeps in the rows."""
    evidence = [row for row in findings.measured(rows) if row["strategy"] == STRATEGY]
    found = []
    for cluster in findings.clusters_of(evidence):
        here = [row for row in evidence if findings.cluster_of(row) == cluster]
        found.append(Sweep(cluster, sorted(here, key=lambda row: int(row["slice_elems"]))))
    return found
