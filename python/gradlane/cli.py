"""The `gradlane` command.

Arguments are checked before anything is started; heavy imports happen inside the commands, so
that help and mistakes are answered at once. Errors are one sentence on standard error: status 2
for wrong arguments, 1 for everything else, 130 after Ctrl-C; `--debug` shows the traceback.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from gradlane.lab.results import Row
    from gradlane.lab.run import LabOptions

app = typer.Typer(
    help="Data-parallel training at the speed of the compute, over networks that are slower.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
lab = typer.Typer(help="An emulated cluster on this machine.", no_args_is_help=True)
app.add_typer(lab, name="lab")
trace_commands = typer.Typer(help="Timelines of runs.", no_args_is_help=True)
app.add_typer(trace_commands, name="trace")

JsonPath = Annotated[
    Path | None, typer.Option("--json", help="Write what is printed, machine-readable.")
]
CostsPath = Annotated[
    Path | None,
    typer.Option("--costs", help="Constants of a machine, as `lab calibrate --json` wrote them."),
]
HtmlPath = Annotated[Path | None, typer.Option("--html", help="Write a page with plots.")]


@app.callback()
def _main(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
) -> None:
    # `main` reads the flag from the arguments, since an error may come before this is called.
    del debug


@app.command()
def version(json_path: JsonPath = None) -> None:
    """Print the versions of gradlane and of what it runs on."""
    from gradlane.lab.run import package_versions

    versions = package_versions()
    for name, text in versions.items():
        typer.echo(f"{name} {text}")
    if json_path is not None:
        _write_json(json_path, versions)


@lab.command("run")
def lab_run(
    workload: Annotated[
        str, typer.Option(help="resnet50, vgg19, inception_v3, sockeye, digits-cnn, ...")
    ],
    strategy: Annotated[
        str,
        typer.Option(
            help="Comma-separated: none, ddp-gloo[:BUCKET_MB], ddp-gather[:BUCKET_MB], p3, "
            "slicing, wfbp, kvstore, deferred-pull, asgd, auto."
        ),
    ] = "none,ddp-gloo:25,p3",
    workers: Annotated[int, typer.Option(help="Ranks, each on a node of its own.")] = 4,
    rate: Annotated[
        str, typer.Option(help="Nominal rate of every port; several comma-separated.")
    ] = "4gbit",
    dilation: Annotated[
        float, typer.Option(help="Run this many times slower than nominal.")
    ] = 10.0,
    repeat: Annotated[int, typer.Option(help="Run all strategies this often.")] = 1,
    steps: Annotated[int, typer.Option(help="Measured steps of a run.")] = 8,
    warmup: Annotated[int, typer.Option(help="Steps before them.")] = 2,
    slice_elems: Annotated[
        int | None, typer.Option(help="Elements a slice at most; each strategy's own if absent.")
    ] = None,
    codec: Annotated[str, typer.Option(help="Encoding of gradients.")] = "raw",
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
    json_path: JsonPath = None,
    html_path: HtmlPath = None,
) -> None:
    """Run a workload under several strategies on the emulated cluster.

    Rates and times are nominal: with a dilation of 10, the cluster runs at a tenth of the rate
    and computes ten times slower, and the results are converted back.
    """
    from gradlane.lab.rates import parse_rate
    from gradlane.lab.run import LabOptions
    from gradlane.lab.strategy import parse_strategies

    options = LabOptions(
        workload=workload,
        strategies=parse_strategies(strategy),
        workers=workers,
        rates_bps=[parse_rate(text) for text in rate.split(",") if text.strip()],
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
    )
    _require_writable(json_path, html_path, trace)
    _run_and_show(options, json_path, html_path)


def _run_and_show(options: LabOptions, json_path: Path | None, html_path: Path | None) -> None:
    """Run on the emulated cluster with a progress bar, print the tables and write the files."""
    from gradlane.lab.display import bar_progress, print_tables, wide_console
    from gradlane.lab.privilege import ensure_namespaces
    from gradlane.lab.results import save_rows
    from gradlane.lab.run import run_lab

    ensure_namespaces(sys.argv[1:])

    def keep(rows: list[Row]) -> None:
        if json_path is not None:
            save_rows(rows, json_path)

    console = wide_console()
    with bar_progress(console, options.steps_in_total) as progress:
        rows = run_lab(options, progress=progress, on_rows=keep)
    print_tables(console, rows)
    if html_path is not None:
        from dataclasses import asdict

        from gradlane.report import report_from_results

        report_from_results([asdict(row) for row in rows], html_path)
        console.print(f"wrote {html_path}", highlight=False)
    if json_path is not None:
        console.print(f"wrote {json_path}", highlight=False)


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
    json_path: JsonPath = None,
) -> None:
    """Measure goodput, processor time and urgency of exchanges without any compute."""
    from gradlane.lab.display import wide_console
    from gradlane.lab.privilege import ensure_namespaces
    from gradlane.lab.rates import parse_rate
    from gradlane.lab.transport import TransportOptions, run_transport, save
    from gradlane.lab.transport_tables import print_transport

    options = TransportOptions(
        workers=workers,
        rate_bps=parse_rate(rate),
        megabytes=megabytes,
        repeat=repeat,
        steps=steps,
        urgent_trials=trials,
    )
    _require_writable(json_path)
    ensure_namespaces(sys.argv[1:])
    console = wide_console()
    rows = run_transport(options, lambda text: console.print(text, style="dim", highlight=False))
    print_transport(console, rows)
    if json_path is not None:
        save(rows, json_path)
        console.print(f"wrote {json_path}", highlight=False)


@lab.command("predict")
def lab_predict(
    results: Annotated[list[Path], typer.Argument(help="Files that `lab run --json` wrote.")],
    costs: CostsPath = None,
    json_path: JsonPath = None,
) -> None:
    """Compare the simulator's predictions with what the lab has measured."""
    from gradlane.whatif.costs import read_costs
    from gradlane.whatif.prediction import can_predict, markdown_of, predict, summary_of

    _require_writable(json_path)
    rows = [row for path in results for row in _read_rows(path)]
    machine = None if costs is None else read_costs(costs)
    predictions = [predict(row, machine) for row in rows if can_predict(row)]
    summary = summary_of(predictions)
    typer.echo(markdown_of(predictions))
    typer.echo(
        f"median error {summary['median_error'] * 100:.1f} %, "
        f"worst {summary['worst_error'] * 100:.1f} %"
    )
    if json_path is not None:
        _write_json(json_path, {"rows": [it.to_json() for it in predictions], **summary})


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
    from gradlane.lab.calibrate import CalibrationOptions, run_calibration
    from gradlane.lab.calibrate_table import print_constants
    from gradlane.lab.display import wide_console
    from gradlane.lab.privilege import ensure_namespaces
    from gradlane.lab.rates import parse_rate

    options = CalibrationOptions(
        rate_bps=parse_rate(rate), megabytes=megabytes, repeat=repeat, trials=trials
    )
    _require_writable(json_path)
    ensure_namespaces(sys.argv[1:])
    console = wide_console()
    content = run_calibration(
        options, lambda text: console.print(text, style="dim", highlight=False)
    )
    print_constants(console, content)
    if json_path is not None:
        _write_json(json_path, content)
        console.print(f"wrote {json_path}", highlight=False)


