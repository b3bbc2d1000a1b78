"""The `gradlane` command.

Arguments are checked before anything is started; heavy imports happen inside the commands, so
that help and mistakes are answered at once. Errors are one sentence on standard error: status 2
for wrong arguments, 1 for everything else, 130 after Ctrl-C, 143 after SIGTERM; `--debug` shows
the traceback. The commands of the lab are in `lab/command.py`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from gradlane.command_options import (
    CostsPath,
    HtmlPath,
    JsonPath,
    read_json,
    require_writable,
    rows_in,
    write_json,
)
from gradlane.lab.command import lab
from gradlane.lab.ending import Terminated, end_in_order

app = typer.Typer(
    help="Data-parallel training at the speed of the compute, over networks that are slower.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.add_typer(lab, name="lab")
trace_commands = typer.Typer(help="Timelines of runs.", no_args_is_help=True)
app.add_typer(trace_commands, name="trace")


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
        write_json(json_path, versions)


@app.command()
def demo(
    context: typer.Context,
    html_path: HtmlPath = Path("demo.html"),
    json_path: JsonPath = None,
) -> None:
    """Train a real model on four emulated nodes, with DDP beside gradlane, in a few minutes."""
    from gradlane.lab.demo import run_demo
    from gradlane.lab.display import wide_console
    from gradlane.lab.privilege import ensure_namespaces

    require_writable(json_path, html_path)
    end_in_order(context)
    ensure_namespaces(sys.argv[1:])
    run_demo(wide_console(), json_path=json_path, html_path=html_path)


@app.command()
def whatif(
    profile: Annotated[
        str,
        typer.Argument(help="A profile file, or resnet50, vgg19, gpt2_small, ... by name."),
    ],
    workers: Annotated[str, typer.Option(help="Such as 2,4,8 or 2..16.")] = "2,4,8,16",
    rate: Annotated[
        str, typer.Option(help="Rate of every port; such as 4gbit,10gbit or 1..100gbit.")
    ] = "1gbit,4gbit,10gbit,25gbit,100gbit",
    strategy: Annotated[
        str,
        typer.Option(
            help="Comma-separated: p3, slicing, wfbp, kvstore, deferred-pull, asgd, ring (p3 round "
            "a ring), poseidon and sfb (p3 with factors where they are fewer numbers, or wherever "
            "there are any), ring-fused (a model of fused buffers and rings)."
        ),
    ] = "wfbp,p3",
    codec: Annotated[
        list[str] | None,
        typer.Option(
            help="How gradients travel, such as qsgd:bits=4; several, each after --codec. raw if "
            "absent."
        ),
    ] = None,
    compression: Annotated[
        str, typer.Option(help="Bytes of gradients over bytes that travel; such as 1,2,5,10.")
    ] = "1",
    topology: Annotated[
        str, typer.Option(help="Of ring-fused: flat, hierarchical, or both.")
    ] = "flat",
    servers: Annotated[
        int | None, typer.Option(help="The first so many workers own slices; all if absent.")
    ] = None,
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
    stragglers: Annotated[
        str,
        typer.Option(
            help="Comma-separated: wait, drop, drop=1.5, backup=1: who a step goes on without."
        ),
    ] = "wait",
    straggler: Annotated[
        str | None,
        typer.Option(
            help="A rank that is stopped for moments: rank=3,share=0.1,burst=0.5 (seconds)."
        ),
    ] = None,
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
    from gradlane.codec_choice import RAW, check_codecs, codec_rules
    from gradlane.lab.display import wide_console
    from gradlane.lab.rates import parse_rate
    from gradlane.lab.straggling import parse_straggler
    from gradlane.stragglers import WAIT
    from gradlane.whatif import command, lists
    from gradlane.whatif.costs import MachineCosts, read_costs
    from gradlane.whatif.profiles import find_profile
    from gradlane.whatif.simulation import LATE_JITTER, LATE_STEPS, STRATEGIES, Cluster

    require_writable(json_path, html_path, trace)
    rules = lists.parse_rules(stragglers)
    late = straggler is not None or rules != [WAIT]
    codecs = list(dict.fromkeys(codec or [RAW]))
    for text in codecs:
        check_codecs(codec_rules(text))
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
            servers=servers,
            latency_s=latency_s,
            slice_elems=slice_elems,
            steps=LATE_STEPS if late else Cluster.steps,
            compute_jitter=LATE_JITTER if late else 0.0,
            straggler=None if straggler is None else parse_straggler(straggler),
            free_host=free_host,
            costs=MachineCosts() if costs is None else read_costs(costs),
            workers_per_node=workers_per_node,
            local_rate_bps=parse_rate(local_rate),
            additions=() if additions is None else lists.read_additions(additions),
        ),
        console=wide_console(),
        codecs=codecs,
        rules=rules,
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

    require_writable(json_path)
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
        typer.Argument(help="A profile file, or resnet50, vgg19, gpt2_small, ... by name."),
    ],
    workers: Annotated[int, typer.Option(help="Ranks.")],
    rate: Annotated[str, typer.Option(help="Rate of every port, such as 10gbit.")],
    servers: Annotated[
        int | None,
        typer.Option(help="The first so many ranks own slices; all if absent."),
    ] = None,
    latency_s: Annotated[float, typer.Option(help="One-way time between two ports.")] = 0.0,
    update: Annotated[str, typer.Option(help="Where the optimizer runs: worker, server.")] = (
        "worker"
    ),
    batch_time_s: Annotated[
        float | None, typer.Option(help="Compute time of a batch, in place of the profile's.")
    ] = None,
    budget_s: Annotated[float, typer.Option(help="Seconds that simulations may take.")] = 60.0,
    rule: Annotated[
        str,
        typer.Option(
            "--plan",
            help="auto: settings by simulation, with schemes that sessions run; poseidon: the "
            "scheme of each layer by Poseidon's formula.",
        ),
    ] = "auto",
    codec: Annotated[
        str,
        typer.Option(
            help="A codec that may be used where fewer bytes help, such as qsgd:bits=8, or by "
            "pattern: '*.bias=raw;*=qsgd:bits=4'. It changes what is learned."
        ),
    ] = "raw",
    any_rounding: Annotated[
        bool,
        typer.Option(
            "--any-rounding",
            help="Schemes may add gradients up in another order than that of the ranks (a ring, "
            "factors): results then differ in their last bits.",
        ),
    ] = False,
    costs: CostsPath = None,
    json_path: JsonPath = None,
) -> None:
    """Choose the settings for a profile and a cluster, with the reason for each.

    What --json writes is the plan: `session.prepare(model, optimizer, plan="plan.json")`.
    """
    from gradlane.lab.display import wide_console
    from gradlane.lab.rates import parse_rate
    from gradlane.planner.command import run_plan
    from gradlane.planner.settings import ClusterFacts
    from gradlane.whatif.costs import read_costs
    from gradlane.whatif.profiles import find_profile

    require_writable(json_path)
    made = run_plan(
        find_profile(profile, batch_time_s),
        ClusterFacts(workers, parse_rate(rate), latency_s, update, servers),
        budget_s=budget_s,
        console=wide_console(),
        rule=rule,
        costs=None if costs is None else read_costs(costs),
        codec=codec,
        any_rounding=any_rounding,
    )
    if json_path is not None:
        made.save(json_path)
        typer.echo(f"wrote {json_path}")


@app.command()
def reproduce(
    figures: Annotated[
        list[str] | None,
        typer.Argument(help="Such as p3:fig7; p3 for all of a paper's; all; or modern."),
    ] = None,
    list_them: Annotated[
        bool, typer.Option("--list", help="Show all figures, and what those not there yet need.")
    ] = False,
    profiles: Annotated[
        Path | None,
        typer.Option(help="Folder with recorded profiles for the what-if paper's figures."),
    ] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the page of text.")] = None,
    json_path: JsonPath = None,
    html_path: HtmlPath = None,
) -> None:
    """Put figures of the papers beside what is simulated here, and say why they differ."""
    from gradlane.lab.display import wide_console
    from gradlane.reproduce import command

    require_writable(json_path, html_path, markdown)
    if list_them:
        content = command.run_list(wide_console())
    elif not figures:
        raise ValueError("name a figure, a paper, all or modern; --list shows what there is")
    else:
        content = command.run_reproduce(
            figures,
            console=wide_console(),
            profile_dir=profiles,
            markdown=markdown,
            html_path=html_path,
        )
    if json_path is not None:
        write_json(json_path, content)
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

    require_writable(json_path)
    measured = run_probe(
        window_s=window_s,
        interface=interface,
        advertise=advertise,
        connect_timeout_s=connect_timeout_s,
        console=wide_console(),
    )
    if json_path is not None and measured is not None:
        write_json(json_path, measured.to_json())
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

    require_writable(output)
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
    from gradlane.report.presets import is_of_preset, report_from_preset

    content = read_json(results)
    target = html_path or results.with_suffix(".html")
    require_writable(target)
    if isinstance(content, dict) and "rows" in content and "answers" in content:
        report_from_whatif(content, target)
    elif isinstance(content, list) and is_of_preset(content):
        report_from_preset(content, target)
    else:
        report_from_results(rows_in(content, results), target)
    typer.echo(f"wrote {target}")


def main() -> None:
    """Run the command line; never returns."""
    from gradlane.lab.errors import LabError, RankError

    debug = "--debug" in sys.argv[1:]
    try:
        app()
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        sys.exit(130)
    except SystemExit as end:
        # Typer makes this of Ctrl-C, without a word.
        if end.code == 130:
            typer.echo("interrupted", err=True)
        raise
    except Terminated:
        typer.echo("terminated", err=True)
        sys.exit(143)
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
