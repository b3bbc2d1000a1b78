"""The command `gradlane serve`: a rank that only serves, where there is no training script."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from gradlane.cli.options import JsonPath, require_writable, write_json
from gradlane.cli.typed_options import Taken, typed
from gradlane.training.options.option_groups import Network, Rendezvous

if TYPE_CHECKING:
    from gradlane.training.rendezvous.serving import ServedStats


@typed
def serve(
    rendezvous: Annotated[Rendezvous, Taken("rank", "world_size", "job")],
    network: Annotated[
        Network,
        Taken("interface", "advertise", "ports", "work_threads", "lanes", "connect_timeout_s"),
    ],
    json_path: JsonPath = None,
) -> None:
    """Own slices and add gradients up for ranks that train; needs neither model nor script.

    Rank and world size come from the launcher's variables (RANK, WORLD_SIZE, MASTER_ADDR and
    MASTER_PORT, as torchrun sets them), or from the options. The training script calls
    `gradlane.init(workers=...)`; whatever must be the same everywhere comes from there. Ends when
    the ranks that train have closed their sessions.
    """
    from rich.console import Console

    from gradlane.training.session.init import init_serving

    require_writable(json_path)
    session = init_serving(rendezvous=rendezvous, network=network)
    console = Console(stderr=True)
    start_s = time.monotonic()
    text = f"rank {session.rank} waits for the ranks that train"
    with session, console.status(text) if console.is_terminal else nullcontext() as status:

        def show(served: list[ServedStats]) -> None:
            if status is not None and served:
                status.update(f"rank {session.rank} serves: {progress_text(served)}")

        served = session.serve(show)
    duration_s = time.monotonic() - start_s
    if json_path is not None:
        channels = [asdict(one) for one in served]
        write_json(
            json_path, {"rank": session.rank, "duration_s": duration_s, "channels": channels}
        )
    typer.echo(f"served {progress_text(served)} in {duration_s:.1f} s")
    if json_path is not None:
        typer.echo(f"wrote {json_path}")


def progress_text(served: list[ServedStats]) -> str:
    """Say what was served so far."""
    return (
        f"{sum(one.owned_bytes for one in served) / 1e6:.1f} of "
        f"{sum(one.total_bytes for one in served) / 1e6:.1f} MB of parameters, "
        f"{sum(one.steps for one in served)} steps, "
        f"{sum(one.rx_bytes for one in served) / 1e6:.1f} MB in, "
        f"{sum(one.tx_bytes for one in served) / 1e6:.1f} MB out"
    )
