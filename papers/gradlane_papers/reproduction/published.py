"""The table of all numbers that the papers publish: published, ours, deviation in percent, cause.

One row a published number, in the order of the papers' figures. Ours is the figure's main answer;
`gradlane reproduce FIGURE` shows all of its variants, which the causes are taken from.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from gradlane.report.console import text_table
from gradlane.report.markdown import filled, markdown_table
from gradlane_papers.reproduction.comparison import (
    ROLES,
    Comparison,
    Published,
    content_of,
    published_of,
    published_tables,
    speeds,
)
from gradlane_papers.reproduction.figures import FIGURES, Reproduction, paper_of, reproduce
from gradlane_papers.reproduction.lowprec import fit_quality
from gradlane_papers.reproduction.lowprec_model import PARTS, Errors, constants
from gradlane_papers.reproduction.simulations import Simulations
from gradlane_papers.reproduction.writing import number

TEMPLATE = Path(__file__).with_name("published.md")
MEASURED = Path(__file__).with_name("measured.json")
"""What our own lab has measured of the same, from the tables of `docs/research`, and what cannot be
measured here, by paper."""
LIMITS = (5, 10, 25)
"""Percent within which predictions are counted."""
COLUMNS = ("figure", "number", "published", "ours", "deviation, %", "measured in our lab", "cause")
KINDS = ("counted", "a cell of a table of speeds", "simulated or by a model")
"""Kinds of numbers, which are counted apart: what is counted has to be right."""
SAME = "as above"
"""In place of a cause, or a setting, that the last one above says, too."""
NEAR = 10
"""Percent up to which the page of text gives no cause for a prediction's deviation."""


def cause_of(row: Comparison) -> str:
    """Return why ours deviates or not."""
    note = f" (reading: {row.published.note})" if row.published.note else ""
    return f"{row.why}{note}"


def kind_of(row: Comparison) -> str:
    """Return one of `KINDS`."""
    name = row.published.figure
    if name in published_tables()["speeds"]:
        return KINDS[1]
    return KINDS[0 if FIGURES[name].setting.startswith("counted") else 2]


def measured_of(row: Comparison) -> float | None:
    """Return what our own lab has measured of the same number; None where it has not."""
    one = content_of(MEASURED)["measured"].get(row.published.figure, {}).get(row.published.key)
    return None if one is None else float(one["value"])


def row_of(row: Comparison) -> dict[str, Any]:
    """Return a row as JSON has it."""
    theirs = row.published
    return {
        "figure": theirs.figure,
        "what": row.what,
        "unit": theirs.unit,
        "source": theirs.source,
        "published": theirs.value,
        "ours": row.value,
        "deviation": row.deviation,
        "role": ROLES[row.role],
        "kind": kind_of(row),
        "measured": measured_of(row),
        "cause": cause_of(row),
        "paper": paper_of(theirs.figure),
    }


def main_answer(published: Published, rows: Iterable[Comparison]) -> Comparison:
    """Return the answer among a number's variants that the table takes.

    Args:
        published: the number.
        rows: its variants; none where its figure was not reproduced.
    """
    found = list(rows) or [Comparison(published, None)]
    return next((one for one in found if one.ours and one.ours.main), found[0])


def rows_of(made: Sequence[Reproduction]) -> list[Comparison]:
    """Return a row for every published number of all figures.

    Args:
        made: figures; numbers of the others have no answer.
    """
    compared = {one.figure.name: one.rows for one in made}
    return [
        main_answer(
            published, (row for row in compared.get(name, ()) if row.published == published)
        )
        for name in FIGURES
        for published in published_of(name).values()
        if published.value is not None
    ]


