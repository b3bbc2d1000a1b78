"""Evaluation of a profile over workers, rates, strategies and compression: one row for each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from gradlane.planning.simulation.bound import bound_step_s, port_bytes
from gradlane.planning.simulation.codec_costs import codecs_in, wire_bytes
from gradlane.planning.simulation.ddp import ddp_step_s
from gradlane.planning.simulation.lists import Grid
from gradlane.planning.simulation.local_updates import (
    fragment_profiles,
    local_step_s,
    outer_state_bytes,
)
from gradlane.planning.simulation.paths import Paths
from gradlane.planning.simulation.profiles import Profile, timings_in
from gradlane.planning.simulation.scenarios import (
    DDP,
    FORMULAS,
    IN_NETWORK,
    MANY_RANKS_STEPS,
    RING_FUSED,
    Cluster,
    check_rounds,
    columns_of,
    has_many_ranks,
    local_sums,
    narrow_tensors,
    needed_together,
    nodes_refusal,
    ring_node_size,
    run_scenario,
    scenario_of,
    tensor_schemes,
)
from gradlane.planning.simulation.threads import in_threads
from gradlane.training.options.codec_choice import CodecChoice, codec_rules
from gradlane.training.options.codec_options import RAW
from gradlane.training.options.stragglers import LEAVES_OUT, WAIT
from gradlane.training.options.strategy import (
    ADAM,
    FACTOR_SCHEMES,
    RING,
    SFB,
    SPLITTING_STRATEGIES,
    ring_ranks,
)

WORKER = "worker"
"""Each gradient is averaged, and the ranks' optimizers step alike."""
TensorSchemes = Mapping[str, Mapping[str, Any]]
"""Schemes of tensors, as scenarios have them."""
GOODPUT_SHARE = 1448 / 1514
"""Payload of a full TCP segment over its bytes on an Ethernet, for bounds."""


@dataclass(frozen=True)
class SimulatedRow:
    """The result of one simulated cluster."""

    model: str
    strategy: str
    codec: str
    topology: str
    workers: int
    servers: int | None
    """Number of workers that are servers; None: all, or there are none."""
    serving: int
    """Number of dedicated servers."""
    rate_bps: float
    compression: float
    """Bytes of gradients over bytes that travel for them, those of the codec included. Layers that
    travel as factors count whole, unless a codec rounds factors, too."""
    scaling_factor: float
    """Compute time over step time, 0 to 1."""
    step_s: float
    first_step_s: float
    """The first simulated step, which variants of large clusters are compared by."""
    compute_s: float
    bound_step_s: float
    """Lower bound for exact strategies of the same scheme."""
    bound_scaling_factor: float
    samples_per_s: float
    """Of the whole cluster, as far as their gradients counted."""
    tx_utilization: float
    """Share of the time in which a port sends."""
    io_utilization: float
    """Share of the time in which a rank's I/O thread works."""
    staleness_mean: float | None = None
    """Updates between what a gradient was computed from and what it was applied to, where each is
    applied alone; None: all ranks' are applied together."""
    staleness_max: int | None = None
    """The largest staleness."""
    ranks_per_node: int = 1
    """Workers on each node, which share its port."""
    tx_bytes_per_step: float | None = None
    """Through the port of a node, mean over nodes, headers of frames included; None: a formula."""
    stragglers: str = WAIT
    """Rule for late ranks."""
    straggler: dict[str, Any] | None = None
    """`rank`, `share` and `burst_s` of the rank that is stopped now and then; then, and with a rule
    for stragglers, `step_s` is the mean step of the others, without the first steps."""
    left_out_share: list[float] | None = None
    """By rank, the share of steps without it."""
    passed_share: list[float] | None = None
    """By rank, the share of steps that it passed."""
    clip: bool = False
    """Whether gradients are clipped by the norm of all of them."""
    update: str = WORKER
    """`worker`, or local updates: step, bytes and bound are means over a round then."""
    outer_bytes: int | None = None
    """Memory that local updates take on a rank beside exact training's."""
    sharded: bool = False
    """Whether the model is sharded within each node."""

    def to_json(self) -> dict[str, Any]:
        """Return the row with the units in its keys."""
        return asdict(self)


