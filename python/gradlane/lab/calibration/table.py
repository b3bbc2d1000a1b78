"""What `gradlane lab calibrate` found, as a table on a terminal."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from gradlane.lab.runs.rows import NO_EVIDENCE, measures_machine


def print_constants(console: Console, content: dict[str, Any]) -> None:
    """Print what `run_calibration` found, and whether the machine was too busy for it."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("constant", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("spread", justify="right", no_wrap=True)
    table.add_column("how")
    for name, entry in content["constants"].items():
        spread = entry.get("spread")
        table.add_row(
            name,
            _with_unit(name, entry["value"]),
            "-" if spread is None else f"{spread:.2f}",
            entry["how"],
        )
    for codec, cost in content["codecs"].items():
        for name, value in cost.items():
            table.add_row(
                f"{codec.partition(',')[0]} {name}", _with_unit(name, value), "-", "4 MiB of values"
            )
    console.print(table)
    measured = content["measured"]
    if measures_machine(measured["cpu_share"], measured["stolen_share"]):
        console.print(f"{NO_EVIDENCE}: measure again when it is idle", style="bold")


def _with_unit(name: str, value: float) -> str:
    if name.endswith("byte_s"):
        return f"{value * 1e9:.3f} ns"
    if name.endswith("_s"):
        return f"{value * 1e6:.1f} us"
    return f"{value:,.0f}" if name.endswith("_bytes") else f"{value:.4f}"