@dataclass(frozen=True)
class Study:
    """The table, with how it was made.

    Attributes:
        rows: of all published numbers.
        settings: how each figure was reproduced, by name.
        cpu_s: processor seconds that all simulations took.
    """

    rows: tuple[Comparison, ...]
    settings: dict[str, str]
    cpu_s: float

    def counts(self) -> dict[str, int]:
        """Return how many numbers there are of each role, and predictions within each limit."""
        roles = Counter(row.role for row in self.rows)
        predicted = [row for row in self.rows if not row.role]
        counted = {ROLES[role]: roles[role] for role in ROLES}
        counted |= {
            f"predicted within {limit} %": sum(row.is_within(limit) for row in predicted)
            for limit in LIMITS
        }
        return {"published": len(self.rows), **counted}

    def kinds(self) -> list[tuple[str, ...]]:
        """Return a line for each kind: its predictions, their median deviation, and how many are
        within each limit."""
        lines = []
        for kind in KINDS:
            rows = [row for row in self.rows if not row.role and kind_of(row) == kind]
            off = [abs(row.deviation) for row in rows if row.deviation is not None]
            if not off:
                continue
            within = (str(sum(row.is_within(limit) for row in rows)) for limit in LIMITS)
            lines.append((kind, str(len(rows)), f"{statistics.median(off):.1f}", *within))
        return lines

    def to_json(self) -> dict[str, Any]:
        """Return everything, and the errors of the fitted model."""
        return {
            "rows": [row_of(row) for row in self.rows],
            "counts": self.counts(),
            "settings": self.settings,
            "model": {
                primitive: {
                    "constants": dict(constants(primitive)),
                    "errors": [
                        {"over": text, **asdict(made)} for text, made in fit_quality(primitive)
                    ],
                }
                for primitive in PARTS
            },
            "cpu_s": self.cpu_s,
        }


def study(simulations: Simulations) -> Study:
    """Reproduce all figures and put every published number beside ours."""
    begun_s = time.process_time()
    made = reproduce(list(FIGURES.values()), simulations)
    settings = {one.figure.name: one.setting for one in made}
    return Study(tuple(rows_of(made)), settings, time.process_time() - begun_s)


def cells_of(row: Comparison) -> tuple[str, ...]:
    """Return a row's cells, in the order of `COLUMNS`."""
    what = f"{row.what}, {row.published.unit}" if row.published.unit else row.what
    deviation = "-" if row.deviation is None else f"{row.deviation:+.1f}"
    cause = cause_of(row)
    if row.role not in ("", "none"):
        cause = f"[{ROLES[row.role]}] {cause}"
    theirs = row.published
    lab = measured_of(row)
    return (
        *(theirs.figure, what, number(theirs.value), number(row.value), deviation),
        *("-" if lab is None else number(lab), cause),
    )


def lines_of(rows: Sequence[Comparison]) -> list[tuple[str, ...]]:
    """Return the lines of a figure's table: a cause where a prediction is not near, each once."""
    lines: list[tuple[str, ...]] = []
    last = ""
    for row in rows:
        *cells, cause = cells_of(row)[1:]
        if not row.role and row.is_within(NEAR):
            shown = ""
        else:
            shown, last = SAME if cause == last else cause, cause
        lines.append((*cells, shown))
    return lines


def speed_lines(rows: Sequence[Comparison]) -> list[tuple[str, ...]]:
    """Return a table of speeds with a line for each network and encoding, a cell for each number
    of GPUs: the published speed, ours, and the deviation of a prediction in percent."""
    found = {row.published.key: row for row in rows}
    content = published_tables()
    table = rows[0].published.figure
    lines: dict[tuple[str, str], dict[int, str]] = {}
    for speed in speeds(table):
        row = found[speed.key]
        text = f"{number(speed.value)} / {number(row.value)}"
        if not row.role and row.deviation is not None:
            text += f" ({row.deviation:+.0f})"
        lines.setdefault((speed.network, speed.encoding), {})[speed.gpus] = text
    return [
        (
            f"{content['networks'][network]}, {content['encodings'][encoding]}",
            *(cells.get(gpus, "-") for gpus in content["speeds"][table]["gpus"]),
        )
        for (network, encoding), cells in lines.items()
    ]


def _table_of(rows: Sequence[Comparison]) -> str:
    """Return a figure's table, with what has to be said of it."""
    name = rows[0].published.figure
    if name not in published_tables()["speeds"]:
        return markdown_table(COLUMNS[1:], lines_of(rows), numbers="-nnnn-") + "\n"
    gpus = published_tables()["speeds"][name]["gpus"]
    columns = ("samples/s", *(f"{one} GPU{'s' if one > 1 else ''}" for one in gpus))
    return (
        "Published / ours, with the deviation of predictions in percent; the others are fitted or "
        f"taken as input. `gradlane reproduce {name}` prints the parts of each step, the causes, "
        "and which cells of the paper are hard to read.\n\n"
        + markdown_table(columns, speed_lines(rows), numbers="-" + "n" * len(gpus))
        + "\n"
    )


def _error_cells(text: str, made: Errors) -> tuple[str, ...]:
    within = tuple(str(one) for one in made.within)
    return text, str(made.cells), f"{made.mean:.1f}", f"{made.median:.1f}", *within


