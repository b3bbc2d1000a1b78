"""Causes of a step's waits, found by simulating it again without one cost at a time.

How busy a port or a thread is does not tell: a port that is used a tenth of the time can be what
everything waits for, and a busy one can be hidden behind compute. So the same cluster is simulated
with a host that costs nothing, with a faster link, and with fewer bytes; what shortens the step was
the bottleneck. This is the question of Zhang et al., "Is network the bottleneck of distributed
training?" (2020).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from gradlane.planning.advice.variants import Variant, Variants
from gradlane.planning.simulation.grid import SimulatedRow
from gradlane.planning.simulation.paths import Paths, PortRate
from gradlane.planning.simulation.scenarios import SCHEME_STRATEGIES, Cluster, has_many_ranks

GOAL = 0.95
"""The scaling factor that is good enough."""
FASTER = 10.0
"""How many times faster a link, or fewer the bytes, is tried."""
ENOUGH = 0.5
"""The share of the waiting that has to go for its cause to be named."""
NONE, NETWORK, HOST, BOTH = "none", "network", "host", "network and host"
LATENCY, RANKS, OTHER = "latency", "ranks", "other"
UNLIMITED_BPS = 1e15
"""The rate of a link that takes no time, for all that matters here: the highest simulated one."""


@dataclass(frozen=True)
class Cause:
    """The cause of a simulated step's waits."""

    bottleneck: str
    """`none`: it hardly waits; `network`: the rate of the ports; `host`: the processors that send,
    receive, add up and encode; `network and host`: each hides behind the other, or each takes a
    part; `latency`: the way between ports; `ranks`: others that compute more slowly; `other`."""
    waiting_s: float
    """Step time beyond compute."""
    saved_by_free_host_s: float
    saved_by_faster_link_s: float
    """By a link `FASTER` times as fast."""
    saved_by_fewer_bytes_s: float
    """By gradients of `FASTER` times fewer bytes on the wire."""
    saved_together_s: float
    """By an unlimited link and a free host at once; where `latency` is named without latency, too,
    and where `ranks` or `other` is with equal ranks as well."""


@dataclass(frozen=True)
class Place:
    """The port or way that a row mostly waits for, where machines are not alike."""

    name: str
    saved_s: float
    """Seconds by which a step is shorter where it is no limit."""
    text: str


Explain = Callable[[SimulatedRow, bool], Cause]
"""Finds the cause for a row, given whether a faster link alone reaches the goal."""


def first_variants(cluster: Cluster) -> list[Variant]:
    """Return what `find_cause` simulates of every cluster that misses the goal."""
    faster = replace(
        cluster,
        rate_bps=min(FASTER * cluster.rate_bps, _unlimited_bps(cluster)),
        paths=cluster.paths.faster(FASTER),
    )
    return [
        Variant(with_free_host(cluster)),
        Variant(faster),
        _with_fewer_bytes(cluster),
        Variant(_ideals(cluster)[HOST]),
    ]


def unlimited_link(cluster: Cluster) -> Variant:
    """Return the cluster over a link of unlimited rate, by which `limit_beyond_link` begins."""
    return Variant(replace(cluster, rate_bps=_unlimited_bps(cluster), paths=Paths()))


def find_cause(
    variants: Variants, cluster: Cluster, row: SimulatedRow, *, link_is_enough: bool
) -> Cause:
    """Simulate the cluster of a row again, without the host's costs, with a faster link, with
    fewer bytes, and with several of these at once.

    Args:
        variants: simulates them.
        cluster: what was simulated; nobody is late in it.
        row: its result.
        link_is_enough: whether a faster link alone reaches the goal. The network is named then,
            whatever else is in the way, so that no verdict denies what a faster link brings.
    """
    wanted = first_variants(cluster)
    variants.simulate(wanted)
    waiting_s = row.step_s - row.compute_s
    by_host_s, by_link_s, by_bytes_s, together_s = (
        variants.saved_s(row, variant) for variant in wanted
    )
    enough_s = ENOUGH * waiting_s
    is_network = link_is_enough or by_link_s >= enough_s
    is_host = by_host_s >= enough_s
    ideals = _ideals(cluster)
    if is_network or is_host:
        bottleneck = BOTH if is_network and is_host else NETWORK if is_network else HOST
    elif together_s >= enough_s:
        bottleneck = BOTH
    else:
        together_s = variants.saved_s(row, Variant(ideals[LATENCY]))
        bottleneck = LATENCY
        if together_s < enough_s:
            together_s = variants.saved_s(row, Variant(ideals[RANKS]))
            bottleneck = RANKS if together_s >= enough_s else OTHER
    return Cause(bottleneck, waiting_s, by_host_s, by_link_s, by_bytes_s, together_s)


