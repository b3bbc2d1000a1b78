"""Text on a terminal: its width, durations, tables, and the files that were written."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from rich import box
from rich.console import Console, JustifyMethod
from rich.table import Table

from gradlane.report.page import Cell, cell_text


def wide_console() -> Console:
    """Return a console on standard output, 110 columns wide where it is no terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=110)


def print_written(console: Console, *paths: Path | None) -> None:
    """Print the path of each file that was written; None stands for a file not asked for."""
    for path in paths:
        if path is not None:
            console.print(f"wrote {path}", highlight=False, soft_wrap=True)


def format_time(seconds: float) -> str:
    """Return a duration in seconds or, below one, in milliseconds."""
    return f"{seconds:.3f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"


def text_table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[Cell]],
    *,
    caption: str = "",
    highlight: Collection[int] = (),
    texts: Collection[str] = (),
    wraps: bool = False,
) -> Table:
    """Return a table for a terminal, whose first column is aligned to the left.

    Args:
        title: stands above it.
        columns: headings.
        rows: cells as on a page; each row has one for each column.
        caption: stands below it.
        highlight: numbers of rows to set off.
        texts: headings of columns that are aligned to the left, and may take several lines.
        wraps: whether a cell may take several lines where the terminal is narrow.
    """
    table = Table(
        title=title or None,
        caption=caption or None,
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        title_justify="left",
        caption_justify="left",
    )
    for number, heading in enumerate(columns):
        justify: JustifyMethod = "left" if not number or heading in texts else "right"
        table.add_column(heading, justify=justify, no_wrap=not wraps and heading not in texts)
    for number, row in enumerate(rows):
        table.add_row(*map(cell_text, row), style="bold" if number in highlight else "")
    return table