@lab.command("grid")
def lab_grid(
    results: Annotated[
        Path, typer.Argument(help="File of measured runs; runs are added to it.")
    ] = Path("grid.json"),
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure what is missing, about an hour in all.")
    ] = False,
    budget_s: Annotated[
        float, typer.Option(help="Begin no further run after so many seconds; call again for more.")
    ] = 1e9,
    workload: Annotated[
        str, typer.Option(help="Only these, comma-separated; all by default.")
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
    from gradlane.lab.display import wide_console
    from gradlane.whatif.prediction_grid import predict_grid

    _require_writable(results, markdown, json_path)
    console = wide_console()
    workloads = [name.strip() for name in workload.split(",") if name.strip()]
    if measure:
        from gradlane.lab.display import bar_progress
        from gradlane.lab.grid import cells_of, measure_missing
        from gradlane.lab.privilege import ensure_namespaces

        ensure_namespaces(sys.argv[1:])
        cells = cells_of(workloads)
        with bar_progress(console, 0) as progress:
            missing = measure_missing(cells, results, budget_s=budget_s, progress=progress)
        if missing:
            typer.echo(f"{missing} runs are missing: give the same command again for more")
    content = predict_grid(
        results, workloads=workloads, costs_path=costs, fit=fit, markdown=markdown, console=console
    )
    if json_path is not None:
        _write_json(json_path, content)


@app.command()
def demo(
    html_path: HtmlPath = Path("demo.html"),
    json_path: JsonPath = None,
) -> None:
    """Train a real model on four emulated nodes, with DDP beside gradlane, in a few minutes."""
    from gradlane.lab.demo import run_demo
    from gradlane.lab.display import wide_console
    from gradlane.lab.privilege import ensure_namespaces

    _require_writable(json_path, html_path)
    ensure_namespaces(sys.argv[1:])
    run_demo(wide_console(), json_path=json_path, html_path=html_path)


@app.command()
def whatif(
    profile: Annotated[
        str,
        typer.Argument(help="A profile file, or resnet50, vgg19, inception_v3, sockeye."),
    ],
    workers: Annotated[str, typer.Option(help="Such as 2,4,8 or 2..16.")] = "2,4,8,16",
    rate: Annotated[
        str, typer.Option(help="Rate of every port; such as 4gbit,10gbit or 1..100gbit.")
    ] = "1gbit,4gbit,10gbit,25gbit,100gbit",
    strategy: Annotated[
        str,
        typer.Option(
            help="Comma-separated: p3, slicing, wfbp, kvstore, deferred-pull, asgd, ring-fused."
        ),
    ] = "wfbp,p3",
    codec: Annotated[str, typer.Option(help="Encoding of gradients: raw.")] = "raw",
    compression: Annotated[
        str, typer.Option(help="Bytes of gradients over bytes that travel; such as 1,2,5,10.")
    ] = "1",
    topology: Annotated[
        str, typer.Option(help="Of ring-fused: flat, hierarchical, or both.")
    ] = "flat",
    workers_per_node: Annotated[int, typer.Option(help="Of the hierarchical ring.")] = 8,
    local_rate: Annotated[
        str, typer.Option(help="Rate between the workers of a node, of the hierarchical ring.")
    ] = "1000gbit",
    additions: Annotated[
        Path | None,
        typer.Option(help="CSV of measured additions (elements,seconds), of ring-fused."),
    ] = None,
    latency_s: Annotated[float, typer.Option(help="One-way time between two ports.")] = 0.0,
    slice_elems: Annotated[int | None, typer.Option(help="Elements a slice at most.")] = None,
    batch_time_s: Annotated[
        float | None, typer.Option(help="Compute time of a batch, in place of the profile's.")
    ] = None,
    free_host: Annotated[
        bool, typer.Option("--free-host", help="Charge the host no time for frames and sums.")
    ] = False,
    costs: CostsPath = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Write the timeline of a single cluster, for Perfetto or Chrome."),
    ] = None,
    json_path: JsonPath = None,
    html_path: HtmlPath = None,
) -> None:
    """Say whether the network is the bottleneck of a training, and what would help.

    Simulates clusters of gradlane's own engine (ring-fused: a model of fused all-reduce) for
    every combination of workers, rate, strategy and compression.
    """
    from gradlane.lab.display import wide_console
    from gradlane.lab.rates import parse_rate
    from gradlane.whatif import command, lists
    from gradlane.whatif.costs import MachineCosts, read_costs
    from gradlane.whatif.grid import CODECS
    from gradlane.whatif.profiles import find_profile
    from gradlane.whatif.simulation import STRATEGIES, Cluster

    _require_writable(json_path, html_path, trace)
    lists.parse_names(codec, CODECS, "codec")
    content = command.run_whatif(
        find_profile(profile, batch_time_s),
        workers=lists.parse_workers(workers),
        rates_bps=lists.parse_rates(rate),
        strategies=lists.parse_names(strategy, STRATEGIES, "strategy"),
        compressions=lists.parse_compressions(compression),
        topologies=lists.parse_names(topology, ("flat", "hierarchical"), "topology"),
        base=Cluster(
            workers=1,
            rate_bps=0.0,
            latency_s=latency_s,
            slice_elems=slice_elems,
            free_host=free_host,
            costs=MachineCosts() if costs is None else read_costs(costs),
            workers_per_node=workers_per_node,
            local_rate_bps=parse_rate(local_rate),
            additions=() if additions is None else lists.read_additions(additions),
        ),
        console=wide_console(),
        trace_path=trace,
        html_path=html_path,
    )
    if json_path is not None:
        command.write_json(json_path, content)
        typer.echo(f"wrote {json_path}")