def clusters_of(
    grid: Grid, base: Cluster, on_left_out: Callable[[str], None] = lambda reason: None
) -> list[Cluster]:
    """Return every valid combination.

    Only `ring-fused` has a topology other than flat, and only strategies of `LEAVES_OUT` have
    straggler rules other than to wait. Numbers of workers that do not fill two nodes, and sums on
    nodes of one rank, are skipped.

    Args:
        grid: the values.
        base: everything else about the clusters.
        on_left_out: called once with each reason for which some are skipped.

    Raises:
        ValueError: no combination is left; the text has the first reason.
    """
    found = [
        replace(
            base,
            workers=count,
            rate_bps=rate_bps,
            strategy=strategy,
            compression=compression,
            topology=topology,
            codec=codec,
            ranks_per_node=node_size,
            stragglers=rule,
            update=update,
        )
        for count in grid.workers
        for node_size in grid.ranks_per_node
        for rate_bps in grid.rates_bps
        for compression in grid.compressions
        for strategy in grid.strategies
        for codec in (grid.codecs if strategy != DDP else (RAW,))
        for update in (grid.updates if strategy not in FORMULAS else (None,))
        for topology in (grid.topologies if strategy == RING_FUSED else ("flat",))
        for rule in (grid.rules if strategy in LEAVES_OUT else (WAIT,))
    ]
    found = [
        replace(one, steps=min(one.steps, MANY_RANKS_STEPS)) if has_many_ranks(one) else one
        for one in found
    ]
    valid = [one for one in found if not nodes_refusal(one)]
    reasons = dict.fromkeys(filter(None, map(nodes_refusal, found)))
    if not valid:
        raise ValueError(
            f"{next(iter(reasons))}: give --ranks-per-node 2, for example, and workers for two "
            "nodes or more"
        )
    for reason in reasons:
        on_left_out(reason)
    return valid


def evaluate(
    profile: Profile,
    clusters: Sequence[Cluster],
    on_row: Callable[[SimulatedRow], None] = lambda row: None,
    *,
    traced: Collection[int] = (),
    on_trace: Callable[[int, dict[str, Any]], None] = lambda number, trace: None,
    threads: int = 1,
) -> list[SimulatedRow]:
    """Simulate all clusters.

    Args:
        profile: of a step.
        clusters: to simulate.
        on_row: called with each row, in their order.
        traced: numbers of clusters whose first rank is traced.
        on_trace: called with the number and the trace of each of these.
        threads: simulations at a time; the rows are the same with any number.

    Raises:
        ValueError: a cluster makes no sense.
    """

    def result_of(number: int) -> tuple[SimulatedRow, dict[str, Any] | None]:
        return simulate(profile, clusters[number], is_traced=number in traced)

    rows = []
    for number, (row, trace) in enumerate(in_threads(result_of, range(len(clusters)), threads)):
        if trace is not None:
            on_trace(number, trace)
        rows.append(row)
        on_row(row)
    return rows


def simulate(
    profile: Profile, cluster: Cluster, *, is_traced: bool = False
) -> tuple[SimulatedRow, dict[str, Any] | None]:
    """Simulate a cluster; return its row, and the trace of its first rank where asked for.

    Raises:
        ValueError: the cluster makes no sense.
    """
    check_rounds(replace(cluster, sharded=False) if cluster.strategy == DDP else cluster)
    return _simulated(profile, cluster, is_traced)


def _simulated(
    profile: Profile, cluster: Cluster, is_traced: bool = False
) -> tuple[SimulatedRow, dict[str, Any] | None]:
    """Simulate a cluster that was checked, or a part of one."""
    if cluster.update is not None:
        return _local_row(profile, cluster), None
    if cluster.sharded:
        return _sharded_row(profile, cluster), None
    if cluster.strategy == DDP:
        return _row(profile, cluster, _ddp_report(profile, cluster)), None
    result = run_scenario(scenario_of(profile, cluster, trace=is_traced, trace_ranks=1))
    return _row(profile, cluster, result["report"]), result.get("trace")


def _local_row(profile: Profile, cluster: Cluster) -> SimulatedRow:
    """Simulate the exchanges of a round, each by itself, and put the mean step together."""
    assert cluster.update is not None
    local, exact = cluster.update, replace(cluster, update=None)
    parts = [_simulated(part, exact)[0] for part in fragment_profiles(profile, local)]
    # Every exchange waits for the slowest rank.
    compute_s = profile.compute_s * (1.0 + cluster.compute_spread)
    step_s = local_step_s(compute_s, [part.step_s for part in parts], local)
    bound_s = cluster_bound_s(profile, cluster)
    sent = [part.tx_bytes_per_step or 0.0 for part in parts]
    tx_bytes = sum(sent) / local.steps
    encoded = _compression(profile, exact)
    # Of a sharded model each node holds one copy.
    copies = cluster.workers // (shards := cluster.ranks_per_node if cluster.sharded else 1)
    outer_bytes = outer_state_bytes(profile, local, _choices(profile, exact), copies)
    return replace(
        parts[0],
        compression=round(encoded * local.steps, 2),
        scaling_factor=profile.compute_s / step_s,
        step_s=step_s,
        first_step_s=step_s,
        compute_s=profile.compute_s,
        bound_step_s=bound_s,
        bound_scaling_factor=profile.compute_s / bound_s,
        samples_per_s=cluster.workers * profile.batch_size / step_s,
        tx_utilization=8 * tx_bytes / cluster.rate_bps / step_s,
        io_utilization=sum(part.io_utilization * part.step_s for part in parts)
        / local.steps
        / step_s,
        tx_bytes_per_step=tx_bytes,
        update=local.text,
        outer_bytes=outer_bytes // shards,
    )


