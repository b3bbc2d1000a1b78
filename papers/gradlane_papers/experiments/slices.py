"""Throughput against the size of slices, as in figure 12 of the P3 paper.

Smaller slices let urgent ones pass sooner and share a tensor more evenly among its owners; each
costs every rank a frame and a piece of work. The best is somewhere between, and the planner's
choice is shown beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gradlane.lab.calibration.prediction import SEEDS, replayed_profile
from gradlane.lab.runs.page_parts import percent
from gradlane.lab.runs.rows import CEILING, ClusterKey, Row
from gradlane.planning.planner.search import search
from gradlane.report.curves import Points, curve_plot
from gradlane.report.page import KeyFigure, Section, Table
from gradlane.report.plots import Plot
from gradlane.training.plans.settings import ClusterFacts, Settings
from gradlane_papers.experiments import parts
from gradlane_papers.experiments.findings import Findings, clusters_of, completed
from gradlane_papers.experiments.preset import GBIT, Preset
from gradlane_papers.experiments.simulated import Simulation, compute_times

STRATEGY = "p3"
SLICES = (1_000, 2_000, 5_000, 16_667, 33_334, 50_000, 100_000, 200_000, 500_000, 1_000_000)
"""From the smallest to the largest of the paper; all that the planner tries is among them."""
GOAL_OVER_BEST = 1.02
BEST = "best measured"
PLANNED = "planner's choice"
_PLAN_BUDGET_S = 60.0
_MANY_SLICES = 5_000
"""Below this size a simulation takes long, and one draw has to do."""


def _simulations(rows: Sequence[Row]) -> list[Simulation]:
    compute_s = compute_times(rows)
    return [
        Simulation(
            row.workload,
            STRATEGY,
            row.workers,
            row.rate_bps,
            row.dilation,
            compute_s[row.workload],
            slice_elems=row.slice_elems,
            seeds=SEEDS if _size(row) >= _MANY_SLICES else SEEDS[:1],
        )
        for row in rows
        if not row.is_simulated and row.strategy == STRATEGY
    ]


def _size(row: Row) -> int:
    assert row.slice_elems is not None, "every strategy of the sweep has slices of one size"
    return row.slice_elems


def _with_plans(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with the planner's choice for each cluster, unless it is there."""
    full = completed(rows)
    sizes: dict[ClusterKey, int | None] = {}
    for cluster, here in clusters_of(full).items():
        known = [row.planned_slice_elems for row in here if row.has("planned_slice_elems")]
        sizes[cluster] = known[0] if known else planned_slice_elems(here)
    return [row.with_field("planned_slice_elems", sizes[row.cluster]) for row in full]


def planned_slice_elems(rows: Sequence[Row]) -> int | None:
    """Return the slice size that the planner chooses for the emulated cluster, as it really is.

    Compute takes dilation times longer and ports are that much slower, while the host takes its
    own time; so the planner is asked about that cluster, with the same strategy.

    Args:
        rows: of one cluster.
    """
    row = rows[0]
    compute_s = compute_times(rows).get(row.workload, row.compute_s)
    found = search(
        replayed_profile(row.workload, row.dilation, compute_s),
        ClusterFacts(row.workers, row.rate_bps / row.dilation, 0.0, "worker"),
        Settings(),
        budget_s=_PLAN_BUDGET_S,
    )
    return None if found is None else found.settings.slice_elems_in_force


@dataclass(frozen=True)
class Sweep:
    """The slice sizes of one cluster, smallest first."""

    cluster: ClusterKey
    rows: Sequence[Row]
    """Measured, and evidence."""

    @property
    def best(self) -> Row:
        """The fastest row."""
        return min(self.rows, key=lambda row: row.step_s_median)

    @property
    def is_interior(self) -> bool:
        """Whether both smaller and larger slices were slower than the best."""
        return self.best is not self.rows[0] and self.best is not self.rows[-1]

    @property
    def planned(self) -> Row | None:
        """The row with the planner's choice; None where it was not measured."""
        size = self.rows[0].planned_slice_elems
        return next((row for row in self.rows if row.slice_elems == size), None)

    @property
    def planned_over_best(self) -> float | None:
        """Step time with the planner's choice over the best one."""
        return None if self.planned is None else self.over_best(self.planned)

    def over_best(self, row: Row) -> float:
        """Return a row's step time over the best one."""
        return row.step_s_median / self.best.step_s_median

    def marks(self, row: Row) -> list[str]:
        """Return what distinguishes a row; a star tells that it is no evidence."""
        found = [BEST] if row is self.best else []
        found += [PLANNED] if row is self.planned else []
        return [*found, "*"] if row.cpu_bound else found


def sweeps_of(found: Findings) -> list[Sweep]:
    """Return the measured sweeps in the rows."""
    evidence = [row for row in found.measured if row.strategy == STRATEGY]
    return [
        Sweep(cluster, sorted(rows, key=_size)) for cluster, rows in clusters_of(evidence).items()
    ]


