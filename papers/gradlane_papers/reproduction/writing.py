"""Reproduced figures on a terminal, as a page of text, and as a page with plots."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from gradlane.report.console import text_table
from gradlane.report.markdown import filled, markdown_table
from gradlane_papers.reproduction.comparison import Comparison, Curve
from gradlane_papers.reproduction.figures import FIGURES, Reproduction, paper_of

COLUMNS = ("number", "paper", "ours", "difference", "why")
TEMPLATE = Path(__file__).with_name("reproduced.md")
LONG = 40
"""Rows from which a figure's table is left to the page of all published numbers."""


def number(value: float | None) -> str:
    """Return a number with as many digits as it deserves; a dash for none."""
    if value is None:
        return "-"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if abs(value) >= 100 or value == round(value):
        return f"{value:.4g}"
    # Parameters of a small network are a fraction of a million; a thousandth of a percent is none.
    return f"{value:.4f}" if 0.005 <= abs(value) < 0.5 else f"{value:.2f}"


def cells_of(row: Comparison) -> tuple[str, ...]:
    """Return a row's cells, in the order of `COLUMNS`."""
    theirs = row.published
    paper = theirs.says if theirs.value is None else number(theirs.value)
    difference = "-"
    if row.difference is not None:
        difference = f"{row.difference:+.1f}" if abs(row.difference) < 1000 else "-"
        if theirs.value and theirs.unit not in ("%",):
            difference = f"{100 * row.difference / theirs.value:+.1f} %"
        elif theirs.unit == "%":
            difference += " points"
    name = f"{row.what}, {theirs.unit}" if theirs.unit else row.what
    return name, paper, number(row.value), difference, row.why


def curve_text(curve: Curve) -> str:
    """Return a curve in one line."""
    points = ", ".join(f"{x:g}: {number(y)}" for x, y in curve.points)
    return f"{curve.name} ({curve.y} over {curve.x}): {points}"


def print_list(console: Console) -> None:
    """Print all figures, and how they are reproduced."""
    rows = [(figure.name, figure.title, figure.setting) for figure in FIGURES.values()]
    rows.append(("modern", "networks of today: where scheduling helps", "a page of its own"))
    rows.append(("published", "every published number beside ours", "a page of its own"))
    columns = ("figure", "what", "how")
    console.print(text_table("", columns, rows, texts=columns))


def print_reproduction(console: Console, made: Reproduction) -> None:
    """Print one figure."""
    figure = made.figure
    console.print(f"{figure.name}: {figure.title}", style="bold", highlight=False)
    console.print(f"{paper_of(figure.name)}; ours: {made.setting}", style="dim", highlight=False)
    if made.rows:
        rows = map(cells_of, made.rows)
        texts = ("number", "paper", "why")
        console.print(text_table("", COLUMNS, rows, texts=texts))
    for curve in made.curves:
        console.print(curve_text(curve), highlight=False)


def markdown_of(made: Sequence[Reproduction], command: str) -> str:
    """Return the page of text: every number beside the paper's."""
    parts: list[str] = []
    paper = ""
    for one in made:
        if paper_of(one.figure.name) != paper:
            paper = paper_of(one.figure.name)
            parts.append(f"## {paper}\n")
        parts.append(f"### `{one.figure.name}`: {one.figure.title}\n")
        parts.append(f"Ours: {one.setting}.\n")
        if len(made) > 1 and len(one.rows) > LONG:
            parts.append(
                f"All {len(one.rows)} numbers stand on the [page of published ones](published.md), "
                f"which `gradlane reproduce {one.figure.name}` prints as well.\n"
            )
        elif one.rows:
            parts.append(markdown_table(COLUMNS, map(cells_of, one.rows), numbers="-nnn-") + "\n")
        if one.curves:
            parts.append("\n".join(f"- {curve_text(curve)}" for curve in one.curves) + "\n")
    return filled(TEMPLATE, command=command, figures="\n".join(parts))


def write_page(made: Sequence[Reproduction], path: Path) -> None:
    """Write the page with plots.

    Raises:
        OSError: it cannot be written.
    """
    from gradlane.report.page import Block, Paragraph, Section, measured_here, write_report
    from gradlane.report.page import Table as PageTable
    from gradlane.report.plots import line_plot

    sections = []
    for one in made:
        blocks: list[Block] = [Paragraph(f"{paper_of(one.figure.name)}. Ours: {one.setting}.")]
        if one.rows:
            columns = ("number", "unit", "paper", "ours", "difference", "why")
            rows = [
                (
                    row.what,
                    row.published.unit,
                    row.published.says if row.published.value is None else row.published.value,
                    *(
                        None if one is None else round(one, 4)
                        for one in (row.value, row.difference)
                    ),
                    row.why,
                )
                for row in one.rows
            ]
            blocks.append(PageTable(columns, rows))
        for x, y in dict.fromkeys((curve.x, curve.y) for curve in one.curves):
            series = {
                curve.name: ([p[0] for p in curve.points], [p[1] for p in curve.points])
                for curve in one.curves
                if (curve.x, curve.y) == (x, y)
            }
            title = f"{y} over {x}"
            blocks.append(line_plot(title, series, x_label=x, y_label=y, markers=True))
        sections.append(Section(f"{one.figure.name}: {one.figure.title}", blocks))
    sections.append(Section("", [measured_here()]))
    write_report(path, "Figures of the papers, and ours", sections)
