"""The study's page: curves with bands over seeds, against steps and against time, and tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from gradlane.formats.rates import format_rate
from gradlane.report.page import Block, Paragraph, Section, measured_here, write_report
from gradlane.report.plots import Plot, line_plot
from gradlane_papers.accuracy import findings
from gradlane_papers.accuracy.exchange import ALL
from gradlane_papers.accuracy.findings import schemes_of, select, tasks_of
from gradlane_papers.accuracy.markdown import main_table, spread_caption, sweep_tables
from gradlane_papers.accuracy.study import RATES_BPS, Result
from gradlane_papers.accuracy.tasks import task_of

SHOWN_AT_FIRST = ("p3", "asgd", "qsgd:bits=8", "qsgd:bits=2", "onebit", "dgc")
"""Beginnings of the names of lines that show without a click."""
PALETTE = 8
"""Colours of a page before they repeat."""


def write_page(rows: Sequence[Result], path: Path) -> None:
    """Write the page.

    Args:
        rows: of the study; at least one.
        path: the HTML file.
    """
    main = _without_sweeps(rows)
    schemes = schemes_of(main)
    sections = []
    for task in tasks_of(main):
        own = select(main, task=task)
        blocks: list[Block] = [Paragraph(_about(task, own)), main_table(rows, task)]
        blocks.append(_curves("Accuracy against steps", own, schemes, None))
        for rate_bps in RATES_BPS:
            title = f"Accuracy against time at {format_rate(rate_bps)}"
            blocks.append(_curves(title, own, schemes, rate_bps))
        sections.append(Section(task, blocks))
    sections += [Section(title, [table]) for title, table in sweep_tables(rows).items()]
    sections.append(Section("Measurement", [measured_here()]))
    write_report(path, "What codecs do to learning", sections, summary=_summary(rows))


def _without_sweeps(rows: Sequence[Result]) -> list[Result]:
    """Return the rows of schemes that more than one task has, or all where there is one task."""
    tasks = {
        scheme: {row.task for row in rows if row.scheme == scheme} for scheme in schemes_of(rows)
    }
    several = len(tasks_of(rows)) > 1
    return [
        row for row in rows if row.layers == ALL and (not several or len(tasks[row.scheme]) > 1)
    ]


def _about(task: str, rows: Sequence[Result]) -> str:
    seeds = len({row.seed for row in rows})
    text = (
        f"{task_of(task).what}, {rows[0].parameters:,} parameters, {rows[0].workers} workers, "
        f"{rows[0].steps} steps, {seeds} seed{'s' if seeds > 1 else ''}."
    )
    return f"{text} Bands reach from the least to the greatest seed." if seeds > 1 else text


def _summary(rows: Sequence[Result]) -> str:
    if len({row.seed for row in rows}) == 1:
        return spread_caption(rows)
    worst = findings.loses(rows)
    if not worst:
        return "No codec ends below full precision by more than the noise of seeds."
    texts = [
        f"{scheme} on {task} by {-100 * change.mean:.1f} points"
        for task, scheme, change in sorted(worst, key=lambda it: it[2].mean)[:3]
    ]
    return f"Most is lost by {', '.join(texts)}."


def _curves(
    title: str, rows: Sequence[Result], schemes: Sequence[str], rate_bps: int | None
) -> Plot:
    """Plot mean accuracy and a band over seeds of every scheme."""
    groups = {scheme: select(rows, scheme=scheme) for scheme in schemes_of(rows)}
    accuracies = {
        scheme: 100.0 * np.array([row.accuracy for row in own]) for scheme, own in groups.items()
    }
    times = {
        scheme: list(
            own[0].evaluated
            if rate_bps is None
            else np.mean([row.times_s(rate_bps) for row in own], axis=0).round(6).tolist()
        )
        for scheme, own in groups.items()
    }
    numbers = {scheme: schemes.index(scheme) for scheme in groups}
    plot = line_plot(
        title,
        {
            scheme: (times[scheme], values.mean(axis=0).round(3).tolist())
            for scheme, values in accuracies.items()
        },
        x_label="step" if rate_bps is None else "emulated time, s",
        y_label="held-out accuracy, %",
        colors={scheme: number % PALETTE for scheme, number in numbers.items()},
        dashed=[scheme for scheme, number in numbers.items() if number >= PALETTE],
        hidden=[scheme for scheme in groups if not scheme.startswith(SHOWN_AT_FIRST)],
        note="Click a name in the legend to show or hide its line.",
    )
    for line in plot.traces[:]:
        xs, values = times[line["name"]], accuracies[line["name"]]
        if len(values) > 1:
            low, high = values.min(axis=0).round(3), values.max(axis=0).round(3)
            band = {"x": [*xs, *reversed(xs)], "y": [*low.tolist(), *high[::-1].tolist()]}
            look = {"line": {"width": 0}, "fill": "toself", "opacity": 0.25, "hoverinfo": "skip"}
            plot.traces.append({**line, **band, **look, "showlegend": False})
    if rate_bps is not None:
        slowest = max(row.times_s(rate_bps)[-1] for row in rows)
        plot.layout["xaxis"]["range"] = [0, slowest / 2]
    return plot
