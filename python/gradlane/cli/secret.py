"""The commands `gradlane secret ...`: files that hold the secret of a job, and signatures."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Annotated

import typer

from gradlane.cli.options import JsonPath, require_writable, write_json

secret = typer.Typer(help="The secret that keeps strangers out of a job.", no_args_is_help=True)


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
    found = str(path.absolute())
    if json_path is not None:
        variable = {"GRADLANE_SECRET_FILE": found}
        write_json(json_path, {"path": found, "bits": DRAWN_BITS, "environment": variable})
    whole = shlex.quote(found)
    typer.echo(f"wrote {path}: {DRAWN_BITS} bits, mode 600")
    typer.echo(f"1. copy it to every machine of the job: scp -p {whole} HOST:{whole}")
    typer.echo(f"2. set it for every rank: export GRADLANE_SECRET_FILE={whole}")
    typer.echo("Where a job script must hold it, GRADLANE_SECRET takes the file's text itself.")
    if json_path is not None:
        typer.echo(f"wrote {json_path}")


@secret.command()
def sign(
    folder: Annotated[Path, typer.Argument(help="The folder of checkpoints.")],
    earlier: Annotated[
        Path | None,
        typer.Option(help="File of the secret that signed them; none did if absent."),
    ] = None,
    json_path: JsonPath = None,
) -> None:
    """Sign checkpoints that you know to be yours with the secret of GRADLANE_SECRET_FILE.

    After a job was given a secret, or another one; no training may write into the folder meanwhile.
    """
    from gradlane.training.checkpoints.signing import sign_checkpoints
    from gradlane.training.options.option_fields import with_environment
    from gradlane.training.options.option_groups import Network
    from gradlane.training.options.secret import read_secret_file

    require_writable(json_path)
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder")
    own = with_environment(Network(), os.environ).read_secret()
    if own is None:
        raise ValueError("there is no secret to sign with: set GRADLANE_SECRET_FILE")
    old = None if earlier is None else read_secret_file(earlier, "--earlier")
    signed = []
    for path in sign_checkpoints(folder, own, old):
        signed.append(str(path))
        typer.echo(f"signed {path}")
    if not signed:
        typer.echo(f"nothing to sign: {folder} has no complete checkpoint without this signature")
    if json_path is not None:
        write_json(json_path, {"signed": signed})
        typer.echo(f"wrote {json_path}")
