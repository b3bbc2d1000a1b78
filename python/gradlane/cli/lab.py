"""The commands `gradlane lab ...`: what the emulated cluster of this machine runs and measures.

Arguments are checked before anything is started; heavy imports happen inside the commands.
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradlane.cli.options import (
    FROM_PROFILE,
    CostsPath,
    HtmlPath,
    JsonPath,
    RunsBudgetS,
    costs_of,
    read_rows,
    remedied,
    require_writable,
    write_json,
)
from gradlane.cli.typed_options import Taken, typed
from gradlane.formats.signals import unwind_on_sigterm
from gradlane.lab.calibration.options import CalibrationOptions
from gradlane.lab.runs.options import LabOptions
from gradlane.lab.runs.strategy import with_rules, with_updates
from gradlane.lab.transport.options import TransportOptions
from gradlane.training.options.option_groups import Network
from gradlane.training.options.stragglers import WAIT

if TYPE_CHECKING:
    from gradlane.lab.runs.rows import Row

lab = typer.Typer(help="An emulated cluster on this machine.", no_args_is_help=True)


@lab.callback()
def _lab(context: typer.Context) -> None:
    unwind_on_sigterm(context)


@lab.command("run")
@typed
def lab_run(
    options: LabOptions,
    stragglers: Annotated[
        str,
        typer.Option(
            help="Comma-separated: wait, drop, drop=FACTOR, backup=RANKS, each with :carry to "
            "keep late gradients; gradlane's strategies are run with each."
        ),
    ] = WAIT,
    update: Annotated[
        list[str] | None,
        typer.Option(
            help="Local updates of gradlane's strategies beside exact ones, such as "
            "local:steps=8,fragments=4,overlap_steps=2; several, each after --update. --steps are "
            "whole rounds."
        ),
    ] = None,
    json_path: JsonPath = None,
    html_path: HtmlPath = None,
) -> None:
    """Run a workload under several strategies on the emulated cluster.

    Rates and times are nominal: with a dilation of 10, the cluster runs at a tenth of the rate
    and computes ten times slower, and the results are converted back.
    """
    if options.profile_path is not None:
        from gradlane.planning.models.schedule import layers_from_profile

        with remedied(FROM_PROFILE):
            layers_from_profile(options.profile_path)
    strategies = with_rules([*options.strategies], stragglers)
    updates = list(dict.fromkeys(update or ()))
    options = replace(options, strategies=with_updates(strategies, updates))
    require_writable(json_path, options.trace_path, page=html_path)
    _run_and_show(options, json_path, html_path)


def _run_and_show(options: LabOptions, json_path: Path | None, html_path: Path | None) -> None:
    """Run on the emulated cluster with a progress bar, print the tables and write the files."""
    from gradlane.lab.cluster.privilege import ensure_namespaces
    from gradlane.lab.runs.display import bar_progress, print_tables
    from gradlane.lab.runs.rows import save_rows
    from gradlane.lab.runs.run import run_lab
    from gradlane.report.console import print_written, wide_console

    ensure_namespaces(sys.argv[1:])

    def keep(rows: list[Row]) -> None:
        if json_path is not None:
            save_rows(rows, json_path)

    console = wide_console()
    with bar_progress(console, options.steps_in_total) as progress:
        rows = run_lab(options, progress=progress, on_rows=keep)
    if html_path is not None:
        from gradlane.lab.runs.page import report_from_results

        report_from_results(rows, html_path)
    print_tables(console, rows)
    print_written(console, html_path, json_path)


@lab.command("transport")
@typed
def lab_transport(
    options: TransportOptions,
    network: Annotated[Network, Taken("lanes")],
    json_path: JsonPath = None,
) -> None:
    """Measure goodput, processor time and urgency of exchanges without any compute."""
    from gradlane.lab.cluster.privilege import ensure_namespaces
    from gradlane.lab.transport.measurement import run_transport
    from gradlane.lab.transport.tables import print_transport
    from gradlane.report.console import print_written, wide_console

    options = replace(options, settings={"lanes": network.lanes})
    require_writable(json_path)
    ensure_namespaces(sys.argv[1:])
    console = wide_console()
    rows = run_transport(options, lambda text: console.print(text, style="dim", highlight=False))
    write_json(json_path, [row.to_json() for row in rows])
    print_transport(console, rows)
    print_written(console, json_path)


@lab.command("predict")
def lab_predict(
    results: Annotated[list[Path], typer.Argument(help="Files that `lab run --json` wrote.")],
    costs: CostsPath = None,
    json_path: JsonPath = None,
) -> None:
    """Compare the simulator's predictions with what the lab has measured."""
    from gradlane.lab.calibration.prediction import (
        LeftOut,
        can_predict,
        markdown_of,
        predict,
        summary_of,
    )
    from gradlane.lab.runs.rows import rows_of

    require_writable(json_path)
    rows = [row for path in results for row in rows_of(read_rows(path))]
    machine = costs_of(costs)
    left_out = LeftOut.of(rows)
    predictions = [predict(row, machine) for row in rows if can_predict(row)]
    summary = summary_of(predictions, left_out)
    content = {"rows": [it.to_json() for it in predictions], **summary}
    write_json(json_path, {**content, "left_out": left_out.to_json()})
    if left_out.text:
        typer.echo(left_out.text)
    typer.echo(markdown_of(predictions))
    typer.echo(
        f"median error {summary['median_error'] * 100:.1f} %, "
        f"worst {summary['worst_error'] * 100:.1f} %"
    )


