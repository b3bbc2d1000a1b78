"""The page of the slice experiment: throughput against the size of slices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gradlane.formats.rates import format_rate
from gradlane.lab.experiments import findings
from gradlane.lab.experiments.pages.bandwidth import BOUND, tooltip
from gradlane.lab.experiments.slices import STRATEGY, Sweep, sweeps_of
from gradlane.report.curves import Points, curve_plot
from gradlane.report.page import Block, Cell, Figure, Figures, Paragraph, Section, Table
from gradlane.report.plots import Plot

Row = Mapping[str, Any]
TITLE = "Throughput against the size of slices"
GOAL_OVER_BEST = 1.02
BEST = "best measured"
PLANNED = "planner's choice"


def page_of(rows: Sequence[Row]) -> tuple[str, str, list[Section]]:
    """Return title, summary and sections.

    Raises:
        ValueError: nothing was measured.
    """
    sweeps = sweeps_of(rows)
    if not sweeps:
        raise ValueError("no row is evidence: measure on an idle machine")
    sections = [Section("In short", _in_short(sweeps))]
    for sweep in sweeps:
        title = f"{sweep.cluster[0]} at {format_rate(sweep.cluster[2])}"
        sections.append(Section(title, [_plot(sweep, rows), _table(sweep, rows)]))
    return TITLE, _summary(sweeps), sections


def _summary(sweeps: Sequence[Sweep]) -> str:
    parts = []
    for sweep in sweeps:
        part = f"{sweep.cluster[0]} is fastest with {int(sweep.best['slice_elems']):,} elements"
        over = sweep.planned_over_best
        if over is not None and sweep.planned is not None:
            size = int(sweep.planned["slice_elems"])
            part += f" (the planner takes {size:,}, {over - 1:+.1%})"
        parts.append(part)
    return f"{'; '.join(parts)}."


def _in_short(sweeps: Sequence[Sweep]) -> list[Block]:
    figures = []
    for sweep in sweeps:
        name = str(sweep.cluster[0])
        figures.append(
            Figure(
                f"{int(sweep.best['slice_elems']):,}",
                f"{name}: elements of the best slice"
                + (", between slower ones" if sweep.is_interior else ", at the end of the sweep"),
                "good" if sweep.is_interior else "bad",
            )
        )
        over = sweep.planned_over_best
        if over is not None:
            figures.append(
                Figure(
                    f"{over - 1:+.1%}",
                    f"{name}: step with the planner's choice, to the best",
                    "good" if over <= GOAL_OVER_BEST else "bad",
                )
            )
        slowest = max(sweep.rows, key=lambda row: float(row["step_s_median"]))
        ratio = float(slowest["step_s_median"]) / float(sweep.best["step_s_median"])
        label = f"{name}: slowest size ({int(slowest['slice_elems']):,}) over the best"
        figures.append(Figure(f"{ratio:.2f}×", label))
    return [
        Figures(figures),
        Paragraph(
            "A slice is the unit of aggregation and of placement; frames of 65 kB are the unit of "
            "sending, so that also within a large slice what is urgent need not wait. Small slices "
            "cost every rank a frame and a piece of work each, large ones wait longer for their "
            "last contribution and share tensors less evenly. Time is dilated here, so a host's "
            "cost counts for less than at the nominal rate: the planner is asked about the "
            "cluster as it really is."
        ),
    ]


def _plot(sweep: Sweep, rows: Sequence[Row]) -> Plot:
    simulated = sorted(
        (row for row in findings.simulated(rows) if findings.cluster_of(row) == sweep.cluster),
        key=lambda row: int(row["slice_elems"]),
    )
    stars = {BEST: _points([sweep.best], rows)}
    if sweep.planned is not None:
        stars[PLANNED] = _points([sweep.planned], rows)
    sizes = [int(row["slice_elems"]) for row in sweep.rows]
    bound = [row for row in sweep.rows if row.get("bound_step_s")]
    samples = [
        int(row["workers"]) * int(row["batch_size"]) / float(row["bound_step_s"]) for row in bound
    ]
    limits = {
        BOUND: Points(
            [float(row["slice_elems"]) for row in bound],
            samples,
            [f"<b>bound</b><br>{value:.1f} samples/s" for value in samples],
        )
    }
    return curve_plot(
        "Throughput",
        {"measured": _points(sweep.rows, rows)},
        {"simulated": _points(simulated, rows)} if simulated else {},
        limits,
        x_label="elements of a slice at most",
        y_label="samples/s, all workers",
        colors={"measured": 0, "simulated": 1},
        x_ticks={float(size): _short(size) for size in sizes},
        is_log=True,
        is_from_zero=False,
        stars=stars,
        note="The star is the best that was measured, the diamond what the planner chooses.",
    )


def _short(size: int) -> str:
    return f"{size / 1e6:g}M" if size >= 1_000_000 else f"{size / 1e3:g}k"


def _points(rows: Sequence[Row], all_rows: Sequence[Row]) -> Points:
    return Points(
        [float(row["slice_elems"]) for row in rows],
        [float(row["samples_per_s"]) for row in rows],
        [f"{int(row['slice_elems']):,} elements<br>{tooltip(row, all_rows)}" for row in rows],
    )


def _table(sweep: Sweep, rows: Sequence[Row]) -> Table:
    columns = (
        "elements",
        "samples/s",
        "step, ms",
        "to best, %",
        "to bound, %",
        "simulated, ms",
        "error, %",
        "ports, %",
        "CPU, %",
        "no evidence",
        "",
    )
    body: list[list[Cell]] = []
    highlight: set[int] = set()
    own = [
        row
        for row in rows
        if findings.cluster_of(row) == sweep.cluster
        and row.get("source") != "simulated"
        and row["strategy"] == STRATEGY
    ]
    best_s = float(sweep.best["step_s_median"])
    for row in sorted(own, key=lambda row: int(row["slice_elems"])):
        marks = [BEST] if row is sweep.best else []
        marks += [PLANNED] if row is sweep.planned else []
        if marks:
            highlight.add(len(body))
        step_s = float(row["step_s_median"])
        simulated = findings.counterpart(row, rows)
        simulated_s = None if simulated is None else float(simulated["step_s_median"])
        bound_s = row.get("bound_step_s")
        body.append(
            [
                int(row["slice_elems"]),
                round(float(row["samples_per_s"]), 1),
                round(1e3 * step_s, 1),
                round(100 * (step_s / best_s - 1), 1),
                round(100 * (step_s / float(bound_s) - 1), 1) if bound_s else None,
                None if simulated_s is None else round(1e3 * simulated_s, 1),
                None if simulated_s is None else round(100 * (simulated_s / step_s - 1), 1),
                round(100 * float(row["link_utilization"]), 1),
                round(100 * float(row["cpu_share"]), 1),
                True if row["cpu_bound"] else None,
                ", ".join(marks),
            ]
        )
    used = [index for index in range(len(columns)) if any(line[index] is not None for line in body)]
    return Table(
        [columns[index] for index in used],
        [[line[index] for index in used] for line in body],
        "Nominal times. Set off: the best, and the planner's choice.",
        frozenset(highlight),
    )
