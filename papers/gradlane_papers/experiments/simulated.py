"""Simulated rows beside measured ones: the same fields, from the simulator under the lab's terms.

A row is simulated as it would be run: with its dilation, compute takes longer and ports are slower,
while the host takes its real time for frames and sums. Results are nominal, as in measured rows.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.pool import ThreadPool
from typing import Any

from gradlane.formats.rates import format_rate
from gradlane.lab.calibration.prediction import SEEDS, STEPS, replayed_profile, reports_of
from gradlane.lab.runs.rows import SIMULATED, Row
from gradlane.lab.runs.strategy import parse_strategy
from gradlane.planning.models import ARCHITECTURES
from gradlane.planning.simulation.bound import Bound, bound_step_s
from gradlane.planning.simulation.grid import GOODPUT_SHARE
from gradlane.planning.simulation.profiles import timings_in
from gradlane.planning.simulation.scenarios import RING_FUSED, Cluster, run_scenario, scenario_of


@dataclass(frozen=True)
class Simulation:
    """One cluster that is simulated."""

    workload: str
    strategy: str
    workers: int
    rate_bps: int
    dilation: float
    compute_s: float
    """Nominal."""
    slice_elems: int | None = None
    """Asked for; None: the strategy's own."""
    is_real: bool = False
    """Whether the cluster is real: neither dilated nor shaped by token buckets as in the lab."""
    seeds: tuple[int, ...] = SEEDS
    """Draws of how unequal connections are; their mean counts."""

    @property
    def text(self) -> str:
        """The simulation in words."""
        return (
            f"{self.workload} with {self.strategy}, {self.workers} workers at "
            f"{format_rate(self.rate_bps)}"
        )

    def is_row(self, row: Row) -> bool:
        """Return whether a row is this simulation's."""
        return all(getattr(row, name) == value for name, value in self.inputs().items())

    def inputs(self) -> dict[str, Any]:
        """Return the fields of the row that say what is simulated."""
        if self.strategy == RING_FUSED:
            slice_elems = None
        else:
            slice_elems = parse_strategy(self.strategy).slice_elems(self.slice_elems)
        return {
            "source": SIMULATED,
            "workload": self.workload,
            "strategy": self.strategy,
            "workers": self.workers,
            "rate_bps": self.rate_bps,
            "dilation": self.dilation,
            "slice_elems": slice_elems,
            "compute_s": self.compute_s,
            "is_real": self.is_real,
        }

    def _real_report(self) -> dict[str, Any]:
        profile = replayed_profile(self.workload, 1.0, self.compute_s)
        cluster = Cluster(
            workers=self.workers,
            rate_bps=float(self.rate_bps),
            strategy=self.strategy,
            slice_elems=self.slice_elems,
        )
        report: dict[str, Any] = run_scenario(scenario_of(profile, cluster))["report"]
        return report

    def run(self) -> Row:
        """Simulate, and return a row.

        Raises:
            ValueError: the simulator refuses the cluster.
        """
        if self.is_real:
            reports = [self._real_report()]
        else:
            run = Row.of(step_s_median=0.0, **self.inputs())
            reports = reports_of(run, seeds=self.seeds)
        bound = bound_of(
            self.workload,
            self.dilation,
            workers=self.workers,
            goodput_bps=self.rate_bps * GOODPUT_SHARE,
            compute_s=self.compute_s,
        )

        def mean(name: str) -> float:
            # A formula knows fewer figures than a simulation.
            values = [float(report[name]) for report in reports if name in report]
            return statistics.fmean(values) if values else 0.0

        batch_size = ARCHITECTURES[self.workload]().batch_size
        step_s = mean("step_s") / self.dilation
        return Row.of(
            **self.inputs(),
            codec="raw",
            steps=STEPS,
            batch_size=batch_size,
            samples_per_s=self.workers * batch_size / step_s,
            step_s_median=step_s,
            wall_step_s_median=None,
            bound_step_s=bound.step_s,
            bound_binding=bound.binding,
            step_over_bound=step_s / bound.step_s,
            goodput_bps=self.rate_bps * GOODPUT_SHARE,
            tx_bytes_per_step=mean("tx_bytes_per_step_mean"),
            link_utilization=mean("tx_utilization"),
            io_utilization=mean("io_utilization"),
            cpu_s_per_step=None,
            cpu_bound=False,
            param_digest=None,
        )


def bound_of(
    workload: str, dilation: float, *, workers: int, goodput_bps: float, compute_s: float
) -> Bound:
    """Return the perfect-overlap bound of a replay workload, in nominal seconds.

    Args:
        workload: one of the replay workloads.
        dilation: layers too short to sleep exactly lend their time to a neighbour, as in the
            replay.
        workers: number of ranks.
        goodput_bps: nominal payload bits a second of a port.
        compute_s: nominal compute time, measured without communication.
    """
    profile = replayed_profile(workload, dilation, compute_s).scaled(1.0 / dilation)
    return bound_step_s(
        timings_in(profile), workers=workers, goodput_bps=goodput_bps, compute_s=compute_s
    )


def compute_times(rows: Sequence[Row]) -> dict[str, float]:
    """Return the compute time of each workload in the rows: measured alone, else as planned."""
    times: dict[str, float] = {}
    for workload in dict.fromkeys(row.workload for row in rows):
        own = [row for row in rows if row.workload == workload and not row.is_simulated]
        alone = [row.step_s_median for row in own if not row.communicates and row.is_evidence]
        if own:
            times[workload] = statistics.median(alone or [row.compute_s for row in own])
    return times


def simulate_missing(
    simulations: Sequence[Simulation],
    rows: Sequence[Row],
    *,
    keep: Callable[[list[Row]], None],
    on_run: Callable[[Simulation], None] = lambda simulation: None,
) -> list[Row]:
    """Simulate what no row has, and drop simulated rows that nothing asks for any more.

    Args:
        simulations: what is asked for.
        rows: all rows so far.
        keep: called with all rows after each simulation.
        on_run: called with each simulation whose result is waited for.

    Returns:
        All rows: the measured ones first, then one for each simulation.
    """
    measured = [row for row in rows if not row.is_simulated]
    before = [row for row in rows if row.is_simulated]
    found = [next(filter(simulation.is_row, before), None) for simulation in simulations]
    missing = [number for number, row in enumerate(found) if row is None]
    # The compiled core lets other threads run. Those of the pool are daemons, so that the program
    # ends at once when it is told to: a simulation of a thousand workers takes a minute.
    pool = ThreadPool(os.cpu_count())
    runs = pool.imap(Simulation.run, [simulations[number] for number in missing])
    try:
        for number in missing:
            on_run(simulations[number])
            found[number] = next(runs)
            keep([*measured, *(row for row in found if row is not None)])
    finally:
        pool.close()
    return [*measured, *(row for row in found if row is not None)]
