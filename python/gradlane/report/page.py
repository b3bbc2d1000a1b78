"""One self-contained HTML page: sections of text, sortable tables, plots, and how it was measured.

Everything a page shows is in its file, the plotting library included, so that it opens from a
disk or a mail without a network. Inserted text is always escaped, data travel as JSON.
"""

from __future__ import annotations

import html
import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

from gradlane.formats.atomic_io import atomic_write_text
from gradlane.report.plots import Plot

ASSETS = Path(__file__).parent / "assets"
Cell = str | int | float | bool | None
"""A table's cell; numbers sort as numbers, and None shows as a dash."""
_LONG_CELL = 40
"""Characters above which a cell's text is broken into lines."""


@dataclass(frozen=True)
class Paragraph:
    """Plain text."""

    text: str


@dataclass(frozen=True)
class Table:
    """A table that a click on a heading sorts."""

    columns: Sequence[str]
    """Headings, with units."""
    rows: Sequence[Sequence[Cell]]
    """Cells; each row has one for each column."""
    caption: str = ""
    highlight: frozenset[int] = frozenset()
    """Numbers of rows to set off."""


@dataclass(frozen=True)
class Measurement:
    """How the numbers of a page came about."""

    command: str
    """Command line of the run."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """Versions, machine, load and whatever else belongs to it, by name."""
    title: str = "How this was measured"
    """The heading."""


@dataclass(frozen=True)
class Widget:
    """A part that a script of its own fills, from data that travel as JSON."""

    markup: str
    """HTML, whose inserted text is escaped already."""
    data: object
    """Data of the element whose id is the widget's name and `-data`."""
    name: str
    """Of the script and the style sheet among the assets."""


@dataclass(frozen=True)
class Details:
    """A list that is shown when it is asked for."""

    summary: str
    """The part that is always shown."""
    items: Sequence[str]
    """Plain texts."""


@dataclass(frozen=True)
class KeyFigure:
    """One number to see at a glance."""

    value: str
    """The number with its unit."""
    label: str
    """What it is."""
    tone: str = ""
    """`good`, `bad`, or nothing."""


@dataclass(frozen=True)
class Figures:
    """Numbers side by side."""

    figures: Sequence[KeyFigure]


Block = Paragraph | Table | Plot | Measurement | Widget | Details | Figures


@dataclass(frozen=True)
class Section:
    """A part of a page under one heading."""

    title: str
    """The heading; none where it is empty."""
    blocks: Sequence[Block]
    is_folded: bool = False
    """Whether only the heading shows until it is asked for more."""


