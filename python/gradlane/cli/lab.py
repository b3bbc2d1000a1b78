"""The commands `gradlane lab ...`: what the emulated cluster of this machine runs and measures.

Arguments are checked before anything is started; heavy imports happen inside the commands.
"""

from __future__ import annotations

import math
import sys
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
    session_option,
    write_json,
)
from gradlane.formats.signals import unwind_on_sigterm
from gradlane.training.options.option_groups import Network
from gradlane.training.options.server_places import SERVERS_HELP, parse_servers
from gradlane.training.options.strategy import Strategy

if TYPE_CHECKING:
    from gradlane.lab.runs.options import LabOptions
    from gradlane.lab.runs.rows import Row

lab = typer.Typer(help="An emulated cluster on this machine.", no_args_is_help=True)


@lab.callback()
def _lab(context: typer.Context) -> None:
    unwind_on_sigterm(context)


@lab.command("run")
def lab_run(
    workload: Annotated[
        str,
        typer.Option(help="resnet50, vgg19, gpt2_small, digits-cnn, ...; a wrong name lists all."),
    ],
    strategy: Annotated[
        str,
        typer.Option(
            help="Comma-separated: none, ddp-gloo[:BUCKET_MB], ddp-gloo+CODEC, ddp-gloo+fp16, "
            "ddp-gloo+bfloat16, ddp-gloo+powersgd, ddp-gather[:BUCKET_MB], p3, "
            "slicing, wfbp, kvstore, deferred-pull, ring, asgd, poseidon, sfb, adam, "
            "auto[:any-rounding], hierarchical[-shared][:collective]; p3/sealed: with sealed "
            "connections."
        ),
    ] = "none,ddp-gloo:25,p3",
    workers: Annotated[int, typer.Option(help="Ranks.")] = 4,
    ranks_per_node: Annotated[
        int, typer.Option(help="Ranks that share a node and its port; see hierarchical.")
    ] = 1,
    rate: Annotated[
        str, typer.Option(help="Nominal rate of every port; several comma-separated.")
    ] = "4gbit",
    dilation: Annotated[
        float, typer.Option(help="Run this many times slower than nominal.")
    ] = 10.0,
    repeat: Annotated[int, typer.Option(help="Run all strategies this often.")] = 1,
    steps: Annotated[int, typer.Option(help="Measured steps of a run.")] = 8,
    warmup: Annotated[int, typer.Option(help="Steps before them.")] = 2,
    slice_elems: Annotated[int | None, session_option(Strategy, "slice_elems")] = None,
    codec: Annotated[
        str,
        typer.Option(
            help="How gradients of gradlane's strategies travel, such as qsgd:bits=8, or by "
            "pattern: '*.bias=raw;*=qsgd:bits=4'."
        ),
    ] = "raw",
    seed: Annotated[int, typer.Option(help="Of model, batches and gradients.")] = 0,
    profile: Annotated[
        Path | None, typer.Option(help="A profile file in place of the workload's own times.")
    ] = None,
    batch_time_s: Annotated[
        float | None, typer.Option(help="Nominal compute time of a batch.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Write the timeline of a single run of gradlane's, for Perfetto."),
    ] = None,
    servers: Annotated[str | None, typer.Option(help=SERVERS_HELP)] = None,
    stragglers: Annotated[
        str,
        typer.Option(
            help="Comma-separated: wait, drop, drop=FACTOR, backup=RANKS, each with :carry to "
            "keep late gradients; gradlane's strategies are run with each."
        ),
    ] = "wait",
    straggler: Annotated[
        str | None,
        typer.Option(help="Stop a rank in bursts, such as rank=3,share=0.1,burst=500ms."),
    ] = None,
    clip: Annotated[
        float | None,
        typer.Option(help="Clip to this norm: gradlane's by the session, others by torch."),
    ] = None,
    json_path: JsonPath = None,
    html_path: HtmlPath = None,
) -> None:
    """Run a workload under several strategies on the emulated cluster.

    Rates and times are nominal: with a dilation of 10, the cluster runs at a tenth of the rate
    and computes ten times slower, and the results are converted back.
    """
    from gradlane.lab.runs.options import LabOptions
    from gradlane.lab.runs.strategy import parse_strategies, with_rules
    from gradlane.planning.simulation.lists import parse_rates
    from gradlane.planning.simulation.straggler import parse_straggler

    places = parse_servers(servers)
    if profile is not None:
        from gradlane.planning.models.schedule import layers_from_profile

        with remedied(FROM_PROFILE):
            if not profile.is_file():
                raise ValueError(f"there is no profile file {profile}")
            layers_from_profile(profile)
    options = LabOptions(
        workload=workload,
        strategies=with_rules(parse_strategies(strategy), stragglers),
        workers=workers,
        ranks_per_node=ranks_per_node,
        rates_bps=parse_rates(rate),
        dilation=dilation,
        repeat=repeat,
        steps=steps,
        warmup=warmup,
        slice_elems=slice_elems,
        codec=codec,
        seed=seed,
        profile_path=None if profile is None else str(profile),
        batch_time_s=batch_time_s,
        trace_path=trace,
        servers=places.servers,
        serving=places.serving,
        straggler=None if straggler is None else parse_straggler(straggler),
        clip_norm=clip,
    )
    require_writable(json_path, html_path, trace)
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
def lab_transport(
    workers: Annotated[int, typer.Option(help="Ranks, each on a node of its own.")] = 4,
    rate: Annotated[str, typer.Option(help="Rate of every port in each direction.")] = "500mbit",
    megabytes: Annotated[
        float, typer.Option(help="Gradients that each rank hands over at once, in 10^6 bytes.")
    ] = 100.0,
    repeat: Annotated[int, typer.Option(help="Turns of TCP streams, gradlane and Gloo.")] = 3,
    steps: Annotated[int, typer.Option(help="Measured steps of a turn.")] = 3,
    trials: Annotated[int, typer.Option(help="Urgent slices that each rank hands over.")] = 20,
    lanes: Annotated[int | None, session_option(Network, "lanes")] = None,
    json_path: JsonPath = None,
) -> None:
    """Measure goodput, processor time and urgency of exchanges without any compute."""
    from gradlane.formats.rates import parse_rate
    from gradlane.lab.cluster.privilege import ensure_namespaces
    from gradlane.lab.transport.measurement import TransportOptions, run_transport
    from gradlane.lab.transport.tables import print_transport
    from gradlane.report.console import print_written, wide_console

    options = TransportOptions(
        workers=workers,
        rate_bps=parse_rate(rate),
        megabytes=megabytes,
        repeat=repeat,
        steps=steps,
        urgent_trials=trials,
        settings={"lanes": lanes},
    )
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
def lab_calibrate(
    rate: Annotated[str, typer.Option(help="Rate of every port in each direction.")] = "500mbit",
    megabytes: Annotated[
        float, typer.Option(help="Gradients that each rank hands over at once, in 10^6 bytes.")
    ] = 40.0,
    repeat: Annotated[int, typer.Option(help="Turns of all runs; medians count.")] = 3,
    trials: Annotated[int, typer.Option(help="Single tensors for the latencies.")] = 40,
    json_path: JsonPath = None,
) -> None:
    """Measure the simulator's constants on this machine, for `--costs` of other commands."""
    from gradlane.formats.rates import parse_rate
    from gradlane.lab.calibration.calibrate import (
        CalibrationOptions,
        print_constants,
        run_calibration,
    )
    from gradlane.lab.cluster.privilege import ensure_namespaces
    from gradlane.report.console import print_written, wide_console

    options = CalibrationOptions(
        rate_bps=parse_rate(rate), megabytes=megabytes, repeat=repeat, trials=trials
    )
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