_KIND_COLUMNS = (
    *("predictions", "number", "median deviation, %"),
    *(f"within {limit} %" for limit in LIMITS),
)
_ERROR_COLUMNS = (
    *("cells", "number", "mean deviation, %", "median, %"),
    *(f"within {limit} %" for limit in LIMITS),
)


def summary(made: Study) -> str:
    """Return the counts in words."""
    counts = made.counts()
    others = ", ".join(
        f"{counts[text]} {text}" for role, text in ROLES.items() if role and counts[text]
    )
    return f"{counts['published']} published numbers: {counts['predicted']} predicted; {others}."


def print_study(console: Console, made: Study) -> None:
    """Print the table, how good the fitted model is, and the counts."""
    body = ([cell.replace("[", "\\[") for cell in cells_of(row)] for row in made.rows)
    texts = ("figure", "number", "cause")
    console.print(text_table("", COLUMNS, body, texts=texts))
    console.print(text_table("predictions by kind", _KIND_COLUMNS, made.kinds()))
    for primitive in PARTS:
        title = f"low precision, {primitive.upper()}: deviations of the fitted model"
        errors = [_error_cells(text, one) for text, one in fit_quality(primitive)]
        console.print(text_table(title, _ERROR_COLUMNS, errors))
    console.print(f"{summary(made)} {made.cpu_s:.0f} s of one processor.", highlight=False)


_UNITS = {
    "link": ("ns", 1e9, "a byte of a GPU's own copies"),
    "memory": ("ns", 1e9, "a byte of all copies through the host's memory"),
    "messages": ("µs", 1e6, "a message"),
    "scales": ("ns", 1e9, "a bucket or column, each way"),
    "averages": ("ns", 1e9, "a value under 1-bit SGD, each way"),
}


def markdown_of(made: Study, command: str) -> str:
    """Return the page."""
    model: list[str] = []
    for primitive in PARTS:
        each = ", ".join(
            f"{value * _UNITS[name][1]:.3g} {_UNITS[name][0]} {_UNITS[name][2]}"
            for name, value in constants(primitive).items()
        )
        model.append(f"{primitive.upper()}: {each}.\n")
        rows = [_error_cells(text, one) for text, one in fit_quality(primitive)]
        model.append(markdown_table(_ERROR_COLUMNS, rows, numbers="-nnnnnn") + "\n")
    paper, last, parts = "", "", []
    figure_rows: dict[str, list[Comparison]] = {}
    for row in made.rows:
        figure_rows.setdefault(row.published.figure, []).append(row)
    for name, own in figure_rows.items():
        if paper_of(name) != paper:
            paper = paper_of(name)
            parts.append(f"## {paper}\n")
            parts.append(f"Cannot be done here: {_cannot(name)}.\n")
        parts.append(f"### `{name}`: {FIGURES[name].title}\n")
        if name in made.settings:
            setting = made.settings[name]
            parts.append(f"Ours: {SAME if setting == last else setting}.\n")
            last = setting
        parts.append(_table_of(own))
    return filled(
        TEMPLATE,
        command=command,
        summary=summary(made),
        kinds=markdown_table(_KIND_COLUMNS, made.kinds(), numbers="-nnnnn"),
        model="\n".join(model),
        figures="\n".join(parts),
    )


def _cannot(figure: str) -> str:
    """Return what a figure's paper has used and is not here."""
    cannot: str = content_of(MEASURED)["cannot"][figure.partition(":")[0]]
    return cannot


def write_page(made: Study, path: Path) -> None:
    """Write the page with tables that can be sorted.

    Raises:
        OSError: it cannot be written.
    """
    from gradlane.report.page import Paragraph, Section, measured_here, write_report
    from gradlane.report.page import Table as PageTable

    columns = ("figure", "number", "unit", *COLUMNS[2:-1], "role", "kind", "cause")
    fields = (
        *("figure", "what", "unit", "published", "ours", "deviation", "measured"),
        *("role", "kind", "cause"),
    )
    rows = [[content[name] for name in fields] for content in map(row_of, made.rows)]
    sections = [Section("", [Paragraph(summary(made)), PageTable(columns, rows)])]
    for primitive in PARTS:
        errors = [_error_cells(text, one) for text, one in fit_quality(primitive)]
        title = f"Low precision, {primitive.upper()}: deviations of the fitted model"
        sections.append(Section(title, [PageTable(_ERROR_COLUMNS, errors)]))
    sections.insert(1, Section("Predictions by kind", [PageTable(_KIND_COLUMNS, made.kinds())]))
    sections.append(Section("", [measured_here()]))
    write_report(path, "All numbers that the papers publish, and ours", sections)
