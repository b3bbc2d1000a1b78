"""The commands `gradlane secret ...`: files that hold the secret of a job."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gradlane.cli.options import JsonPath, require_writable, write_json

secret = typer.Typer(help="The secret that keeps strangers out of a job.", no_args_is_help=True)


@secret.callback()
def _group() -> None:
    # A group of one command would be that command.
    pass


@secret.command()
def new(
    path: Annotated[Path, typer.Argument(help="The file to write; it must not exist.")] = Path(
        "gradlane.secret"
    ),
    json_path: JsonPath = None,
) -> None:
    """Write a new secret of 256 bits into a file that its owner alone can read.

    The secret itself is not printed.
    """
    from gradlane.training.options.secret import DRAWN_BITS, draw_secret, write_secret_file

    require_writable(path, json_path)
    write_secret_file(path, draw_secret())
    whole = path.absolute()
    typer.echo(f"wrote {path}: {DRAWN_BITS} bits, mode 600")
    typer.echo(f"1. copy it to every machine of the job: scp -p {path} HOST:{whole}")
    typer.echo(f"2. set it for every rank: export GRADLANE_SECRET_FILE={whole}")
    typer.echo("Where a job script must hold it, GRADLANE_SECRET takes the file's text itself.")
    if json_path is not None:
        variable = {"GRADLANE_SECRET_FILE": str(whole)}
        write_json(json_path, {"path": str(whole), "bits": DRAWN_BITS, "environment": variable})
        typer.echo(f"wrote {json_path}")
