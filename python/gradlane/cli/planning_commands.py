"""The commands that say whether the network holds a training back, and what would help."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from gradlane.cli.huge_pages import prefer_huge_pages
from gradlane.cli.options import (
    CostsPath,
    HtmlPath,
    JsonPath,
    accumulated_profile,
    costs_of,
    profile_of,
    remedied,
    require_writable,
)
from gradlane.cli.typed_options import Taken, typed
from gradlane.formats.durations import parse_duration_s
from gradlane.planning.profiler.options import RecordingOptions
from gradlane.planning.simulation import lists
from gradlane.planning.simulation.costs import MachineCosts
from gradlane.planning.simulation.faults import FaultSettings
from gradlane.planning.simulation.lists import Grid
from gradlane.planning.simulation.paths import Paths
from gradlane.planning.simulation.scenarios import DDP, LATE_JITTER, LATE_STEPS, Cluster
from gradlane.training.options.option_groups import Network
from gradlane.training.options.stragglers import WAIT
from gradlane.training.plans.settings import ClusterFacts

_REACHED = Taken("interface", "advertise", "ports", "connect_timeout_s", connect_timeout_s=60.0)
"""Options of a command that all ranks start, and that waits less long for them than a session."""


@typed
def whatif(
    profile: Annotated[
        str,
        typer.Argument(help="A profile file, or resnet50, vgg19, gpt2_small, ... by name."),
    ],
    grid: Grid,
    cluster: Annotated[
        Cluster, Taken(without=("workers", "ranks_per_node"), workers=1, rate_bps=0.0)
    ],
    paths: Paths,
    faults: FaultSettings | None,
    fewer: Annotated[
        str,
        typer.Option(
            help="What may change what is learned where exact training is not enough: bits, or "
            "bits,exchanges. The first way that is enough is named, with its bytes and memory."
        ),
    ] = "",
    local_rate: Annotated[
        str | None,
        typer.Option(
            help="Rate between the workers of a node, as of NCCL's sums there, or memory: sums by "
            "their processors in shared memory. If absent 160gbit, NCCL's over PCIe, with "
            "--ranks-per-node, memory for a profile of processors, and 1000gbit for ring-fused "
            "without nodes."
        ),
    ] = None,
    additions: Annotated[
        Path | None,
        typer.Option(help="CSV of measured additions (elements,seconds), of ring-fused."),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(
            help="Processors of a rank, such as 16, which decide how many threads a session takes; "
            "or the threads, lanes=2,work=3, also with processors=4, which run at most 4 at a "
            "time. 12 processors if absent."
        ),
    ] = None,
    measured_step: Annotated[
        str | None,
        typer.Option(
            help="A step as measured on the cluster, such as 2.4s: finds the rate of the link that "
            "would explain it, or says that none does."
        ),
    ] = None,
    measured_single: Annotated[
        str | None,
        typer.Option(help="A step as measured on one machine, in place of --batch-time-s."),
    ] = None,
    samples: Annotated[
        str | None,
        typer.Option(
            help="Samples of a whole training, such as 90x1.28e6: tells its hours and price, and "
            "which clusters no other beats."
        ),
    ] = None,
    price: Annotated[
        str | None,
        typer.Option(
            help="Price of a machine for an hour, such as 3.06, or by its port's rate: "
            "10gbit=3.06,100gbit=9.8."
        ),
    ] = None,
    budget: Annotated[float | None, typer.Option(help="Price of a training at most.")] = None,
    batch_time_s: Annotated[
        str | None,
        typer.Option(
            help="Compute time of a batch, in place of the profile's; 4x0.05 where gradients of "
            "four batches of 0.05 s are added up before they are exchanged."
        ),
    ] = None,
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
    from gradlane.cli import whatif as command
    from gradlane.planning.advice.money import parse_prices
    from gradlane.planning.advice.ways import KINDS
    from gradlane.planning.simulation.hosts import USUAL_PROCESSORS, host_with, parse_host
    from gradlane.report.console import wide_console

    require_writable(json_path, trace, page=html_path)
    prices = parse_prices(samples, price, budget)
    if cluster.sharded and max(grid.ranks_per_node) == 1:
        raise ValueError(
            "--sharded needs nodes of several ranks: add --ranks-per-node 8, for example"
        )
    # What gradlane does by itself where nodes have several workers.
    adds_up = max(grid.ranks_per_node) > 1 and not cluster.sharded
    baseline = "wfbp" if cluster.straggler is not None else DDP
    usual = (baseline, "p3", *(("hierarchical",) if adds_up else ()))
    prefer_huge_pages(max(grid.workers))
    with remedied("`gradlane additions` writes one"):
        added = () if additions is None else lists.read_additions(additions)
    threads = host_with(USUAL_PROCESSORS) if host is None else parse_host(host)
    if measured_single is not None and batch_time_s is not None:
        raise ValueError("--measured-single and --batch-time-s say the same: leave one out")
    if measured_single is not None and measured_step is None:
        raise ValueError("--measured-single has no effect without --measured-step: add it")
    batch_time_s = batch_time_s or (measured_single and str(parse_duration_s(measured_single)))
    read = accumulated_profile(profile, batch_time_s)
    base = replace(
        cluster,
        costs=costs_of(costs) or MachineCosts(),
        local_rate_bps=_local_rate_bps(local_rate, max(grid.ranks_per_node), read.device),
        paths=paths,
        host=threads,
        additions=added,
    )
    if cluster.straggler is not None or [*grid.rules] != [WAIT]:
        base = replace(base, steps=LATE_STEPS, compute_jitter=LATE_JITTER)
    command.run_whatif(
        read,
        replace(
            grid,
            strategies=grid.strategies or usual,
            codecs=[*dict.fromkeys(grid.codecs)],
            updates=[*dict.fromkeys((None, *grid.updates))],
        ),
        base,
        console=wide_console(),
        fewer=lists.parse_names(fewer, KINDS, "fewer") if fewer else (),
        faults=faults,
        prices=prices,
        host=threads,
        is_host_given=host is not None,
        measured_step_s=None if measured_step is None else parse_duration_s(measured_step),
        trace_path=trace,
        html_path=html_path,
        json_path=json_path,
    )


def _local_rate_bps(text: str | None, node_size: int, device: str | None) -> float | None:
    """Return the rate of sums on a node; None: by its processors in shared memory."""
    from gradlane.formats.rates import parse_rate
    from gradlane.planning.simulation.scenarios import NCCL_RATE_BPS

    if text == "memory":
        return None
    if text is not None:
        return float(parse_rate(text))
    return NCCL_RATE_BPS if node_size > 1 and device != "cpu" else None


@typed
def profile(
    script: Annotated[str, typer.Argument(help="A training script, run as it is.")],
    options: RecordingOptions,
    arguments: Annotated[list[str] | None, typer.Argument(help="The script's own.")] = None,
    module: Annotated[
        bool, typer.Option("--module", "-m", help="SCRIPT is a module, as after `python -m`.")
    ] = False,
    batch_time_s: Annotated[
        float | None,
        typer.Option(help="Time of a batch elsewhere: made from operations, not measured here."),
    ] = None,
    json_path: Annotated[Path, typer.Option("--json", help="Where the profile goes.")] = Path(
        "profile.json"
    ),
) -> None:
    """Record what a training script computes: times of layers and gradients, for `whatif`."""
    from gradlane.cli.profile import run_profile
    from gradlane.report.console import wide_console

    require_writable(json_path)
    run_profile(
        script,
        arguments or [],
        console=wide_console(),
        path=json_path.absolute(),
        options=options,
        is_module=module,
        batch_time_s=batch_time_s,
    )


def additions(
    path: Annotated[Path, typer.Argument(help="Where the CSV file goes.")] = Path("additions.csv"),
    device: Annotated[
        str, typer.Option(help="Such as cpu or cuda:1; if absent cuda where it is there, else cpu.")
    ] = "",
    json_path: JsonPath = None,
) -> None:
    """Measure how long vectors of many lengths take to add up, for `whatif --additions`."""
    from gradlane.cli.additions import run_additions
    from gradlane.report.console import wide_console

    require_writable(path)
    require_writable(json_path)
    run_additions(device, console=wide_console(), path=path, json_path=json_path)


@typed
def plan(
    profile: Annotated[
        str,
        typer.Argument(help="A profile file, or resnet50, vgg19, gpt2_small, ... by name."),
    ],
    facts: ClusterFacts,
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
            help="Schemes may add gradients up in another order than rank order (a ring, factors): "
            "results then differ in their last bits.",
        ),
    ] = False,
    fewer: Annotated[
        str,
        typer.Option(
            help="What may change what is learned where exact training is not enough: bits, or "
            "bits,exchanges. The first way that is enough is named, with the arguments of "
            "gradlane.init; the plan stays exact."
        ),
    ] = "",
    costs: CostsPath = None,
    json_path: JsonPath = None,
) -> None:
    """Choose the settings for a profile and a cluster, with the reason for each.

    --json writes the plan: `session.prepare(model, optimizer, plan="plan.json")`.
    """
    from gradlane.cli.plan import run_plan
    from gradlane.planning.advice.ways import KINDS
    from gradlane.report.console import wide_console

    require_writable(json_path)
    run_plan(
        profile_of(profile, batch_time_s),
        facts,
        budget_s=budget_s,
        console=wide_console(),
        rule=rule,
        costs=costs_of(costs),
        codec=codec,
        any_rounding=any_rounding,
        fewer=lists.parse_names(fewer, KINDS, "fewer") if fewer else (),
        path=json_path,
    )


@typed
def probe(
    network: Annotated[Network, _REACHED],
    window_s: Annotated[float, typer.Option(help="Seconds that each stream is measured.")] = 1.0,
    json_path: JsonPath = None,
) -> None:
    """Measure bandwidth and latency between the ranks of a real cluster.

    Start it as a training is started, one process a node:
    `torchrun --nnodes 4 --nproc-per-node 1 ... -m gradlane probe`.
    """
    from gradlane.cli.probe import run_probe
    from gradlane.report.console import wide_console

    require_writable(json_path)
    run_probe(network=network, window_s=window_s, console=wide_console(), json_path=json_path)


@typed
def doctor(
    network: Annotated[Network, _REACHED],
    window_s: Annotated[float, typer.Option(help="Seconds that each stream is measured.")] = 1.0,
    json_path: JsonPath = None,
) -> None:
    """Say what would keep a training from starting or from being fast, and what to do.

    On one machine as it is; on all, as a training is started: `torchrun ... -m gradlane doctor`.
    The exit status is 1 where there is a fault.
    """
    from gradlane.cli.doctor import run_doctor
    from gradlane.report.console import wide_console

    require_writable(json_path)
    found = run_doctor(
        network=network, window_s=window_s, console=wide_console(), json_path=json_path
    )
    if found is not None and not found.is_fit:
        raise typer.Exit(1)


def add_planning(app: typer.Typer) -> None:
    """Put the commands among those of `gradlane`."""
    app.command()(whatif)
    app.command(context_settings={"allow_interspersed_args": False})(profile)
    app.command()(additions)
    app.command()(plan)
    app.command()(probe)
    app.command()(doctor)