def _summary(found: Findings) -> str:
    parts_found = []
    for sweep in sweeps_of(found):
        part = f"{sweep.cluster.workload} is fastest with {_size(sweep.best):,} elements"
        if sweep.planned is not None:
            over = sweep.over_best(sweep.planned)
            part += f" (the planner takes {_size(sweep.planned):,}, {over - 1:+.1%})"
        parts_found.append(part)
    return f"{'; '.join(parts_found)}."


def _figures(found: Findings) -> Iterator[KeyFigure]:
    for sweep in sweeps_of(found):
        name, over = sweep.cluster.workload, sweep.planned_over_best
        where = ", between slower ones" if sweep.is_interior else ", at the end of the sweep"
        yield KeyFigure(
            f"{_size(sweep.best):,}",
            f"{name}: elements of the best slice{where}",
            "good" if sweep.is_interior else "bad",
        )
        if over is not None:
            yield KeyFigure(
                f"{over - 1:+.1%}",
                f"{name}: step with the planner's choice, to the best",
                "good" if over <= GOAL_OVER_BEST else "bad",
            )
        slowest = max(sweep.rows, key=lambda row: row.step_s_median)
        label = f"{name}: slowest size ({_size(slowest):,}) over the best"
        yield KeyFigure(f"{sweep.over_best(slowest):.2f}×", label)


def _sections(found: Findings) -> Iterator[Section]:
    for sweep in sweeps_of(found):
        yield Section(sweep.cluster.title, [_plot(sweep, found), _rows(sweep, found)])


def _plot(sweep: Sweep, found: Findings) -> Plot:
    def curve(rows: Sequence[Row | None]) -> Points:
        return parts.points(
            filter(None, rows),
            _size,
            lambda row: row.samples_per_s,
            lambda row: f"{_size(row):,} elements<br>{parts.tooltip(row, found)}",
        )

    simulated = [row for row in found.simulated if row.cluster == sweep.cluster]
    bound = parts.points(
        [row for row in sweep.rows if row.bound_step_s],
        _size,
        parts.bound_samples,
        lambda row: f"<b>bound</b><br>{parts.bound_samples(row):.1f} samples/s",
    )
    stars = {BEST: curve([sweep.best]), PLANNED: curve([sweep.planned])}
    return curve_plot(
        "Throughput",
        {"measured": curve(sweep.rows)},
        {"simulated": curve(simulated)} if simulated else {},
        {parts.BOUND: bound},
        x_label="elements of a slice at most",
        y_label="samples/s, all workers",
        colors={"measured": 0, "simulated": 1},
        x_ticks={float(_size(row)): _short(_size(row)) for row in sweep.rows},
        is_log=True,
        is_from_zero=False,
        stars={name: star for name, star in stars.items() if star.xs},
        note="The star is the best that was measured, the diamond what the planner chooses.",
    )


def _short(size: int) -> str:
    return f"{size / 1e6:g}M" if size >= 1_000_000 else f"{size / 1e3:g}k"


def _rows(sweep: Sweep, found: Findings) -> Table:
    columns: tuple[parts.Column, ...] = (
        ("elements", lambda row, _: row.slice_elems),
        parts.SAMPLES,
        parts.STEP,
        ("to best, %", lambda row, _: percent(sweep.over_best(row) - 1)),
        parts.TO_BOUND,
        parts.SIMULATED_MS,
        parts.ERROR,
        parts.PORTS,
        parts.CPU,
        ("", lambda row, _: ", ".join(sweep.marks(row))),
    )
    runs = [row for row in found.rows if row.cluster == sweep.cluster and not row.is_simulated]
    swept = sorted((row for row in runs if row.strategy == STRATEGY), key=_size)
    caption = "Nominal times. Set off: the best, and the planner's choice."
    return parts.row_table(columns, swept, found, caption, lambda row: bool(sweep.marks(row)))


SWEEP = Preset(
    name="slices",
    title="Throughput against the size of slices",
    rates_bps={"resnet50": (4 * GBIT,), "vgg19": (10 * GBIT,)},
    strategies=(CEILING, STRATEGY),
    sizes=SLICES,
    simulations=_simulations,
    finish=_with_plans,
    is_shown=lambda row: row.strategy == STRATEGY,
    summary=_summary,
    figures=_figures,
    sections=_sections,
    text="A slice is the unit of aggregation and of placement; frames of 65 kB are the unit of "
    "sending, so that also within a large slice what is urgent need not wait. Small slices cost "
    "every rank a frame and a piece of work each, large ones wait longer for their last "
    "contribution and share tensors less evenly. Time is dilated here, so a host's cost counts for "
    "less than at the nominal rate: the planner is asked about the cluster as it really is.",
)
