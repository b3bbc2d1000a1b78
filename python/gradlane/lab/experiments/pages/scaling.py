"""The page of the scaling experiment: throughput against the number of workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gradlane.formats.rates import format_rate
from gradlane.lab.experiments import findings
from gradlane.lab.experiments.pages.bandwidth import tooltip
from gradlane.lab.runs.cells import CEILING
from gradlane.planning.simulation.scenarios import RING_FUSED
from gradlane.report.curves import Points, curve_plot
from gradlane.report.page import Block, Cell, Figure, Figures, Paragraph, Section, Table
from gradlane.report.plots import Plot
from gradlane.training.options.options import STRATEGIES as ENGINE_STRATEGIES

Row = Mapping[str, Any]
TITLE = "Throughput against the number of workers"
IDEAL = "compute alone"
DDP = "DDP"
RING = "fused ring (model of DDP)"
COLORS: Mapping[str, int | str] = {
    **{name: number for number, name in enumerate(ENGINE_STRATEGIES)},
    DDP: "text",
    RING: 6,
}


def page_of(rows: Sequence[Row]) -> tuple[str, str, list[Section]]:
    """Return title, summary and sections.

    Raises:
        ValueError: nothing was measured.
    """
    evidence = findings.measured(rows)
    if not evidence:
        raise ValueError("no row is evidence: measure on an idle machine")
    groups = dict.fromkeys((str(row["workload"]), int(row["rate_bps"])) for row in evidence)
    sections = [Section("In short", _in_short(rows, list(groups)))]
    for workload, rate_bps in groups:
        own = [row for row in rows if (row["workload"], row["rate_bps"]) == (workload, rate_bps)]
        title = f"{workload} at {format_rate(rate_bps)}"
        sections.append(Section(title, [_plot(own), _table(own)]))
    return TITLE, _summary(rows, list(groups)), sections


def scaling_factor(row: Row) -> float:
    """Return compute time over step time: 1 is as if there were no network."""
    return float(row["compute_s"]) / float(row["step_s_median"])


def _largest(rows: Sequence[Row], workload: str, rate_bps: int, strategy: str) -> Row | None:
    own = [
        row
        for row in rows
        if (row["workload"], row["rate_bps"], row["strategy"]) == (workload, rate_bps, strategy)
    ]
    return max(own, key=lambda row: int(row["workers"]), default=None)


def _summary(rows: Sequence[Row], groups: Sequence[tuple[str, int]]) -> str:
    parts = []
    for workload, rate_bps in groups:
        row = _largest(findings.measured(rows), workload, rate_bps, "p3")
        if row is not None:
            parts.append(f"{workload} {scaling_factor(row):.0%} on {row['workers']} workers")
    return (
        f"Share of linear scaling that p3 reaches, measured: {', '.join(parts)}." if parts else ""
    )


def _in_short(rows: Sequence[Row], groups: Sequence[tuple[str, int]]) -> list[Block]:
    figures = []
    for workload, rate_bps in groups:
        row = _largest(findings.measured(rows), workload, rate_bps, "p3")
        if row is not None:
            label = f"{workload}: of linear, p3 on {row['workers']} workers, measured"
            figures.append(Figure(f"{scaling_factor(row):.0%}", label))
        row = _largest(findings.simulated(rows), workload, rate_bps, "p3")
        if row is not None:
            label = f"{workload}: of linear, p3 on {int(row['workers']):,} workers, simulated"
            figures.append(Figure(f"{scaling_factor(row):.0%}", label))
    return [
        Figures(figures),
        Paragraph(
            "Dots are measured between emulated nodes, with time dilated so that two cores keep "
            "up. Lines are simulated as on real machines of the nominal rate, with a host's costs "
            "in full; they go on to 1,024 workers, with ranks that do the same folded into a few. "
            "The ring is a formula for fused buffers that charges hosts nothing (Zhang et al. "
            "2020). Linear is what compute alone would reach."
        ),
    ]


def _named(row: Row) -> str:
    strategy = str(row["strategy"])
    if strategy == RING_FUSED:
        return RING
    return DDP if strategy.startswith("ddp") else strategy


def _plot(rows: Sequence[Row]) -> Plot:
    evidence = [row for row in findings.measured(rows) if row["strategy"] != CEILING]
    measured = _grouped(_best_of_each(evidence), rows)
    simulated = _grouped(findings.simulated(rows), rows)
    workers = sorted({int(row["workers"]) for row in rows})
    ideal = [float(_ideal(rows, count)) for count in workers]
    limits = {
        IDEAL: Points(
            [float(count) for count in workers],
            [1.0] * len(workers),
            [
                f"<b>compute alone</b>, {count:,} workers<br>{value:,.0f} samples/s"
                for count, value in zip(workers, ideal, strict=True)
            ],
        )
    }
    return curve_plot(
        "Scaling: share of what compute alone would reach",
        measured,
        simulated,
        limits,
        x_label="workers",
        y_label="share of linear scaling",
        colors=COLORS,
        x_ticks={float(count): f"{count:,}" for count in workers},
        is_log=True,
        note="Dots: measured. Lines: simulated. A tooltip tells the samples a second.",
    )


def _best_of_each(rows: Sequence[Row]) -> list[Row]:
    """Keep of DDP's bucket sizes the fastest for each number of workers."""
    best: dict[tuple[str, int], Row] = {}
    for row in rows:
        key = _named(row), int(row["workers"])
        if key not in best or float(row["step_s_median"]) < float(best[key]["step_s_median"]):
            best[key] = row
    return list(best.values())