def measured_here(command: str | None = None) -> Measurement:
    """Describe this process: command, time, versions, machine and load.

    Args:
        command: what was run; this process' own command line where it is None.
    """
    if command is None:
        program = Path(sys.argv[0]).name
        if program == "__main__.py":  # of `python -m`
            program = Path(sys.argv[0]).parent.name
        command = shlex.join([program, *sys.argv[1:]])
    facts = {
        "when": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "python": platform.python_version(),
    }
    for package in ("gradlane", "torch", "numpy"):
        try:
            facts[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    facts["system"] = f"{platform.system()} {platform.release()} ({platform.machine()})"
    facts["processors"] = str(os.cpu_count() or "unknown")
    if hasattr(os, "getloadavg"):
        facts["load (1, 5, 15 min)"] = ", ".join(f"{load:.2f}" for load in os.getloadavg())
    return Measurement(command, facts)


def write_report(
    path: str | Path, title: str, sections: Sequence[Section], *, summary: str = ""
) -> None:
    """Write a page.

    Args:
        path: the file to write; replaced in one move, so that it is always a whole page.
        title: heading of the page.
        sections: its parts, in order.
        summary: a sentence or two below the heading.

    Raises:
        ValueError: if a row of a table has not one cell for each column.
        OSError: if the file cannot be written.
    """
    plots: list[Plot] = []
    body = "\n".join(_section(section, plots) for section in sections)
    widgets = [
        block for section in sections for block in section.blocks if isinstance(block, Widget)
    ]
    names = list(dict.fromkeys(widget.name for widget in widgets))
    library = ""
    if plots or widgets:
        # Imported here, because it takes longer than all the rest of this package.
        from plotly.offline import get_plotlyjs

        library = f"<script>{get_plotlyjs()}</script>"
    described = [{"traces": plot.traces, "layout": plot.layout} for plot in plots]
    page = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{html.escape(title)}</title>
<style>
{asset("page.css")}{"".join(asset(f"{name}.css") for name in names)}</style>
</head>
<body>
<main>
<header>
<button type="button" id="theme" hidden>Theme</button>
<h1>{html.escape(title)}</h1>
{f'<p class="summary">{html.escape(summary)}</p>' if summary else ""}
</header>
{body}
</main>
<script type="application/json" id="plots">{_script_json(described)}</script>
{"".join(_widget_json(widget) for widget in widgets)}{library}
<script>
{asset("page.js")}</script>
{"".join(f"<script>{asset(f'{name}.js')}</script>" for name in names)}
</body>
</html>
"""
    atomic_write_text(Path(path), page)


def asset(name: str) -> str:
    """Return a style sheet, a script or a page of the package."""
    return (ASSETS / name).read_text(encoding="utf-8")


def _script_json(value: object) -> str:
    """Return JSON that can stand in a script element: nothing in it can end that element."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _widget_json(widget: Widget) -> str:
    data = _script_json(widget.data)
    return f'<script type="application/json" id="{widget.name}-data">{data}</script>\n'


def _section(section: Section, plots: list[Plot]) -> str:
    blocks = "\n".join(_block(block, plots) for block in section.blocks)
    if section.is_folded:
        title = html.escape(section.title)
        return (
            f'<section><details class="folded"><summary><h2>{title}</h2></summary>\n{blocks}\n'
            "</details></section>"
        )
    heading = f"<h2>{html.escape(section.title)}</h2>\n" if section.title else ""
    return f"<section>\n{heading}{blocks}\n</section>"


def _block(block: Block, plots: list[Plot]) -> str:
    if isinstance(block, Paragraph):
        return f"<p>{html.escape(block.text)}</p>"
    if isinstance(block, Table):
        return _table(block)
    if isinstance(block, Measurement):
        return _measurement(block)
    if isinstance(block, Widget):
        return block.markup
    if isinstance(block, Details):
        items = "".join(f"<li>{html.escape(item)}</li>" for item in block.items)
        summary = html.escape(block.summary)
        return f"<details><summary>{summary}</summary><ul>{items}</ul></details>"
    if isinstance(block, Figures):
        return _figures(block)
    plots.append(block)
    note = f"<figcaption>{html.escape(block.note)}</figcaption>" if block.note else ""
    title = html.escape(block.title)
    return (
        f'<figure>\n<h3>{title}</h3>\n<div class="plot{" low" if block.is_low else ""}" '
        f'role="img" aria-label="{title}" '
        f'data-plot="{len(plots) - 1}"></div>\n{note}</figure>'
    )


def _figures(block: Figures) -> str:
    items = "".join(
        f'<div class="{html.escape(figure.tone)}"><dt>{html.escape(figure.label)}</dt>'
        f"<dd>{html.escape(figure.value)}</dd></div>"
        for figure in block.figures
    )
    return f'<dl class="figures">{items}</dl>'


def _table(table: Table) -> str:
    for row in table.rows:
        if len(row) != len(table.columns):
            raise ValueError(f"row {list(row)} has not one cell for each of {list(table.columns)}")
    # A column of numbers is aligned to the right, its heading with it.
    numeric = [
        any(_is_number(row[index]) for row in table.rows)
        and all(_is_number(row[index]) or row[index] is None for row in table.rows)
        for index in range(len(table.columns))
    ]
    headings = "".join(
        f'<th scope="col"{_number_class(numeric[index])} aria-sort="none">'
        f'<button type="button">{html.escape(column)}</button></th>'
        for index, column in enumerate(table.columns)
    )
    rows = "\n".join(
        f"<tr{' class=highlight' if number in table.highlight else ''}>"
        + "".join(_cell(cell, numeric[index]) for index, cell in enumerate(row))
        + "</tr>"
        for number, row in enumerate(table.rows)
    )
    # Outside the part that scrolls, so that a wide table does not carry its caption off.
    caption = f'<p class="caption">{html.escape(table.caption)}</p>' if table.caption else ""
    return (
        f'<div class="scroll" tabindex="0"><table><thead><tr>{headings}</tr></thead>'
        f"<tbody>\n{rows}\n</tbody></table></div>{caption}"
    )


def _is_number(cell: Cell) -> bool:
    return isinstance(cell, int | float) and not isinstance(cell, bool)


def _number_class(numeric: bool) -> str:
    return ' class="number"' if numeric else ""


def cell_text(cell: Cell) -> str:
    """Return a cell as people read it: numbers in four digits, with commas between thousands."""
    if cell is None:
        return "\N{EN DASH}"
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, float):
        return f"{cell:,.4g}" if abs(cell) < 1e4 else f"{cell:,.0f}"
    return f"{cell:,}" if isinstance(cell, int) else cell


def _cell(cell: Cell, numeric: bool) -> str:
    key = str(int(cell)) if isinstance(cell, bool) else "" if cell is None else str(cell)
    text = cell_text(cell)
    kind = ' class="long"' if len(text) > _LONG_CELL else _number_class(numeric)
    return f'<td{kind} data-key="{html.escape(key)}">{html.escape(text)}</td>'


def _measurement(block: Measurement) -> str:
    facts = "".join(
        f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd></div>"
        for name, value in block.facts.items()
    )
    return (
        f'<aside class="measured"><h3>{html.escape(block.title)}</h3>'
        f"<pre>{html.escape(block.command)}</pre><dl>{facts}</dl></aside>"
    )
