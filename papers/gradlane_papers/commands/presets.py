"""The commands of the presets: the papers' experiments, each with its folder of results."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from gradlane_papers.experiments.preset import Preset

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

    The full preset takes up to two hours, --quick a quarter of one. The same command given
    again continues an interrupted run.
    """
    from gradlane_papers.experiments.bandwidth import BANDWIDTH, QUICK

    preset = QUICK if quick else BANDWIDTH
    _run(_chosen(preset, workload, rate, strategy, [workers], dilation, steps), output)


def lab_utilization(
    output: Output = Path("utilization"),
    workload: Workload = "",
    rate: Rate = "",
    strategy: StrategyNames = "",
    workers: Workers = 4,
    dilation: Dilation = None,
    steps: Steps = 3,
) -> None:
    """Measure bytes in and out of every port, and every rank's processor time, every 10 ms.

    Tells how idle the busiest port is where communication is the limit, and how evenly nodes are
    loaded.
    """
    from gradlane_papers.experiments.utilization import UTILIZATION

    _run(_chosen(UTILIZATION, workload, rate, strategy, [workers], dilation, steps), output)


def lab_scaling(
    output: Output = Path("scaling"),
    workload: Workload = "",
    rate: Annotated[str, typer.Option(help="Nominal rate of every port.")] = "10gbit",
    strategy: StrategyNames = "",
    workers: Annotated[str, typer.Option(help="Ranks to measure, such as 2,4,8.")] = "2,4,8",
    dilation: Dilation = None,
    steps: Steps = 2,
) -> None:
    """Measure 2, 4 and 8 workers, and simulate up to 1,024, as a share of linear scaling."""
    from gradlane.formats.rates import parse_rate
    from gradlane.lab.cluster.machine import available_bytes
    from gradlane.planning.simulation.lists import parse_workers
    from gradlane_papers.experiments.scaling import SCALING, without_large_cells

    parse_rate(rate)
    counts = parse_workers(workers)
    preset, left_out = without_large_cells(
        _chosen(SCALING, workload, rate, strategy, counts, dilation, steps), available_bytes()
    )
    for sentence in left_out:
        typer.echo(sentence)
    _run(preset, output)


def lab_slices(
    output: Output = Path("slices"),
    workload: Workload = "",
    rate: Rate = "",
    slice_elems: Annotated[
        str,
        typer.Option(help="Elements of a slice at most, comma-separated; or the preset's."),
    ] = "",
    workers: Workers = 4,
    dilation: Dilation = None,
    steps: Steps = 2,
) -> None:
    """Measure and simulate slices of 1,000 to 10^6 elements, beside the planner's choice."""
    from gradlane_papers.experiments.slices import SWEEP

    sizes = _sizes(slice_elems)
    _run(_chosen(SWEEP, workload, rate, "", [workers], dilation, steps, sizes), output)


def _chosen(
    preset: Preset,
    workload: str,
    rate: str,
    strategy: str,
    workers: Sequence[int],
    dilation: float | None,
    steps: int,
    sizes: Sequence[int] = (),
) -> Preset:
    return preset.choose(
        workloads=_parts(workload),
        rates_bps=_rates(rate),
        strategies=_parts(strategy),
        workers=workers,
        sizes=sizes,
        dilation=dilation,
        steps=steps,
    )


def _run(preset: Preset, output: Path) -> None:
    from gradlane.lab.cluster.errors import LabError
    from gradlane.lab.cluster.privilege import ensure_namespaces
    from gradlane.lab.runs.cells import still_missing
    from gradlane.lab.runs.folder import PresetFolder
    from gradlane.report.console import wide_console
    from gradlane_papers.experiments.findings import Findings
    from gradlane_papers.experiments.preset import run_preset

    folder = PresetFolder(output)
    folder.prepare()
    ensure_namespaces(sys.argv[1:])
    console = wide_console()
    rows = run_preset(preset, folder, console)
    found = Findings(rows)
    for table in preset.tables(found):
        console.print(table)
    if found.note:
        console.print(found.note, highlight=False)
    if missing := still_missing(preset.cells, rows):
        raise LabError(f"{missing} runs are no evidence yet: give the same command again")


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _rates(text: str) -> list[int]:
    from gradlane.planning.simulation.lists import parse_rates

    return parse_rates(text) if text else []


def _sizes(text: str) -> list[int]:
    sizes = []
    for part in _parts(text):
        if not part.isdecimal() or int(part) < 1:
            raise ValueError(f"{part!r} is no number of elements: write for example 1000,50000")
        sizes.append(int(part))
    return sizes