def _sharded_row(profile: Profile, cluster: Cluster) -> SimulatedRow:
    """Simulate the nodes of a sharded model, each behind its port; DDP is torch's HSDP then."""
    row = _simulated(needed_together(profile), columns_of(cluster))[0]
    return replace(
        row,
        workers=cluster.workers,
        ranks_per_node=cluster.ranks_per_node,
        samples_per_s=cluster.workers * profile.batch_size / row.step_s,
        clip=cluster.clip,
        sharded=True,
    )


def _ddp_report(profile: Profile, cluster: Cluster) -> dict[str, Any]:
    """Return the figures of DDP on a cluster, as a simulation reports its own.

    Raises:
        ValueError: the cluster has what the formula does not know.
    """
    unknown = {
        f"codec {cluster.codec}": codec_rules(cluster.codec) != RAW,
        "a rank that is stopped": cluster.straggler is not None,
        "local sums": cluster.local != "off",
    }
    for what, is_there in unknown.items():
        if is_there:
            raise ValueError(f"{DDP} is a formula that knows nothing of {what}: simulate p3")
    share = cluster.costs.network.get("goodput_share", GOODPUT_SHARE)
    # Every step waits for the slowest rank.
    slowest = profile.scaled(1.0 + cluster.compute_spread)
    cluster.paths.check(cluster.machines)
    rate_bps = cluster.paths.ring_bps(cluster.machines, cluster.rate_bps)
    step_s = ddp_step_s(
        slowest,
        workers=cluster.workers,
        goodput_bps=rate_bps * share * (1.0 - cluster.background_share),
        latency_s=cluster.latency_s,
        compression=cluster.compression,
        free_host=cluster.free_host,
    )
    sent_bytes = port_bytes(profile.size_bytes, workers=cluster.workers, scheme=RING)
    return {
        "step_s": step_s,
        "tx_utilization": 8 * sent_bytes / cluster.compression / cluster.rate_bps / step_s,
        "tx_bytes_per_step_mean": sent_bytes,
    }


def _row(profile: Profile, cluster: Cluster, report: dict[str, Any]) -> SimulatedRow:
    bound_s = cluster_bound_s(profile, cluster)
    late = report.get("stragglers")
    step_s = float(report["step_s"] if late is None else late["others_step_s_mean"])
    if has_many_ranks(cluster) and "steps_s" in report:
        step_s = float(report["steps_s"][-1])
    staleness = report.get("staleness", {})
    left_out_share = _shares(late, "left_out_steps", cluster.steps)
    contributing = cluster.workers - sum(left_out_share or ())
    return SimulatedRow(
        model=profile.model,
        strategy=cluster.strategy,
        codec=cluster.codec,
        topology=cluster.topology,
        workers=cluster.workers,
        servers=cluster.servers,
        serving=cluster.serving,
        ranks_per_node=cluster.ranks_per_node,
        rate_bps=cluster.rate_bps,
        compression=_compression(profile, cluster),
        scaling_factor=profile.compute_s / step_s,
        step_s=step_s,
        first_step_s=float(report["steps_s"][0] if "steps_s" in report else step_s),
        compute_s=profile.compute_s,
        bound_step_s=bound_s,
        bound_scaling_factor=profile.compute_s / bound_s,
        samples_per_s=contributing * profile.batch_size / step_s,
        tx_utilization=float(report.get("tx_utilization", 0.0)),
        io_utilization=float(report.get("io_utilization", 0.0)),
        # Where bytes are compressed the simulator has the same over a faster link.
        tx_bytes_per_step=report["tx_bytes_per_step_mean"] / cluster.compression
        if "tx_bytes_per_step_mean" in report
        else None,
        staleness_mean=staleness.get("mean"),
        staleness_max=staleness.get("max"),
        stragglers=cluster.stragglers,
        straggler=None if cluster.straggler is None else cluster.straggler.to_json(),
        left_out_share=left_out_share,
        passed_share=_shares(late, "passed_steps", cluster.steps),
        clip=cluster.clip,
    )


def _shares(late: Mapping[str, Any] | None, name: str, steps: int) -> list[float] | None:
    return None if late is None else [count / steps for count in late[name]]


def _compression(profile: Profile, cluster: Cluster) -> float:
    if codec_rules(cluster.codec) == RAW or not profile.size_bytes:
        return cluster.compression
    schemes = tensor_schemes(profile, cluster)
    narrow = narrow_tensors(profile, cluster)
    encoded = wire_bytes(profile, _choices(profile, cluster))
    encoded_bytes = sum(
        tensor.size_bytes
        if schemes.get(tensor.name, {}).get("scheme") in FACTOR_SCHEMES
        and tensor.name not in narrow
        else bytes_
        for tensor, bytes_ in zip(profile.tensors, encoded, strict=True)
    )
    return round(profile.size_bytes / encoded_bytes * cluster.compression, 2)


