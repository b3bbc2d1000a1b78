"""What `gradlane reproduce` runs, prints and writes."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from gradlane.report.console import print_written
from gradlane_papers.reproduction import modern, published
from gradlane_papers.reproduction.figures import FIGURES, chosen, reproduce
from gradlane_papers.reproduction.simulations import Simulations
from gradlane_papers.reproduction.writing import (
    markdown_of,
    print_list,
    print_reproduction,
    write_page,
)

PAGES = ("modern", "published")
"""Names with a page of their own."""


def listed() -> dict[str, Any]:
    """Return all figures as JSON has them."""
    return {
        "figures": [
            {"figure": one.name, "title": one.title, "setting": one.setting}
            for one in FIGURES.values()
        ]
    }


def run_list(console: Console) -> dict[str, Any]:
    """Print what can be reproduced, and return it."""
    print_list(console)
    return listed()


def run_reproduce(
    names: Sequence[str],
    *,
    console: Console,
    profile_dir: Path | None = None,
    markdown: Path | None = None,
    html_path: Path | None = None,
) -> dict[str, Any]:
    """Reproduce figures, print them and write the pages.

    Args:
        names: of figures; of papers, for all of theirs; `all`; or one of `PAGES` alone.
        console: where to print.
        profile_dir: folder with recorded profiles.
        markdown: where the page of text goes.
        html_path: where the page with plots goes.

    Returns:
        What is printed: `figures`, each with its `rows` and `curves`; of `modern` and `published`
        their `rows`.

    Raises:
        ValueError: a name that there is not, or a figure that something is missing for.
    """
    page = names[0] if len(names) == 1 and names[0] in PAGES else ""
    for name in names:
        if name in PAGES and not page:
            raise ValueError(f"`{name}` has a page of its own: ask for it alone")
    figures = [] if page else chosen(names)
    if profile_dir is not None and not profile_dir.is_dir():
        raise ValueError(f"there is no folder {profile_dir}")
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    command = shlex.join(["gradlane", "reproduce", *names])
    if profile_dir is not None:
        command += f" --profiles {profile_dir.name}"
    if markdown is not None:
        command += f" --markdown {markdown}"
    content: dict[str, Any]
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("simulating")
        simulations = Simulations(
            lambda text: progress.update(task, description=f"simulated {text}"), profile_dir
        )
        if page == "modern":
            study = modern.study(simulations)
            modern.print_study(console, study)
            text = modern.markdown_of(study, command)
            content = {"rows": [row.to_json() for row in study]}
            if html_path is not None:
                modern.write_page(study, html_path)
        elif page == "published":
            table = published.study(simulations)
            published.print_study(console, table)
            text = published.markdown_of(table, command)
            content = table.to_json()
            if html_path is not None:
                published.write_page(table, html_path)
        else:
            made = reproduce(
                figures, simulations, lambda one: print_reproduction(progress.console, one)
            )
            text = markdown_of(made, command)
            content = {"figures": [one.to_json() for one in made]}
            if html_path is not None:
                write_page(made, html_path)
    if markdown is not None:
        markdown.write_text(text, encoding="utf-8")
    print_written(console, markdown, html_path)
    return content
