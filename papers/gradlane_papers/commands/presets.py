"""The commands of the presets: the papers' experiments, each with its folder of results."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradlane.cli.typed_options import Taken, typed
from gradlane.planning.simulation.lists import parse_rates, parse_workers
from gradlane.training.options.option_fields import option, read_float

if TYPE_CHECKING:
    from gradlane_papers.experiments.preset import Preset

Output = Annotated[Path, typer.Option(help="Folder for results.json, results.csv, report.html.")]


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _sizes(text: str) -> list[int]:
    sizes = []
    for part in _parts(text):
        if not part.isdecimal() or int(part) < 1:
            raise ValueError(f"{part!r} is no number of elements: write for example 1000,50000")
        sizes.append(int(part))
    return sizes


@dataclass(frozen=True, kw_only=True)
class PresetChoice:
    """What is measured of a preset; empty: all of it."""

    workloads: Sequence[str] = option(
        (),
        "Only these networks, comma-separated; the preset's if absent.",
        name="workload",
        read=_parts,
    )
    rates_bps: Sequence[int] = option(
        (),
        "Nominal rates of every port, comma-separated; the preset's if absent.",
        name="rate",
        read=parse_rates,
    )
    strategies: Sequence[str] = option(
        (),
        "Only these strategies, comma-separated; the preset's if absent.",
        name="strategy",
        read=_parts,
    )
    sizes: Sequence[int] = option(
        (),
        "Elements of a slice at most, comma-separated; or the preset's.",
        name="slice_elems",
        read=_sizes,
    )
    workers: int = option(4, "Ranks, each on a node of its own.")
    dilation: float | None = option(
        None, "Run this many times slower than nominal, at all rates.", read=read_float
    )
    steps: int = option(2, "Measured steps of a run.")

    def of(self, preset: Preset, workers: Sequence[int] = ()) -> Preset:
        """Return what is left of a preset; `workers`: several numbers of ranks."""
        return preset.choose(**{**vars(self), "workers": workers or [self.workers]})


_ALL_SIZES = Taken(without=("sizes",))


@typed
def lab_bandwidth(
    choice: Annotated[PresetChoice, _ALL_SIZES],
    output: Output = Path("bandwidth"),
    quick: Annotated[
        bool, typer.Option("--quick", help="Two networks, three rates, three strategies.")
    ] = False,
) -> None:
    """Measure and simulate throughput against bandwidth, for every strategy, DDP and the bound.

    The full preset takes up to two hours, --quick a quarter of one. The same command given
    again continues an interrupted run.
    """
    from gradlane_papers.experiments.bandwidth import BANDWIDTH, QUICK

    _run(choice.of(QUICK if quick else BANDWIDTH), output)


@typed
def lab_utilization(
    choice: Annotated[PresetChoice, Taken(without=("sizes",), steps=3)],
    output: Output = Path("utilization"),
) -> None:
    """Measure bytes in and out of every port, and every rank's processor time, every 10 ms.

    Tells how idle the busiest port is where communication is the limit, and how evenly nodes are
    loaded.
    """
    from gradlane_papers.experiments.utilization import UTILIZATION

    _run(choice.of(UTILIZATION), output)


@typed
def lab_scaling(
    choice: Annotated[PresetChoice, Taken(without=("sizes", "rates_bps", "workers"))],
    output: Output = Path("scaling"),
    rate: Annotated[str, typer.Option(help="Nominal rate of every port.")] = "10gbit",
    workers: Annotated[str, typer.Option(help="Ranks to measure, such as 2,4,8.")] = "2,4,8",
) -> None:
    """Measure 2, 4 and 8 workers, and simulate up to 1,024, as a share of linear scaling."""
    from gradlane.formats.rates import parse_rate
    from gradlane.lab.cluster.machine import available_bytes
    from gradlane_papers.experiments.scaling import SCALING, without_large_cells

    chosen = replace(choice, rates_bps=[parse_rate(rate)]).of(SCALING, parse_workers(workers))
    preset, left_out = without_large_cells(chosen, available_bytes())
    for sentence in left_out:
        typer.echo(sentence)
    _run(preset, output)


@typed
def lab_slices(
    choice: Annotated[PresetChoice, Taken(without=("strategies",))],
    output: Output = Path("slices"),
) -> None:
    """Measure and simulate slices of 1,000 to 10^6 elements, beside the planner's choice."""
    from gradlane_papers.experiments.slices import SWEEP

    _run(choice.of(SWEEP), output)


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