@app.command(context_settings={"allow_interspersed_args": False})
def profile(
    script: Annotated[str, typer.Argument(help="A training script, run as it is.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="The script's own.")] = None,
    module: Annotated[
        bool, typer.Option("--module", "-m", help="SCRIPT is a module, as after `python -m`.")
    ] = False,
    steps: Annotated[int, typer.Option(help="Recorded steps.")] = 30,
    warmup: Annotated[int, typer.Option(help="Steps before them.")] = 5,
    to_the_end: Annotated[
        bool, typer.Option("--to-the-end", help="Let the script go on after the last step.")
    ] = False,
    batch_size: Annotated[
        int | None, typer.Option(help="Samples in a step, where the model's inputs do not tell.")
    ] = None,
    batch_time_s: Annotated[
        float | None,
        typer.Option(help="Time of a batch elsewhere: made from operations, not measured here."),
    ] = None,
    json_path: Annotated[Path, typer.Option("--json", help="Where the profile goes.")] = Path(
        "profile.json"
    ),
) -> None:
    """Record what a training script computes: times of layers and gradients, for `whatif`."""
    from gradlane.lab.display import wide_console
    from gradlane.profiler.command import run_profile

    _require_writable(json_path)
    run_profile(
        script,
        arguments or [],
        console=wide_console(),
        path=json_path.absolute(),
        steps=steps,
        warmup=warmup,
        is_module=module,
        to_the_end=to_the_end,
        batch_size=batch_size,
        batch_time_s=batch_time_s,
    )


@app.command()
def plan(
    profile: Annotated[
        str,
        typer.Argument(help="A profile file, or resnet50, vgg19, inception_v3, sockeye."),
    ],
    workers: Annotated[int, typer.Option(help="Ranks.")],
    rate: Annotated[str, typer.Option(help="Rate of every port, such as 10gbit.")],
    latency_s: Annotated[float, typer.Option(help="One-way time between two ports.")] = 0.0,
    update: Annotated[str, typer.Option(help="Where the optimizer runs: worker, server.")] = (
        "worker"
    ),
    batch_time_s: Annotated[
        float | None, typer.Option(help="Compute time of a batch, in place of the profile's.")
    ] = None,
    budget_s: Annotated[float, typer.Option(help="Seconds that simulations may take.")] = 60.0,
    json_path: JsonPath = None,
) -> None:
    """Choose the settings for a profile and a cluster, with the reason for each.

    What --json writes is the plan: `session.prepare(model, optimizer, plan="plan.json")`.
    """
    from gradlane.lab.display import wide_console
    from gradlane.lab.rates import parse_rate
    from gradlane.planner.command import run_plan
    from gradlane.planner.settings import ClusterFacts
    from gradlane.whatif.profiles import find_profile

    _require_writable(json_path)
    made = run_plan(
        find_profile(profile, batch_time_s),
        ClusterFacts(workers, parse_rate(rate), latency_s, update),
        budget_s=budget_s,
        console=wide_console(),
    )
    if json_path is not None:
        made.save(json_path)
        typer.echo(f"wrote {json_path}")


@app.command()
def probe(
    window_s: Annotated[float, typer.Option(help="Seconds that each stream is measured.")] = 1.0,
    interface: Annotated[str | None, typer.Option(help="Network interface to use.")] = None,
    advertise: Annotated[
        str | None, typer.Option(help="Address that other ranks reach this one at.")
    ] = None,
    connect_timeout_s: Annotated[float, typer.Option(help="How long to wait for ranks.")] = 60.0,
    json_path: JsonPath = None,
) -> None:
    """Measure bandwidth and latency between the ranks of a real cluster.

    Start it as a training is started, one process a node:
    `torchrun --nnodes 4 --nproc-per-node 1 ... -m gradlane probe`.
    """
    from gradlane.lab.display import wide_console
    from gradlane.planner.probe_command import run_probe

    _require_writable(json_path)
    measured = run_probe(
        window_s=window_s,
        interface=interface,
        advertise=advertise,
        connect_timeout_s=connect_timeout_s,
        console=wide_console(),
    )
    if json_path is not None and measured is not None:
        _write_json(json_path, measured.to_json())
        typer.echo(f"wrote {json_path}")


@trace_commands.command("merge")
def trace_merge(
    files: Annotated[
        list[Path], typer.Argument(help="The ranks' files, such as trace.rank*.json.")
    ],
    output: Annotated[Path, typer.Option(help="Where all ranks go; .gz compresses.")],
) -> None:
    """Join the timelines of a run's ranks into one file, their clocks aligned."""
    from gradlane.timeline.chrome import read_chrome, write_chrome
    from gradlane.timeline.merge import merge

    _require_writable(output)
    timeline = merge([read_chrome(path) for path in files])
    write_chrome(timeline, output)
    for note in timeline.notes:
        typer.echo(note)
    typer.echo(f"wrote {output}")


@app.command()
def report(
    results: Annotated[Path, typer.Argument(help="A file that --json wrote.")],
    html_path: HtmlPath = None,
) -> None:
    """Make an HTML page with plots of a results file."""
    from gradlane.report import report_from_results, report_from_whatif

    content = _read_json(results)
    target = html_path or results.with_suffix(".html")
    _require_writable(target)
    if isinstance(content, dict) and "rows" in content and "answers" in content:
        report_from_whatif(content, target)
    else:
        report_from_results(_rows_in(content, results), target)
    typer.echo(f"wrote {target}")


def _read_rows(results: Path) -> list[dict[str, Any]]:
    """Read the rows of a lab run; `ValueError` where there are none."""
    return _rows_in(_read_json(results), results)


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as failure:
        raise ValueError(f"cannot read {path}: {failure.strerror}") from failure
    except ValueError as failure:
        raise ValueError(f"{path} is not JSON: {failure}") from failure


def _rows_in(content: Any, path: Path) -> list[dict[str, Any]]:
    if not isinstance(content, list) or not content or "strategy" not in content[0]:
        raise ValueError(
            f"{path} holds no rows of a lab run or a what-if: make it with `lab run --json` or "
            "`whatif --json`"
        )
    return content


def _require_writable(*paths: Path | None) -> None:
    """Raise `ValueError` for a path whose folder is missing, before minutes of work are lost."""
    for path in paths:
        if path is not None and not path.absolute().parent.is_dir():
            raise ValueError(f"cannot write {path}: its folder does not exist")
        if path is not None and path.is_dir():
            raise ValueError(f"cannot write {path}: it is a folder")


def _write_json(path: Path, content: Any) -> None:
    _require_writable(path)
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")


def main() -> None:
    """Run the command line; never returns."""
    from gradlane.lab.errors import LabError, RankError

    debug = "--debug" in sys.argv[1:]
    try:
        app()
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        sys.exit(130)
    except ModuleNotFoundError as failure:
        if debug or (failure.name or "").startswith("gradlane"):
            raise
        typer.echo(
            f"gradlane: the package {failure.name} is missing; the lab and the reports need "
            "`pip install 'gradlane[lab]'`",
            err=True,
        )
        sys.exit(1)
    except Exception as failure:
        if debug:
            raise
        typer.echo(f"gradlane: {failure}", err=True)
        if isinstance(failure, RankError) and failure.details:
            typer.echo("what the rank said last:", err=True)
            typer.echo("\n".join(failure.details.rstrip().splitlines()[-12:]), err=True)
        if not isinstance(failure, (ValueError, LabError)):
            typer.echo(f"({type(failure).__name__}; --debug shows where)", err=True)
        sys.exit(2 if isinstance(failure, ValueError) else 1)