def _ideal(rows: Sequence[Row], workers: int) -> float:
    row = rows[0]
    return workers * int(row["batch_size"]) / float(row["compute_s"])


def _grouped(rows: Sequence[Row], all_rows: Sequence[Row]) -> dict[str, Points]:
    found = {}
    for name in COLORS:
        own = sorted(
            (row for row in rows if _named(row) == name), key=lambda row: int(row["workers"])
        )
        if own:
            found[name] = Points(
                [float(row["workers"]) for row in own],
                [scaling_factor(row) for row in own],
                [
                    f"{int(row['workers']):,} workers, {scaling_factor(row):.1%} of linear<br>"
                    f"{tooltip(row, all_rows)}"
                    for row in own
                ],
            )
    return found


def _table(rows: Sequence[Row]) -> Table:
    columns = (
        "workers",
        "strategy",
        "source",
        "samples/s",
        "of linear, %",
        "step, ms",
        "to bound, %",
        "dilation",
        "CPU, %",
        "no evidence",
    )
    ordered = sorted(
        (row for row in rows if row["strategy"] != CEILING),
        key=lambda row: (int(row["workers"]), str(row["strategy"]), str(row.get("source"))),
    )
    body: list[list[Cell]] = []
    for row in ordered:
        bound_s = row.get("bound_step_s")
        step_s = float(row["step_s_median"])
        has_bound = bound_s and row["strategy"] != RING_FUSED
        body.append(
            [
                int(row["workers"]),
                str(row["strategy"]),
                str(row.get("source", "measured")),
                round(float(row["samples_per_s"]), 1),
                round(100 * scaling_factor(row), 1),
                round(1e3 * step_s, 1),
                round(100 * (step_s / float(bound_s) - 1), 1) if has_bound and bound_s else None,
                float(row["dilation"]),
                None if row.get("cpu_share") is None else round(100 * float(row["cpu_share"]), 1),
                True if row["cpu_bound"] else None,
            ]
        )
    used = [index for index in range(len(columns)) if any(line[index] is not None for line in body)]
    return Table(
        [columns[index] for index in used],
        [[line[index] for index in used] for line in body],
        "Nominal times. Of linear: compute time over step time.",
    )
