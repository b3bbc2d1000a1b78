"""The command `gradlane probe`: one process a rank, as for a training; rank 0 prints."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

import gradlane
from gradlane.cli.options import write_json
from gradlane.formats.link_report import LinkReport
from gradlane.formats.rates import format_rate
from gradlane.report.console import print_written


def run_probe(
    *,
    network: gradlane.Network,
    window_s: float,
    console: Console,
    json_path: Path | None = None,
) -> None:
    """Measure the links between all ranks; rank 0 writes the file and prints a table.

    Args:
        network: as a session would be given it.
        window_s: seconds that each stream is measured for.
        console: where rank 0 prints.
        json_path: where rank 0 writes the report, or None.

    Raises:
        ValueError: there is only one rank, or an option makes no sense.
        RendezvousError: two ranks cannot reach each other.
    """
    with gradlane.init(network=network) as session:
        if session.world_size == 1:
            raise ValueError(
                "one rank has no links: start one process on each node, for example "
                "`torchrun --nnodes 4 --nproc-per-node 1 --rdzv-backend c10d "
                "--rdzv-endpoint HOST:29500 -m gradlane probe`"
            )

        def tell(text: str) -> None:
            if session.rank == 0:
                console.print(f"measuring {text}", style="dim", highlight=False)

        report = session.planning.probe(window_s=window_s, on_phase=tell)
    if session.rank != 0:
        return
    write_json(json_path, report.to_json())
    print_links(console, report)
    print_written(console, json_path)


def print_links(console: Console, report: LinkReport) -> None:
    """Print what was measured."""
    table = Table()
    for name in ("rank", "send", "receive", "both: send", "both: receive", "round trips"):
        table.add_column(name, justify="right")
    for port in report.ports:
        trips = [
            f"{pair.peer}: {pair.round_trip_s * 1e3:.3g} ms"
            for pair in report.round_trips
            if pair.rank == port.rank
        ]
        rates = (port.send_bps, port.receive_bps, port.both_send_bps, port.both_receive_bps)
        cells = ["" if rate is None else format_rate(rate) for rate in rates]
        table.add_row(str(port.rank), *cells, ", ".join(trips))
    console.print(table)
    console.print(
        f"ranks: {report.workers}; slowest port, both directions at once, headers included: "
        f"{format_rate(report.rate_bps)}; one way {report.latency_s * 1e3:.3g} ms. For a plan: "
        f"gradlane plan PROFILE --workers {report.workers} --rate {report.rate_bps / 1e6:.0f}mbit "
        f"--latency-s {report.latency_s:.2g}",
        highlight=False,
        soft_wrap=True,
    )
