"""The command `gradlane serve`: a rank that only serves, where there is no training script."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from gradlane.cli.options import JsonPath, require_writable, write_json

if TYPE_CHECKING:
    from gradlane.training.rendezvous.serving import ServedStats


def serve(
    rank: Annotated[
        int | None, typer.Option(help="This rank, after all that train; else the launcher's.")
    ] = None,
    world_size: Annotated[
        int | None,
        typer.Option(help="Ranks that train and ranks that serve; else the launcher's."),
    ] = None,
    job: Annotated[str | None, typer.Option(help="Name of the job; else the launcher's.")] = None,
    interface: Annotated[
        str | None,
        typer.Option(help="Network interface; else the one that leads to the store."),
    ] = None,
    advertise: Annotated[
        str | None, typer.Option(help="Address that other ranks reach this one at.")
    ] = None,
    ports: Annotated[
        str | None, typer.Option(help="Lowest and highest port to listen on, such as 4000-4010.")
    ] = None,
    work_threads: Annotated[int, typer.Option(help="Threads that add gradients up.")] = 1,
    io_threads: Annotated[
        int, typer.Option(help="Threads that drive the sockets, each those of some ranks.")
    ] = 1,
    connect_timeout_s: Annotated[
        float, typer.Option(help="Seconds to wait for the ranks that train to begin.")
    ] = 300.0,
    json_path: JsonPath = None,
) -> None:
    """Own slices and add gradients up for ranks that train; needs neither model nor script.

    Rank and world size come from the launcher's variables (RANK, WORLD_SIZE, MASTER_ADDR and
    MASTER_PORT, as torchrun sets them), or from the options. The training script calls
    `gradlane.init(workers=...)`; whatever must be the same everywhere comes from there. Ends when
    the ranks that train have closed their sessions.
    """
    from rich.console import Console

    from gradlane.training.session.start import init_serving

    require_writable(json_path)
    session = init_serving(
        rank=rank,
        world_size=world_size,
        job=job,
        interface=interface,
        advertise=advertise,
        ports=None if ports is None else parse_ports(ports),
        work_threads=work_threads,
        io_threads=io_threads,
        connect_timeout_s=connect_timeout_s,
    )
    console = Console(stderr=True)
    start_s = time.monotonic()
    text = f"rank {session.rank} waits for the ranks that train"
    with session, console.status(text) if console.is_terminal else nullcontext() as status:

        def show(served: list[ServedStats]) -> None:
            if status is not None and served:
                status.update(f"rank {session.rank} serves: {progress_text(served)}")

        served = session.serve(show)
    duration_s = time.monotonic() - start_s
    typer.echo(f"served {progress_text(served)} in {duration_s:.1f} s")
    if json_path is not None:
        channels = [asdict(one) for one in served]
        write_json(
            json_path, {"rank": session.rank, "duration_s": duration_s, "channels": channels}
        )
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


def parse_ports(text: str) -> tuple[int, int]:
    """Read a range of ports.

    Raises:
        ValueError: it is none.
    """
    low, _, high = text.partition("-")
    if not (low.isdecimal() and (high or low).isdecimal()):
        raise ValueError(f"ports is {text!r}; use one, or the lowest and the highest: 4000-4010")
    return int(low), int(high or low)
