"""Causes of a step's waits, found by simulating it again without one cost at a time.

How busy a port or a thread is does not tell: a port that is used a tenth of the time can be what
everything waits for, and a busy one can be hidden behind compute. So the same cluster is simulated
with a host that costs nothing, with a faster link, and with fewer bytes; what shortens the step was
the bottleneck. This is the question of Zhang et al., "Is network the bottleneck of distributed
training?" (2020).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from gradlane.planning.simulation.grid import SimulatedRow, evaluate
from gradlane.planning.simulation.profiles import Profile
from gradlane.planning.simulation.scenarios import SCHEME_STRATEGIES, Cluster

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


Explain = Callable[[SimulatedRow, bool], Cause]
"""Finds the cause for a row, given whether a faster link alone reaches the goal."""


def find_cause(
    profile: Profile, cluster: Cluster, row: SimulatedRow, *, link_is_enough: bool
) -> Cause:
    """Simulate the cluster of a row again, without the host's costs, with a faster link, with
    fewer bytes, and with several of these at once.

    Args:
        profile: of a step.
        cluster: what was simulated; nobody is late in it.
        row: its result.
        link_is_enough: whether a faster link alone reaches the goal. The network is named then,
            whatever else is in the way, so that no verdict denies what a faster link brings.
    """

    def saved_s(other: Cluster) -> float:
        (changed,) = evaluate(profile, [other])
        return row.step_s - changed.step_s

    waiting_s = row.step_s - row.compute_s
    faster = replace(cluster, rate_bps=min(FASTER * cluster.rate_bps, _unlimited_bps(cluster)))
    by_host_s, by_link_s = saved_s(_with_free_host(cluster)), saved_s(faster)
    (fewer,) = evaluate(*_with_fewer_bytes(profile, cluster))
    by_bytes_s = row.step_s - fewer.step_s
    enough_s = ENOUGH * waiting_s
    is_network = link_is_enough or by_link_s >= enough_s
    is_host = by_host_s >= enough_s
    ideals = _ideals(cluster)
    together_s = saved_s(ideals[HOST])
    if is_network or is_host:
        bottleneck = BOTH if is_network and is_host else NETWORK if is_network else HOST
    elif together_s >= enough_s:
        bottleneck = BOTH
    else:
        together_s = saved_s(ideals[LATENCY])
        bottleneck = LATENCY
        if together_s < enough_s:
            together_s = saved_s(ideals[RANKS])
            bottleneck = RANKS if together_s >= enough_s else OTHER
    return Cause(bottleneck, waiting_s, by_host_s, by_link_s, by_bytes_s, together_s)


def limit_beyond_link(profile: Profile, cluster: Cluster) -> str:
    """Return what keeps a cluster from the goal over a link of unlimited rate: `none` (the link
    is enough), `host`, `latency`, `ranks` or `other`, by the same rule as `find_cause`."""
    (row,) = evaluate(profile, [replace(cluster, rate_bps=_unlimited_bps(cluster))])
    if row.scaling_factor >= GOAL:
        return NONE
    enough_s = ENOUGH * (row.step_s - row.compute_s)
    for limit, ideal in _ideals(cluster).items():
        (changed,) = evaluate(profile, [ideal])
        if row.step_s - changed.step_s >= enough_s:
            return limit
    return OTHER


def _unlimited_bps(cluster: Cluster) -> float:
    """Return the rate of an unlimited link, never less than the cluster's own; formulas multiply
    rates by the compression."""
    return max(cluster.rate_bps, UNLIMITED_BPS / max(1.0, cluster.compression))


def _ideals(cluster: Cluster) -> dict[str, Cluster]:
    """Return the cluster over an unlimited link, without the costs of its host, then without
    latency, then with equal ranks: each without all before it."""
    host = replace(_with_free_host(cluster), rate_bps=_unlimited_bps(cluster))
    latency = replace(host, latency_s=0.0)
    return {
        HOST: host,
        LATENCY: latency,
        RANKS: replace(latency, compute_spread=0.0, compute_jitter=0.0),
    }


def _with_fewer_bytes(profile: Profile, cluster: Cluster) -> tuple[Profile, list[Cluster]]:
    """Return what is simulated where the same compute has smaller gradients."""
    if cluster.schemes or cluster.strategy in SCHEME_STRATEGIES:
        # Factors follow from the shapes of layers; `compression` spares the link alone.
        return profile, [replace(cluster, compression=cluster.compression * FASTER)]
    tensors = tuple(
        replace(tensor, shape=(max(1, int(tensor.numel / FASTER)),)) for tensor in profile.tensors
    )
    return replace(profile, tensors=tensors), [cluster]


def _with_free_host(cluster: Cluster) -> Cluster:
    """Return the cluster with hosts that take no time for frames, sums, copies and codecs."""
    costs = replace(cluster.costs, codecs=dict.fromkeys(cluster.costs.codecs, (0.0, 0.0)))
    return replace(cluster, free_host=True, costs=costs, additions=())
