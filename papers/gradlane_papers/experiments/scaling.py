"""Throughput against the number of workers, as in figure 10 of the P3 paper.

Two, four and eight ranks are measured; up to 1,024 are simulated, as on real machines: with
nothing dilated and without token buckets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from gradlane.formats.rates import format_rate
from gradlane.lab.runs.cells import Cell, usual_dilation
from gradlane.lab.runs.page_parts import percent
from gradlane.lab.runs.rows import CEILING, MEASURED, Row
from gradlane.planning.models import ARCHITECTURES
from gradlane.planning.simulation.scenarios import RING_FUSED
from gradlane.report.curves import Points, curve_plot
from gradlane.report.page import KeyFigure, Section, Table
from gradlane.report.plots import Plot
from gradlane.training.options.strategy import STRATEGIES as ENGINE_STRATEGIES
from gradlane_papers.experiments import parts
from gradlane_papers.experiments.findings import Findings
from gradlane_papers.experiments.preset import GBIT, Preset
from gradlane_papers.experiments.simulated import Simulation, compute_times

RATE_BPS = 10 * GBIT
SIMULATED_WORKERS = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
MOST_UNFOLDED = 256
"""Whole tensors on drawn servers cannot be folded: beyond this a simulation takes too long."""
UNFOLDED = ("kvstore", "deferred-pull")
EIGHT_REAL_BPS = 350_000_000
"""Real rate of each of more than four ports that two cores carry."""
_COPIES = 3.5
"""Of a model that a rank holds at most: parameters, gradients, buffers under way."""
_RANK_BYTES = 350_000_000
"""A rank's memory without a model."""
IDEAL = "compute alone"
DDP = "DDP"
RING = "fused ring (model of DDP)"
COLORS = {**parts.COLORS, DDP: "text", RING: 6}
_TABLE: tuple[parts.Column, ...] = (
    ("workers", lambda row, _: row.workers),
    parts.STRATEGY,
    ("source", lambda row, _: row.source or MEASURED),
    parts.SAMPLES,
    ("of linear, %", lambda row, _: percent(scaling_factor(row))),
    parts.STEP,
    parts.TO_BOUND,
    ("dilation", lambda row, _: float(row.dilation)),
    parts.CPU,
)


def _dilation(workload: str, rate_bps: int, workers: int) -> float:
    usual = usual_dilation(workload, rate_bps)
    return usual if workers <= 4 else max(usual, round(rate_bps / EIGHT_REAL_BPS, 1))


def needed_bytes(cell: Cell) -> float:
    """Return about how much memory all ranks of a cell take."""
    model_bytes = 4 * ARCHITECTURES[cell.workload]().numel
    return cell.workers * (_COPIES * model_bytes + _RANK_BYTES)


def without_large_cells(preset: Preset, available_bytes: float) -> tuple[Preset, list[str]]:
    """Return the preset without the cells that this machine has not memory enough for.

    Returns:
        The preset, and a sentence for each cell that was left out.
    """
    fitting = [cell for cell in preset.cells if needed_bytes(cell) <= available_bytes]
    said = [
        f"{cell.workload} on {cell.workers} workers is left out: it takes about "
        f"{needed_bytes(cell) / 1e9:.1f} GB of memory, and {available_bytes / 1e9:.1f} GB are free"
        for cell in preset.cells
        if cell not in fitting
    ]
    return replace(preset, cells=fitting), said


def _simulations(rows: Sequence[Row]) -> list[Simulation]:
    found = []
    for workload, compute_s in compute_times(rows).items():
        own = [row for row in rows if row.workload == workload and not row.is_simulated]
        names = dict.fromkeys(row.strategy for row in own if row.strategy in ENGINE_STRATEGIES)
        found += [
            Simulation(workload, name, workers, rate_bps, 1.0, compute_s, is_real=True)
            for rate_bps in dict.fromkeys(row.rate_bps for row in own)
            for name in (*names, RING_FUSED)
            for workers in SIMULATED_WORKERS
            if name not in UNFOLDED or workers <= MOST_UNFOLDED
        ]
    return found


def scaling_factor(row: Row) -> float:
    """Return compute time over step time: 1 is as if there were no network."""
    return row.compute_s / row.step_s_median


