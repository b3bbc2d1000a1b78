"""The command `gradlane whatif`: a table, the answer in words, and files with both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from gradlane.cli.late_progress import LateProgress
from gradlane.cli.options import write_json
from gradlane.formats.rates import format_rate
from gradlane.formats.timeline.chrome import write_chrome
from gradlane.planning.advice.advice import (
    ClusterAdvice,
    RequiredLink,
    advise,
    baselines,
    missing_goal,
    required_links,
    text_of_required_links,
    without_link,
)
from gradlane.planning.advice.causes import (
    find_cause,
    find_place,
    first_variants,
    limit_beyond_link,
    unlimited_link,
    with_free_host,
)
from gradlane.planning.advice.faults import COLUMNS, cells_of, faults_json
from gradlane.planning.advice.measured import MeasuredStep, explain_step
from gradlane.planning.advice.money import (
    TRAINING_COLUMNS,
    Prices,
    Trainings,
    training_cells,
    trainings_of,
)
from gradlane.planning.advice.pictures import Picture, clusters_with_pictures, picture_of
from gradlane.planning.advice.variants import Variant, Variants
from gradlane.planning.advice.verdict import offer_name
from gradlane.planning.advice.ways import find_ways
from gradlane.planning.simulation.costs import MachineCosts
from gradlane.planning.simulation.faults import FaultSettings, fault_cost
from gradlane.planning.simulation.grid import WORKER, SimulatedRow, clusters_of, evaluate
from gradlane.planning.simulation.hosts import Host
from gradlane.planning.simulation.ignored_options import check_effects
from gradlane.planning.simulation.lists import Grid
from gradlane.planning.simulation.profiles import Profile
from gradlane.planning.simulation.scenarios import (
    FORMULAS,
    Cluster,
    has_many_ranks,
    run_scenario,
    scenario_of,
)
from gradlane.planning.simulation.threads import in_threads, usual_threads
from gradlane.planning.simulation.timeline import simulated_timeline
from gradlane.report.console import print_written
from gradlane.training.monitoring.summary import WORTH_A_MOVE
from gradlane.training.options.codec_options import RAW
from gradlane.training.options.stragglers import LEAVES_OUT, WAIT

DROP = "drop"
"""The rule for stragglers that is simulated beside waiting."""


def run_whatif(
    profile: Profile,
    grid: Grid,
    base: Cluster,
    *,
    console: Console,
    fewer: Sequence[str] = (),
    faults: FaultSettings | None = None,
    prices: Prices | None = None,
    host: Host | None = None,
    is_host_given: bool = True,
    measured_step_s: float | None = None,
    trace_path: Path | None = None,
    html_path: Path | None = None,
    json_path: Path | None = None,
) -> None:
    """Simulate all combinations, write the files, and print a table and the answer.

    Args:
        profile: what a step computes.
        grid: the clusters.
        base: everything else about them.
        console: where to print.
        fewer: of `ways.KINDS`: what may change what is learned where exact training is not enough.
        faults: how often machines are lost; None: what faults cost is not computed.
        prices: of machines, and a training's length; None: what trainings cost is not computed.
        host: threads of a rank, of which `base` has the numbers; None: they are not said.
        is_host_given: whether the user gave them.
        measured_step_s: a step as measured, which a link may explain or not.
        trace_path: where the timeline of the only combination goes, for Perfetto or Chrome.
        html_path: where an interactive page goes.
        json_path: where `profile` (its figures), `rows`, `answers` and `needs` go, and `faults`
            and `trainings` where there are any.

    Raises:
        ValueError: a combination makes no sense, or several are to have one timeline.
    """
    if faults is not None and base.serving:
        raise ValueError(
            "--mtbf knows nothing of servers that only serve: give --servers 3, for example, or "
            "leave --mtbf out"
        )
    check_effects(grid, base)
    clusters = clusters_of(
        grid, base, lambda why: console.print(f"left out: {why}", highlight=False)
    )
    if html_path is not None and any(_has_late(cluster) for cluster in clusters):
        raise ValueError(
            "the page of --html compares networks where nobody is late: leave it out, or "
            "--stragglers and --straggler"
        )
    if trace_path is not None:
        _write_trace(trace_path, profile, clusters)
    traced = clusters_with_pictures(clusters) if html_path is not None else ()
    pictures: list[Picture] = []
    keep = partial(_keep_picture, pictures, profile, clusters)
    threads = usual_threads()
    with LateProgress(console, "simulating") as progress:
        variants = Variants(profile, threads, progress.advance)
        ahead = variants_ahead(clusters)
        progress.expect(len(clusters) + len(ahead))
        simulate_rows = partial(
            evaluate,
            profile,
            clusters,
            lambda _: progress.advance(),
            traced=traced,
            on_trace=keep,
            threads=threads,
        )
        calls = [simulate_rows, partial(variants.simulate, ahead)]
        rows, *_ = in_threads(lambda call: call(), calls if ahead else calls[:1], len(calls))
        # What is said about networks holds where nobody is late.
        cluster_of = {id(row): cluster for row, cluster in zip(rows, clusters, strict=True)}
        punctual = [row for row in rows if row.left_out_share is None]
        wanted = [
            *(unlimited_link(cluster_of[id(row)]) for row in without_link(punctual)),
            *(
                variant
                for row in missing_goal(punctual)
                for variant in first_variants(cluster_of[id(row)])
            ),
        ]
        progress.expect(0 if ahead else len(wanted))
        variants.simulate(wanted)
        needs = required_links(
            punctual, lambda row: limit_beyond_link(variants, cluster_of[id(row)])
        )
        answers = advise(
            punctual,
            needs,
            lambda row, link_is_enough: find_cause(
                variants, cluster_of[id(row)], row, link_is_enough=link_is_enough
            ),
            lambda row: find_place(variants, cluster_of[id(row)], row),
            lambda row: variants.saved_s(row, Variant(with_free_host(cluster_of[id(row)]))),
        )
        ways = (
            find_ways(
                clusters, rows, fewer, lambda cluster: variants.simulate([Variant(cluster)])[0]
            )
            if fewer
            else []
        )
        hints = _drop_hints(variants, [cluster_of[id(row)] for row in rows])
        measured = _explain_measured(variants, measured_step_s, punctual, cluster_of)
    notes = _assumptions(profile, clusters, host, is_host_given)
    content: dict[str, Any] = {
        "profile": {
            "model": profile.model,
            "batch_size": profile.batch_size,
            "compute_s": profile.compute_s,
            "forward_s": profile.forward_s,
            "gradient_bytes": profile.size_bytes,
            "tensors": len(profile.tensors),
        },
        "rows": [row.to_json() for row in rows],
        "answers": [answer.to_json() for answer in answers],
        "needs": [need.to_json() for need in needs],
        "assumptions": notes,
    }
    if fewer:
        content["ways"] = [one.to_json() for one in ways]
    if measured:
        content["measured"] = [one.to_json() for one in measured]
    if faults is not None:
        content["faults"] = faults_json(
            faults, [fault_cost(faults, row, profile.size_bytes) for row in rows]
        )
    trainings = None if prices is None else trainings_of(rows, prices)
    if trainings is not None:
        content["trainings"] = trainings.to_json()
    if html_path is not None:
        from gradlane.planning.advice.page import report_from_whatif

        report_from_whatif({**content, **_pictures_json(profile, pictures)}, html_path)
    write_json(json_path, content)
    _print(console, profile, rows, answers, needs)
    for one in ways:
        console.print(one.text, highlight=False)
    for sentence in (*hints, *(one.text for one in measured), *notes):
        console.print(sentence, highlight=False)
    if trainings is not None:
        _print_trainings(console, profile.batch_size, rows, trainings)
    if faults is not None:
        _print_faults(console, content["faults"])
    print_written(console, html_path, json_path)


def variants_ahead(clusters: Sequence[Cluster]) -> list[Variant]:
    """Return variants to simulate beside the only cluster whose many ranks take long, before it is
    known whether they are needed: its own steps keep one processor for long."""
    long = [one for one in clusters if has_many_ranks(one) and one.strategy not in FORMULAS]
    if len(long) != 1:
        return []
    return [unlimited_link(long[0]), *first_variants(long[0])]


def _drop_hints(variants: Variants, clusters: Sequence[Cluster]) -> list[str]:
    """Return what leaving a stopped rank out would give, where steps wait for it."""
    waiting = [
        cluster
        for cluster in clusters
        if cluster.straggler is not None
        and cluster.stragglers == WAIT
        and cluster.strategy in LEAVES_OUT
        and replace(cluster, stragglers=DROP) not in clusters
    ]
    hints = []
    for cluster in waiting:
        waits, drops = variants.simulate(
            [Variant(cluster), Variant(replace(cluster, stragglers=DROP))]
        )
        if waits.step_s < WORTH_A_MOVE * drops.step_s:
            continue
        shares = drops.left_out_share or []
        hints.append(
            f'With stragglers="{DROP}" {cluster.strategy} would take the other ranks '
            f"{drops.step_s * 1e3:.0f} ms a step in place of {waits.step_s * 1e3:.0f}; late ranks "
            f"are left out of {sum(shares):.0%} of the steps, which changes what is learned."
        )
    return hints


def _explain_measured(
    variants: Variants,
    measured_step_s: float | None,
    rows: Sequence[SimulatedRow],
    cluster_of: Mapping[int, Cluster],
) -> list[MeasuredStep]:
    """Return what a measured step says about the link, for each cluster."""
    if measured_step_s is None:
        return []
    found = []
    for row in baselines(rows):
        cluster = cluster_of[id(row)]

        def step_at(rate_bps: float, cluster: Cluster = cluster) -> float:
            (other,) = variants.simulate([Variant(replace(cluster, rate_bps=rate_bps))])
            return other.step_s

        found.append(
            explain_step(
                measured_step_s,
                single_s=row.compute_s,
                rate_bps=row.rate_bps,
                strategy=offer_name(row),
                step_at=step_at,
            )
        )
    return found


def _assumptions(
    profile: Profile, clusters: Sequence[Cluster], host: Host | None, is_host_given: bool
) -> list[str]:
    """Return what the figures stand on that the user may not have thought of."""
    notes = []
    first = clusters[0]
    if host is not None and not first.free_host:
        source = "the machine of --costs"
        if first.costs == MachineCosts():
            source = "the machine on which the simulator's constants were measured (--costs)"
        assumed = "Host" if is_host_given else "Assumed (--host says another)"
        notes.append(f"{assumed}: {host}, each as fast as on {source}.")
    if any(cluster.ranks_per_node > 1 for cluster in clusters) and not first.sharded:
        rate = first.local_rate_bps
        where = "in shared memory, by processors" if rate is None else f"at {format_rate(rate)}"
        notes.append(f"Sums on a node {where} (--local-rate).")
    if first.sharded:
        notes.append(
            "Sharded: a rank's compute holds what its node's collectives take, each rank waits for "
            "all means at the end of backward, and ddp is torch's HSDP."
        )
    if first.paths:
        notes.append(f"Not alike: {first.paths}.")
    if profile.device == "cpu":
        notes.append(
            "The profile was recorded on a CPU: with an accelerator steps compute a fraction of "
            "the time and the network counts for more; --batch-time-s says its batch time."
        )
    return notes


def _has_late(cluster: Cluster) -> bool:
    return cluster.straggler is not None or cluster.stragglers != WAIT


def _keep_picture(
    pictures: list[Picture],
    profile: Profile,
    clusters: Sequence[Cluster],
    number: int,
    trace: dict[str, Any],
) -> None:
    picture = picture_of(profile, clusters[number], number, trace)
    if picture is not None:
        pictures.append(picture)


def _pictures_json(profile: Profile, pictures: Sequence[Picture]) -> dict[str, Any]:
    return {
        "tensors": [tensor.name for tensor in profile.tensors],
        "pictures": [picture.to_json() for picture in pictures],
    }


def _write_trace(path: Path, profile: Profile, clusters: Sequence[Cluster]) -> None:
    if len(clusters) > 1:
        raise ValueError(
            f"a timeline shows one cluster and these are {len(clusters)}: give one value each to "
            "--workers, --rate, --strategy and --compression, such as --workers 4 --rate 4gbit "
            "--strategy p3"
        )
    (cluster,) = clusters
    if cluster.strategy in FORMULAS:
        raise ValueError(
            f"{cluster.strategy} is a formula and has no timeline: simulate p3, for example"
        )
    answer = run_scenario(scenario_of(profile, cluster, trace=True))
    facts = {
        "model": profile.model,
        "strategy": cluster.strategy,
        "codec": cluster.codec,
        "workers": cluster.workers,
        "compression": cluster.compression,
        "ranks_per_node": cluster.ranks_per_node,
        "step_s": answer["report"]["step_s"],
    }
    timeline = simulated_timeline(
        answer["trace"],
        rate_bps=cluster.rate_bps,
        compression=cluster.compression,
        facts=facts,
    )
    write_chrome(timeline, path)


def _print(
    console: Console,
    profile: Profile,
    rows: list[SimulatedRow],
    answers: list[ClusterAdvice],
    needs: Sequence[RequiredLink],
) -> None:
    console.print(
        f"{profile.model}: {profile.size_bytes / 1e6:.1f} MB of gradients in "
        f"{len(profile.tensors)} tensors, {profile.compute_s * 1e3:.1f} ms of compute for "
        f"{profile.batch_size} samples"
        + (", gradients clipped by the norm of all of them" if any(it.clip for it in rows) else ""),
        highlight=False,
    )
    for codec in dict.fromkeys(row.codec for row in rows):
        console.print(_table(codec, [row for row in rows if row.codec == codec]))
    for row in rows:
        if row.staleness_mean is not None:
            console.print(
                f"{row.workers} workers at {format_rate(row.rate_bps)}, {row.strategy}: gradients "
                f"are applied {row.staleness_mean:.1f} updates late, {row.staleness_max} at most.",
                highlight=False,
            )
    for row in rows:
        if row.left_out_share is not None:
            console.print(_text_of_late(row), highlight=False)
    for answer in answers:
        console.print(answer.text, highlight=False)
    for sentence in text_of_required_links(needs):
        console.print(sentence, highlight=False)


def _print_faults(console: Console, faults: Mapping[str, Any]) -> None:
    table = Table(title=faults["assumptions"], title_justify="left", title_style="")
    for name in COLUMNS:
        is_text = name == "strategy"
        table.add_column(name, justify="left" if is_text else "right", no_wrap=is_text)
    for cost in faults["rows"]:
        table.add_row(*("-" if cell is None else str(cell) for cell in cells_of(cost)))
    console.print(table)
    for sentence in faults["verdicts"]:
        console.print(sentence, highlight=False)


def _print_trainings(
    console: Console, batch_size: int, rows: Sequence[SimulatedRow], trainings: Trainings
) -> None:
    table = Table(
        title=f"{trainings.prices.samples:,.0f} samples, each worker with its batch of "
        f"{batch_size}: what no other cluster beats",
        title_justify="left",
        title_style="",
    )
    for name in TRAINING_COLUMNS:
        is_text = name in TRAINING_COLUMNS[-2:]
        table.add_column(name, justify="left" if is_text else "right", no_wrap=name == "strategy")
    for training in trainings.unbeaten:
        table.add_row(*training_cells(training, rows[training.row]))
    console.print(table)
    console.print(trainings.text, highlight=False)


def _table(codec: str, rows: Sequence[SimulatedRow]) -> Table:
    """Return a line for each row; all of one codec, since encoded steps are other steps."""
    table = Table(title="" if codec == RAW else f"gradients in {codec}", title_justify="left")
    several = any(row.ranks_per_node > 1 for row in rows)
    names = (
        "nodes x ranks" if several else "workers",
        *(("MB a port",) if several else ()),
        "rate",
        "strategy",
        "compression",
        "step ms",
        "bound ms",
        "scaling",
        "samples/s",
    )
    for name in names:
        is_text = name == "strategy"
        table.add_column(name, justify="left" if is_text else "right", no_wrap=is_text)
    for row in rows:
        strategy = row.strategy if row.topology == "flat" else f"{row.strategy} {row.topology}"
        if row.update != WORKER:
            strategy += f" {row.update}"
        if row.stragglers != WAIT:
            strategy += f"/{row.stragglers}"
        table.add_row(
            *(_node_cells(row) if several else (str(row.workers),)),
            format_rate(row.rate_bps),
            strategy,
            f"{row.compression:g}",
            f"{row.step_s * 1e3:.1f}",
            f"{row.bound_step_s * 1e3:.1f}",
            f"{row.scaling_factor * 100:.1f} %",
            f"{row.samples_per_s:.0f}",
        )
    return table


def _node_cells(row: SimulatedRow) -> tuple[str, str]:
    bytes_, each = row.tx_bytes_per_step, row.ranks_per_node
    return f"{row.workers // each} x {each}", "" if bytes_ is None else f"{bytes_ / 1e6:.1f}"


def _text_of_late(row: SimulatedRow) -> str:
    assert row.left_out_share is not None and row.passed_share is not None
    stopped = "nobody is stopped"
    if row.straggler is not None:
        share, burst_s = row.straggler["share"], row.straggler["burst_s"]
        stopped = (
            f"rank {row.straggler['rank']} is stopped {share:.0%} of the time, {burst_s:g} s each"
        )
    out = [
        f"rank {rank} left out of {share:.0%} of the steps"
        + (f" ({row.passed_share[rank]:.0%} passed)" if row.passed_share[rank] else "")
        for rank, share in enumerate(row.left_out_share)
        if share
    ]
    return (
        f"{row.workers} workers at {format_rate(row.rate_bps)}, {row.strategy}/{row.stragglers}: "
        f"{stopped}, the others' mean step is {row.step_s * 1e3:.1f} ms; "
        f"{', '.join(out) or 'nobody is left out'}."
    )
