"""The command `gradlane reproduce`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gradlane.cli.options import HtmlPath, JsonPath, require_writable, write_json


def reproduce(
    figures: Annotated[
        list[str] | None,
        typer.Argument(help="Such as p3:fig7; p3 for all of a paper's; all; modern; or published."),
    ] = None,
    list_them: Annotated[
        bool, typer.Option("--list", help="Show all figures, and what those not there yet need.")
    ] = False,
    profiles: Annotated[
        Path | None,
        typer.Option(help="Folder with recorded profiles for the what-if paper's figures."),
    ] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the page of text.")] = None,
    json_path: JsonPath = None,
    html_path: HtmlPath = None,
) -> None:
    """Put figures of the papers beside what is simulated here, and say why they differ."""
    from gradlane.report.console import wide_console
    from gradlane_papers.reproduction import run as command

    require_writable(json_path, markdown, page=html_path)
    if list_them:
        content = command.run_list(wide_console())
    elif not figures:
        raise ValueError(
            "name a figure, a paper, all, modern or published; --list shows what there is"
        )
    else:
        content = command.run_reproduce(
            figures,
            console=wide_console(),
            profile_dir=profiles,
            markdown=markdown,
            html_path=html_path,
        )
    if json_path is not None:
        write_json(json_path, content)
        typer.echo(f"wrote {json_path}")
