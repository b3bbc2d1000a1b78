"""Pages of text: templates and tables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path


def markdown_table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], *, numbers: str = ""
) -> str:
    """Return a table in Markdown; None shows as a dash.

    Args:
        columns: headings.
        rows: cells; each row has one for each column.
        numbers: the letter `n` for each column that is aligned to the right, in order; anything
            else, or nothing, for the others.
    """
    rules = ["---:" if numbers[at : at + 1] == "n" else "---" for at in range(len(columns))]
    body = (["-" if cell is None else str(cell) for cell in row] for row in rows)
    return "\n".join(f"| {' | '.join(line)} |" for line in (columns, rules, *body))


def filled(template: Path, **places: object) -> str:
    """Return a page: a template with its places filled; what is left empty leaves no gap.

    Raises:
        KeyError: a place of the template is not given.
    """
    text = template.read_text(encoding="utf-8").format(**places)
    return re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n"
