"""The commands that say whether the network holds a training back, and what would help."""

from __future__ import annotations

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
    given_options,
    profile_of,
    remedied,
    require_writable,
    session_option,
)
from gradlane.training.options.option_groups import Network
from gradlane.training.options.server_places import SERVERS_HELP, parse_servers


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
            help="Comma-separated: ddp (PyTorch's, with the best bucket size), p3, slicing, wfbp, "
            "kvstore, deferred-pull, asgd, ring (p3 round a ring), poseidon and sfb (p3 with "
            "factors where they are fewer numbers, or wherever there are any; on nodes ranks add "
            "up first and a leader sends their factors), adam (factors to one rank, the whole "
            "back), hierarchical and hierarchical-shared (p3 between nodes whose ranks add up "
            "first; --ranks-per-node), ring-fused (a model of fused buffers and rings); if absent "
            "ddp, p3, and hierarchical where nodes have several workers."
        ),
    ] = "",
    codec: Annotated[
        list[str] | None,
        typer.Option(
            help="How gradients travel, such as qsgd:bits=4; several, each after --codec. raw if "
            "absent."
        ),
    ] = None,
    update: Annotated[
        list[str] | None,
        typer.Option(
            help="Local updates beside exact ones, such as "
            "local:steps=32,fragments=8,overlap_steps=4; several, each after --update."
        ),
    ] = None,
    fewer: Annotated[
        str,
        typer.Option(
            help="What may change what is learned where exact training is not enough: bits, or "
            "bits,exchanges. The first way that is enough is named, with its bytes and memory."
        ),
    ] = "",
    sharded: Annotated[
        bool,
        typer.Option(
            "--sharded",
            help="The model is sharded within each node by fully_shard (--ranks-per-node).",
        ),
    ] = False,
    compression: Annotated[
        str, typer.Option(help="Bytes of gradients over bytes that travel; such as 1,2,5,10.")
    ] = "1",
    topology: Annotated[
        str, typer.Option(help="Of ring-fused: flat, hierarchical, or both.")
    ] = "flat",
    servers: Annotated[str | None, typer.Option(help=SERVERS_HELP)] = None,
    ranks_per_node: Annotated[
        str,
        typer.Option(
            help="Workers on each node, which share its port; such as 2,4,8. Numbers that do "
            "not fill two nodes are left out."
        ),
    ] = "1",
    workers_per_node: Annotated[
        int, typer.Option(help="Of the hierarchical ring, without --ranks-per-node.")
    ] = 8,
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
    latency_s: Annotated[float, typer.Option(help="One-way time between two ports.")] = 0.0,
    port: Annotated[
        list[str] | None,
        typer.Option(
            help="A machine whose port has another rate, by its number: 3=1gbit; several, each "
            "after --port. Dedicated servers come after the workers."
        ),
    ] = None,
    link: Annotated[
        list[str] | None,
        typer.Option(
            help="A link between two machines that is slower than their ports: 0-2=1gbit; several, "
            "each after --link."
        ),
    ] = None,
    racks: Annotated[
        str | None,
        typer.Option(
            help="Machines of a rack and what its line to the others carries: 4=10gbit, or 4=3x "
            "where its ports together carry 3 times as much (oversubscription)."
        ),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(
            help="Processors of a rank, such as 16, by which a session takes its threads; or the "
            "threads, lanes=2,work=3. 12 if absent."
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
    slice_elems: Annotated[int | None, typer.Option(help="Elements a slice at most.")] = None,
    stragglers: Annotated[
        str,
        typer.Option(
            help="Comma-separated: wait, drop, drop=1.5, backup=1: who a step goes on without."
        ),
    ] = "wait",
    straggler: Annotated[
        str | None,
        typer.Option(help="A rank that is stopped for moments: rank=3,share=0.1,burst=500ms."),
    ] = None,
    mtbf: Annotated[
        str | None,
        typer.Option(
            help="Mean time between failures of one machine, such as 6h: tells what faults cost, "
            "with and without going on. The ranks of a node fail together (--ranks-per-node); "
            "else each rank is a machine."
        ),
    ] = None,
    restart_time: Annotated[
        str | None,
        typer.Option(help="From the start of a process until it can train. 60s if absent."),
    ] = None,
    replacement_time: Annotated[
        str | None,
        typer.Option(help="Until another machine is there in place of a lost one. 5min if absent."),
    ] = None,
    detection_time: Annotated[
        str | None,
        typer.Option(help="Until others know of a loss. silence_timeout_s, 30s, if absent."),
    ] = None,
    checkpoint_interval: Annotated[
        str | None,
        typer.Option(help="Training between two checkpoints. The best one if absent."),
    ] = None,
    checkpoint_time: Annotated[
        str | None,
        typer.Option(
            help="How long training stands still for a checkpoint. A copy of parameters and "
            "optimizer state if absent."
        ),
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
    clip: Annotated[
        bool,
        typer.Option("--clip", help="Gradients are clipped by the norm of all of them."),
    ] = False,
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
    from gradlane.cli import whatif as command
    from gradlane.formats.durations import parse_duration_s
    from gradlane.planning.advice.money import parse_prices
    from gradlane.planning.advice.ways import KINDS
    from gradlane.planning.simulation import lists
    from gradlane.planning.simulation.costs import MachineCosts
    from gradlane.planning.simulation.faults import parse_faults
    from gradlane.planning.simulation.hosts import USUAL_PROCESSORS, host_with, parse_host
    from gradlane.planning.simulation.paths import parse_paths
    from gradlane.planning.simulation.scenarios import LATE_JITTER, LATE_STEPS, STRATEGIES, Cluster
    from gradlane.planning.simulation.straggler import parse_straggler
    from gradlane.report.console import wide_console
    from gradlane.training.options.codec_choice import check_codecs, codec_rules
    from gradlane.training.options.codec_options import RAW
    from gradlane.training.options.local_updates import parse_local
    from gradlane.training.options.stragglers import WAIT

    require_writable(json_path, html_path, trace)
    faults = parse_faults(
        mtbf,
        restart_time=restart_time,
        replacement_time=replacement_time,
        detection_time=detection_time,
        checkpoint_interval=checkpoint_interval,
        checkpoint_time=checkpoint_time,
    )
    prices = parse_prices(samples, price, budget)
    numbers = lists.parse_workers(workers)
    node_sizes = lists.parse_node_sizes(ranks_per_node)
    # What gradlane does by itself where nodes have several workers.
    baseline = "wfbp" if straggler is not None else "ddp"
    if sharded and max(node_sizes) == 1:
        raise ValueError(
            "--sharded needs nodes of several ranks: add --ranks-per-node 8, for example"
        )
    adds_up = max(node_sizes) > 1 and not sharded
    by_default = f"{baseline},p3" + (",hierarchical" if adds_up else "")
    prefer_huge_pages(max(numbers))
    rules = lists.parse_rules(stragglers)
    late = straggler is not None or rules != [WAIT]
    codecs = list(dict.fromkeys(codec or [RAW]))
    for text in codecs:
        check_codecs(codec_rules(text))
    with remedied("`gradlane additions` writes one"):
        added = () if additions is None else lists.read_additions(additions)
    threads = host_with(USUAL_PROCESSORS) if host is None else parse_host(host)
    if measured_single is not None and batch_time_s is not None:
        raise ValueError("--measured-single and --batch-time-s say the same: leave one out")
    if measured_single is not None and measured_step is None:
        raise ValueError("--measured-single has no effect without --measured-step: add it")
    batch_time_s = batch_time_s or (measured_single and str(parse_duration_s(measured_single)))
    read = accumulated_profile(profile, batch_time_s)
    command.run_whatif(
        read,
        workers=numbers,
        rates_bps=lists.parse_rates(rate),
        strategies=lists.parse_names(strategy or by_default, STRATEGIES, "strategy"),
        compressions=lists.parse_compressions(compression),
        topologies=lists.parse_names(topology, ("flat", "hierarchical"), "topology"),
        base=Cluster(
            workers=1,
            rate_bps=0.0,
            servers=parse_servers(servers).servers,
            serving=parse_servers(servers).serving,
            latency_s=latency_s,
            slice_elems=slice_elems,
            steps=LATE_STEPS if late else Cluster.steps,
            compute_jitter=LATE_JITTER if late else 0.0,
            straggler=None if straggler is None else parse_straggler(straggler),
            clip=clip,
            sharded=sharded,
            free_host=free_host,
            costs=costs_of(costs) or MachineCosts(),
            workers_per_node=workers_per_node,
            local_rate_bps=_local_rate_bps(local_rate, max(node_sizes), read.device),
            paths=parse_paths(port or (), link or (), racks),
            lanes=threads.lanes,
            work_threads=threads.work_threads,
            additions=added,
        ),
        console=wide_console(),
        codecs=codecs,
        updates=[None, *map(parse_local, dict.fromkeys(update or ()))],
        fewer=lists.parse_names(fewer, KINDS, "fewer") if fewer else (),
        ranks_per_node=node_sizes,
        rules=rules,
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
    from gradlane.cli.profile import run_profile
    from gradlane.report.console import wide_console

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


def plan(
    profile: Annotated[
        str,
        typer.Argument(help="A profile file, or resnet50, vgg19, gpt2_small, ... by name."),
    ],
    workers: Annotated[int, typer.Option(help="Ranks.")],
    rate: Annotated[str, typer.Option(help="Rate of every port, such as 10gbit.")],
    servers: Annotated[str | None, typer.Option(help=SERVERS_HELP)] = None,
    ranks_per_node: Annotated[
        int, typer.Option(help="Ranks on each node, which share its port.")
    ] = 1,
    latency_s: Annotated[float, typer.Option(help="One-way time between two ports.")] = 0.0,
    update: Annotated[str, typer.Option(help="Where the optimizer runs: worker, server.")] = (
        "worker"
    ),
    batch_time_s: Annotated[
        float | None, typer.Option(help="Compute time of a batch, in place of the profile's.")
    ] = None,
    clip: Annotated[
        bool,
        typer.Option("--clip", help="Gradients are clipped by the norm of all of them."),
    ] = False,
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
    from gradlane.formats.rates import parse_rate
    from gradlane.planning.advice.ways import KINDS
    from gradlane.planning.simulation import lists
    from gradlane.report.console import wide_console
    from gradlane.training.plans.settings import ClusterFacts

    require_writable(json_path)
    run_plan(
        profile_of(profile, batch_time_s),
        ClusterFacts(
            workers,
            parse_rate(rate),
            latency_s,
            update,
            servers=parse_servers(servers).servers,
            ranks_per_node=ranks_per_node,
            serving=parse_servers(servers).serving,
            clips=clip,
        ),
        budget_s=budget_s,
        console=wide_console(),
        rule=rule,
        costs=costs_of(costs),
        codec=codec,
        any_rounding=any_rounding,
        fewer=lists.parse_names(fewer, KINDS, "fewer") if fewer else (),
        path=json_path,
    )


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
    from gradlane.cli.probe import run_probe
    from gradlane.report.console import wide_console

    require_writable(json_path)
    run_probe(
        window_s=window_s,
        interface=interface,
        advertise=advertise,
        connect_timeout_s=connect_timeout_s,
        console=wide_console(),
        json_path=json_path,
    )


def doctor(
    window_s: Annotated[float, typer.Option(help="Seconds that each stream is measured.")] = 1.0,
    interface: Annotated[str | None, session_option(Network, "interface")] = None,
    advertise: Annotated[str | None, session_option(Network, "advertise")] = None,
    ports: Annotated[str | None, session_option(Network, "ports")] = None,
    connect_timeout_s: Annotated[float, typer.Option(help="How long to wait for ranks.")] = 60.0,
    json_path: JsonPath = None,
) -> None:
    """Say what would keep a training from starting or from being fast, and what to do.

    On one machine as it is; on all, as a training is started: `torchrun ... -m gradlane doctor`.
    The exit status is 1 where there is a fault.
    """
    from gradlane.cli.doctor import run_doctor
    from gradlane.report.console import wide_console
    from gradlane.training.options.option_fields import read_ports

    require_writable(json_path)
    network = given_options(
        Network,
        interface=interface,
        advertise=advertise,
        ports=None if ports is None else read_ports(ports),
        connect_timeout_s=connect_timeout_s,
    )
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