@lab.command("calibrate")
@typed
def lab_calibrate(
    options: CalibrationOptions,
    json_path: JsonPath = None,
) -> None:
    """Measure the simulator's constants on this machine, for `--costs` of other commands."""
    from gradlane.lab.calibration.calibrate import print_constants, run_calibration
    from gradlane.lab.cluster.privilege import ensure_namespaces
    from gradlane.report.console import print_written, wide_console

    require_writable(json_path)
    ensure_namespaces(sys.argv[1:])
    console = wide_console()
    content = run_calibration(
        options, lambda text: console.print(text, style="dim", highlight=False)
    )
    write_json(json_path, content)
    print_constants(console, content)
    print_written(console, json_path)


@lab.command("grid")
def lab_grid(
    results: Annotated[
        Path, typer.Argument(help="File of measured runs; runs are added to it.")
    ] = Path("grid.json"),
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure what is missing, about an hour in all.")
    ] = False,
    budget_s: RunsBudgetS = math.inf,
    workload: Annotated[
        str, typer.Option(help="Only these, comma-separated; all by default.")
    ] = "",
    strategy: Annotated[
        str,
        typer.Option(
            help="Measure these, comma-separated, such as p3,auto,auto:any-rounding; each cell's "
            "own by default."
        ),
    ] = "",
    costs: CostsPath = None,
    fit: Annotated[
        bool, typer.Option("--fit", help="Fit the one fitted constant to the ResNet-50 rows.")
    ] = False,
    markdown: Annotated[
        Path | None, typer.Option(help="Write the table as a page, such as docs/predictions.md.")
    ] = None,
    json_path: JsonPath = None,
) -> None:
    """Test the simulator: four models, four strategies and five rates, measured and predicted."""
    from gradlane.lab.calibration.prediction_grid import predict_grid
    from gradlane.report.console import wide_console

    require_writable(results, markdown, json_path)
    costs_of(costs)  # A wrong file is refused before hours of measuring.
    console = wide_console()
    workloads = [name.strip() for name in workload.split(",") if name.strip()]
    if measure:
        from gradlane.lab.calibration.grid import cells_of
        from gradlane.lab.cluster.privilege import ensure_namespaces
        from gradlane.lab.runs.cells import measure_missing
        from gradlane.lab.runs.display import runs_progress

        ensure_namespaces(sys.argv[1:])
        cells = cells_of(workloads, [name for name in strategy.split(",") if name.strip()])
        with runs_progress(console) as progress:
            missing = measure_missing(cells, results, budget_s=budget_s, progress=progress)
        if missing:
            typer.echo(f"{missing} runs are missing: give the same command again for more")
    predict_grid(
        results,
        workloads=workloads,
        costs_path=costs,
        fit=fit,
        markdown=markdown,
        console=console,
        keep=lambda content: write_json(json_path, content),
    )