def _groups(found: Findings) -> dict[tuple[str, int], list[Row]]:
    """Return the rows of each network and rate that was measured."""
    keys = dict.fromkeys((row.workload, row.rate_bps) for row in found.measured)
    return {key: [row for row in found.rows if (row.workload, row.rate_bps) == key] for key in keys}


def _largest(rows: Sequence[Row]) -> Row | None:
    """Return the row of p3 with the most workers."""
    own = [row for row in rows if row.strategy == "p3"]
    return max(own, key=lambda row: row.workers, default=None)


def _summary(found: Findings) -> str:
    largest = [_largest(Findings(rows).measured) for rows in _groups(found).values()]
    shares = ", ".join(
        f"{row.workload} {scaling_factor(row):.0%} on {row.workers} workers"
        for row in largest
        if row is not None
    )
    return f"Share of linear scaling that p3 reaches, measured: {shares}." if shares else ""


def _figures(found: Findings) -> Iterator[KeyFigure]:
    for rows in map(Findings, _groups(found).values()):
        for own, source in ((rows.measured, "measured"), (rows.simulated, "simulated")):
            row = _largest(own)
            if row is not None:
                label = f"{row.workload}: of linear, p3 on {row.workers:,} workers, {source}"
                yield KeyFigure(f"{scaling_factor(row):.0%}", label)


def _sections(found: Findings) -> Iterator[Section]:
    for (workload, rate_bps), rows in _groups(found).items():
        own = Findings(rows)
        yield Section(f"{workload} at {format_rate(rate_bps)}", [_plot(own), _rows(own)])


def _named(row: Row) -> str:
    if row.strategy == RING_FUSED:
        return RING
    return DDP if row.strategy.startswith("ddp") else row.strategy


def _plot(found: Findings) -> Plot:
    # Of DDP's bucket sizes the fastest is shown for each number of workers.
    best: dict[tuple[str, int], Row] = {}
    for row in sorted(found.measured, key=lambda row: row.step_s_median):
        best.setdefault((_named(row), row.workers), row)

    def curves(rows: Sequence[Row]) -> dict[str, Points]:
        groups = {name: [row for row in rows if _named(row) == name] for name in COLORS}
        return {
            name: parts.points(
                own,
                lambda row: float(row.workers),
                scaling_factor,
                lambda row: (
                    f"{row.workers:,} workers, {scaling_factor(row):.1%} of linear<br>"
                    f"{parts.tooltip(row, found)}"
                ),
            )
            for name, own in groups.items()
            if own
        }

    first = found.rows[0]
    workers = sorted({row.workers for row in found.rows})
    ideal = [
        f"<b>compute alone</b>, {count:,} workers<br>"
        f"{count * first.batch_size / first.compute_s:,.0f} samples/s"
        for count in workers
    ]
    return curve_plot(
        "Scaling: share of what compute alone would reach",
        curves([row for row in best.values() if row.communicates]),
        curves(found.simulated),
        {IDEAL: Points([float(count) for count in workers], [1.0] * len(workers), ideal)},
        x_label="workers",
        y_label="share of linear scaling",
        colors=COLORS,
        x_ticks={float(count): f"{count:,}" for count in workers},
        is_log=True,
        note="Dots: measured. Lines: simulated. A tooltip tells the samples a second.",
    )


def _rows(found: Findings) -> Table:
    ordered = sorted(
        (row for row in found.rows if row.communicates),
        key=lambda row: (row.workers, row.strategy, str(row.source)),
    )
    caption = "Nominal times. Of linear: compute time over step time."
    return parts.row_table(_TABLE, ordered, found, caption)


SCALING = Preset(
    name="scaling",
    title="Throughput against the number of workers",
    rates_bps={name: (RATE_BPS,) for name in ("resnet50", "vgg19", "sockeye")},
    strategies=(CEILING, "p3", "wfbp", "kvstore", "ddp-gloo:25"),
    workers=(2, 4, 8),
    dilation=_dilation,
    simulations=_simulations,
    summary=_summary,
    figures=_figures,
    sections=_sections,
    text="Dots are measured between emulated nodes, with time dilated so that two cores keep up. "
    "Lines are simulated as on real machines of the nominal rate, with a host's costs in full; "
    "they go on to 1,024 workers, with ranks that do the same folded into a few. The ring is a "
    "formula for fused buffers that charges hosts nothing (Zhang et al. 2020). Linear is what "
    "compute alone would reach.",
)
