"""The commands of the presets: the papers' experiments, each with its folder of results."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from gradlane.lab.presets.preset import Preset

Output = Annotated[Path, typer.Option(help="Folder for results.json, results.csv, report.html.")]
Workload = Annotated[
    str, typer.Option(help="Only these networks, comma-separated; the preset's if absent.")
]
Rate = Annotated[
    str, typer.Option(help="Nominal rates of every port, comma-separated; the preset's if absent.")
]
StrategyNames = Annotated[
    str, typer.Option(help="Only these strategies, comma-separated; the preset's if absent.")
]
Dilation = Annotated[
    float | None, typer.Option(help="Run this many times slower than nominal, at all rates.")
]
Workers = Annotated[int, typer.Option(help="Ranks, each on a node of its own.")]
Steps = Annotated[int, typer.Option(help="Measured steps of a run.")]


def lab_bandwidth(
    output: Output = Path("bandwidth"),
    quick: Annotated[
        bool, typer.Option("--quick", help="Two networks, three rates, three strategies.")
    ] = False,
    workload: Workload = "",
    rate: Rate = "",
    strategy: StrategyNames = "",
    workers: Workers = 4,
    dilation: Dilation = None,
    steps: Steps = 2,
) -> None:
    """Measure and simulate throughput against bandwidth, for every strategy, DDP and the bound.

    The full preset takes up to two hours, --quick a quarter of one. What was interrupted goes on
    where it stopped when the same command is given again.
    """
    from gradlane.lab.presets.bandwidth import bandwidth
    from gradlane.lab.presets.tables import print_bandwidth

    preset = bandwidth(
        quick=quick,
        workloads=_parts(workload),
        rates_bps=_rates(rate),
        strategies=_parts(strategy),
        workers=workers,
        dilation=dilation,
        steps=steps,
    )
    _run(preset, output, print_bandwidth)


def _run(preset: Preset, output: Path, show: Callable[[Console, Sequence[Any]], None]) -> None:
    from gradlane.lab.display import wide_console
    from gradlane.lab.presets.folder import PresetFolder
    from gradlane.lab.presets.preset import run_preset
    from gradlane.lab.privilege import ensure_namespaces

    folder = PresetFolder(output)
    folder.prepare()
    ensure_namespaces(sys.argv[1:])
    console = wide_console()
    show(console, run_preset(preset, folder, console))


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _rates(text: str) -> list[int]:
    from gradlane.lab.rates import parse_rate

    return [parse_rate(part) for part in _parts(text)]


def add_presets(lab: typer.Typer) -> None:
    """Add the presets to the commands of the lab."""
    lab.command("bandwidth")(lab_bandwidth)