def _choices(profile: Profile, cluster: Cluster) -> list[CodecChoice]:
    ranks = ring_ranks(cluster.strategy, cluster.workers)
    return codecs_in(profile, codec_rules(cluster.codec), ranks)


def cluster_bound_s(profile: Profile, cluster: Cluster) -> float:
    """Return the step time that no order of sending can beat on a cluster."""
    if cluster.update is not None:
        exact = replace(cluster, update=None)
        parts = fragment_profiles(profile, cluster.update)
        bounds_s = [cluster_bound_s(part, exact) for part in parts]
        return local_step_s(profile.compute_s, bounds_s, cluster.update)
    if cluster.sharded:
        return cluster_bound_s(needed_together(profile), columns_of(cluster))
    if cluster.strategy == RING_FUSED:
        return _ring_bound_s(profile, cluster)
    return _server_bound_s(profile, cluster)


def _server_bound_s(profile: Profile, cluster: Cluster) -> float:
    """Return the bound for servers, or for slices on a ring."""
    choices = _choices(profile, cluster)
    schemes = tensor_schemes(profile, cluster)
    default_scheme = RING if cluster.strategy in (RING, DDP) else "ps"
    if local_sums(cluster) != "off":
        default_scheme = "hierarchical"
    travelling, kinds = traffic(profile, wire_bytes(profile, choices), schemes, default_scheme)
    return bound_step_s(
        timings_in(profile),
        workers=cluster.workers,
        goodput_bps=_even_bps(cluster) * GOODPUT_SHARE,
        compute_s=profile.compute_s + rebuild_s(schemes),
        wire_bytes=[bytes_ / cluster.compression for bytes_ in travelling],
        schemes=kinds,
        servers=cluster.servers,
        # Through a switch that adds up, each port carries the gradients once each way.
        serving=cluster.workers if cluster.strategy == IN_NETWORK else cluster.serving,
        local_ranks=cluster.ranks_per_node,
        clips=cluster.clip,
    ).step_s


def _even_bps(cluster: Cluster) -> float:
    """Return the rate of equal ports for the bound of a cluster whose paths may differ."""
    if not cluster.paths:
        return cluster.rate_bps
    machines = cluster.machines
    if cluster.strategy in (RING, DDP):
        return cluster.paths.ring_bps(machines, cluster.rate_bps)
    uneven = (IN_NETWORK, ADAM, *SPLITTING_STRATEGIES)
    if cluster.servers is None and not cluster.serving and cluster.strategy not in uneven:
        return cluster.paths.all_to_all_bps(machines, cluster.rate_bps)
    # Who sends how much where is not even: only the ports of workers are sure to carry all.
    workers = [port for port in cluster.paths.ports if port.machine < cluster.workers]
    is_even = cluster.servers is None
    return Paths(tuple(workers) if is_even else ()).slowest_port_bps(cluster.rate_bps)


def rebuild_s(schemes: TensorSchemes) -> float:
    """Return the time a step for rebuilding gradients from factors."""
    return sum(float(scheme.get("rebuild_s", 0.0)) for scheme in schemes.values())


def traffic(
    profile: Profile,
    wire_bytes: Sequence[float],
    schemes: TensorSchemes,
    default_scheme: str = "ps",
) -> tuple[list[float], list[str]]:
    """Return the bytes and the scheme of each tensor, in the format of bounds.

    Args:
        profile: of a step.
        wire_bytes: bytes of each tensor on the wire, unless as factors.
        schemes: as in a scenario.
        default_scheme: the scheme of all others.
    """
    own = [schemes.get(tensor.name, {}) for tensor in profile.tensors]
    travelling = [
        float(scheme.get("block_bytes", bytes_))
        for scheme, bytes_ in zip(own, wire_bytes, strict=True)
    ]
    kinds = [str(scheme.get("scheme", default_scheme)) for scheme in own]
    if default_scheme == "hierarchical":
        kinds = ["collected" if kind == SFB else kind for kind in kinds]
    return travelling, kinds


def _ring_bound_s(profile: Profile, cluster: Cluster) -> float:
    """Return the bound of the ring model: a fully used network, and a port for each node."""
    nodes = cluster.workers
    if cluster.topology == "hierarchical":
        nodes //= ring_node_size(cluster)
    return bound_step_s(
        timings_in(profile),
        workers=nodes,
        goodput_bps=cluster.rate_bps,
        compute_s=profile.compute_s,
        scheme="ring",
        codec_ratio=cluster.compression,
    ).step_s