def limit_beyond_link(variants: Variants, cluster: Cluster) -> str:
    """Return what keeps a cluster from the goal over a link of unlimited rate: `none` (the link
    is enough), `host`, `latency`, `ranks` or `other`, by the same rule as `find_cause`."""
    (row,) = variants.simulate([unlimited_link(cluster)])
    if row.scaling_factor >= GOAL:
        return NONE
    enough_s = ENOUGH * (row.step_s - row.compute_s)
    for limit, ideal in _ideals(cluster).items():
        if variants.saved_s(row, Variant(ideal)) >= enough_s:
            return limit
    return OTHER


def find_place(variants: Variants, cluster: Cluster, row: SimulatedRow) -> Place | None:
    """Find the port or way that is no limit elsewhere and that most of the waiting is for."""
    enough_s = ENOUGH * (row.step_s - row.compute_s)
    for name, other in _places(cluster):
        saved_s = variants.saved_s(row, Variant(other))
        if saved_s >= enough_s:
            text = (
                f"{row.strategy} waits for {name}: without that limit a step takes "
                f"{(row.step_s - saved_s) * 1e3:.0f} ms."
            )
            return Place(name, saved_s, text)
    return None


def _places(cluster: Cluster) -> list[tuple[str, Cluster]]:
    """Return each port or way that may be narrower than others, and the cluster without it."""
    found = []
    serve = range(cluster.workers, cluster.workers + cluster.serving)
    if cluster.servers is not None and cluster.servers < cluster.workers:
        serve = range(cluster.servers)
    if serve:
        which = f"the port of the one server, rank {serve[0]}"
        if len(serve) > 1:
            which = f"the ports of the {len(serve)} servers, ranks {serve[0]} to {serve[-1]}"
        paths = cluster.paths
        others = [port for port in paths.ports if port.machine not in serve]
        wide = [PortRate(machine, _unlimited_bps(cluster)) for machine in serve]
        found.append((which, replace(cluster, paths=replace(paths, ports=(*others, *wide)))))
    slow = [port for port in cluster.paths.ports if port.rate_bps < cluster.rate_bps]
    if slow:
        which = _each("the port of machine", "the ports of machines", [it.machine for it in slow])
        paths = replace(cluster.paths, ports=())
        found.append((which, replace(cluster, paths=paths)))
    if cluster.paths.links:
        ends = [f"{link.one} and {link.other}" for link in cluster.paths.links]
        which = _each("the link between machines", "the links between machines", ends)
        found.append((which, replace(cluster, paths=replace(cluster.paths, links=()))))
    if cluster.paths.racks is not None:
        which = "the racks' lines to each other"
        found.append((which, replace(cluster, paths=replace(cluster.paths, racks=None))))
    return found


def _each(one: str, several: str, names: Sequence[object]) -> str:
    return f"{one if len(names) == 1 else several} {', '.join(map(str, names))}"


def _unlimited_bps(cluster: Cluster) -> float:
    """Return the rate of an unlimited link, never less than the cluster's own; formulas multiply
    rates by the compression."""
    return max(cluster.rate_bps, UNLIMITED_BPS / max(1.0, cluster.compression))


def _ideals(cluster: Cluster) -> dict[str, Cluster]:
    """Return the cluster over an unlimited link, without the costs of its host, then without
    latency, then with equal ranks: each without all before it."""
    # Where nothing takes time for a frame, few large ones take as long as many small ones.
    host = replace(
        with_free_host(cluster),
        rate_bps=_unlimited_bps(cluster),
        paths=Paths(),
        large_frames=has_many_ranks(cluster),
    )
    latency = replace(host, latency_s=0.0)
    return {
        HOST: host,
        LATENCY: latency,
        RANKS: replace(latency, compute_spread=0.0, compute_jitter=0.0),
    }


def _with_fewer_bytes(cluster: Cluster) -> Variant:
    """Return the variant in which the same compute has smaller gradients."""
    if cluster.schemes or cluster.strategy in SCHEME_STRATEGIES:
        # Factors follow from the shapes of layers; `compression` spares the link alone.
        return Variant(replace(cluster, compression=cluster.compression * FASTER))
    return Variant(cluster, smaller=FASTER)


def with_free_host(cluster: Cluster) -> Cluster:
    """Return the cluster with hosts that take no time for frames, sums, copies and codecs."""
    costs = replace(cluster.costs, codecs=dict.fromkeys(cluster.costs.codecs, (0.0, 0.0)))
    return replace(cluster, free_host=True, costs=costs, additions=())
