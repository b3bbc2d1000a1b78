"""Scenarios for the compiled core's simulator, and its reports.

A scenario is complete: the same scenario gives the same report.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gradlane.planning.schemes.layers import (
    SCHEME_RULES,
    Schemes,
    schemes_by_rule,
    simulated_schemes,
    sparse_schemes,
)
from gradlane.planning.simulation.codec_costs import CodecCost, codecs_in, mean_cost
from gradlane.planning.simulation.costs import HOST_CONSTANTS, MachineCosts
from gradlane.planning.simulation.hosts import Host
from gradlane.planning.simulation.paths import Paths
from gradlane.planning.simulation.profiles import Profile
from gradlane.planning.simulation.straggler import StragglerSpec, parse_straggler
from gradlane.training.node.parts import BLOCKS, cut_into_parts
from gradlane.training.node.rules import LEADER, NODE_STRATEGIES
from gradlane.training.options import strategy as strategies
from gradlane.training.options.cluster_shape import ClusterShape
from gradlane.training.options.codec_choice import codec_features, codec_rules, local_clip
from gradlane.training.options.codec_options import RAW, ROUNDING
from gradlane.training.options.compatibility import Feature, refusal
from gradlane.training.options.local_updates import Local
from gradlane.training.options.option_fields import option, read_int
from gradlane.training.options.stragglers import (
    AHEAD_STEPS,
    WAIT,
    parse_stragglers,
)

ENGINE_STRATEGIES = strategies.STRATEGIES
"""Strategies of gradlane's own engine."""
RING_FUSED = "ring-fused"
"""The model of fused buffers and rings (Zhang et al. 2020, section 3.1)."""
DDP = "ddp"
"""PyTorch's DistributedDataParallel, tuned; see `ddp.py`."""
FORMULAS = (RING_FUSED, DDP)
"""Strategies that are formulas, without a timeline."""
SCHEME_STRATEGIES = SCHEME_RULES
"""`p3` with factors for the layers that a rule names: Poseidon's formula, or all that have any."""
IN_NETWORK = "in-network"
"""`p3` through a switch that adds gradients up (SwitchML): each travels once up and once down."""
STRATEGIES = (*ENGINE_STRATEGIES, *SCHEME_STRATEGIES, *NODE_STRATEGIES, IN_NETWORK, *FORMULAS)
"""All strategies that can be simulated."""
LATENCY_MAX_S = 10.0
"""Longest one-way time between two ports that is simulated."""
NCCL_RATE_BPS = 160e9
"""Rate between the workers of a node that `gradlane whatif` takes: the bus bandwidth of NCCL's
all-reduce where GPUs meet over PCIe 4 (20 GB/s: NVIDIA/nccl-tests issues 44 and 178). With NVLink
it is ten times as much."""
LOCAL_RATE_BPS = 1e12
"""Default rate between the workers of a node of the hierarchical ring."""
FREE_HOST = dict.fromkeys(HOST_CONSTANTS, 0.0)
"""Costs of an infinitely fast host."""
LATE_STEPS = 60
"""Simulated steps with stragglers: bursts hit only a few of them."""
LATE_JITTER = 0.01
"""`compute_jitter` with stragglers: exactly equal ranks would always arrive in the same order."""
MANY_RANKS = 256
"""Ranks from which on fewer steps are simulated: a mean over so many ranks has less noise than the
median of three steps of a few."""
MANY_RANKS_STEPS = 2
"""Simulated steps of many ranks: a first, which is not like those after it, and one of these."""
LANES_MAX = 64
"""Connections of a pair that the simulator takes."""
FOLDED_RANKS = 500
"""Ranks from which on those that own no slice are folded."""
REPRESENTATIVES = 8
"""Simulated ranks in place of all that own no slice."""


LARGE_FRAME_BYTES = 4 << 20
"""The largest frame of the wire, of `large_frames`."""


@dataclass(frozen=True)
class Cluster(ClusterShape):
    """A cluster and its synchronization."""

    rate_bps: float = option()
    strategy: str = "p3"
    compression: float = 1.0
    """Bytes of a gradient over bytes that travel for it."""
    codec: str = RAW
    """Codec of the engine's strategies, as for `gradlane.init`; beside `compression`."""
    schemes: Schemes = ()
    """Layers whose scheme is not the strategy's; those of `SCHEME_STRATEGIES` follow from it."""
    local: str = "off"
    """Sums on nodes, as in `gradlane.init`; `NODE_STRATEGIES` imply theirs."""
    update: Local | None = None
    """Local updates, with an exchange every so many steps; None: one in each step."""
    sharded: bool = option(
        False, "The model is sharded within each node by fully_shard (--ranks-per-node)."
    )
    """Ranks of the same shard average theirs, all ranks of a node behind one port."""
    latency_s: float = option(0.0, "One-way time between two ports.")
    paths: Paths = field(default_factory=Paths)
    """Ports and ways between machines that are not all alike."""
    host: Host = field(default_factory=lambda: Host(lanes=1))
    """Threads and processors of each rank."""
    slice_elems: int | None = option(None, "Elements a slice at most.", read=read_int)
    steps: int = 3
    clip: bool = option(False, "Gradients are clipped by the norm of all of them.")
    """As `session.clip_grad_norm_` does, or, of DDP, torch's own function."""
    seal: bool = False
    """True if connections are sealed, as with a secret: tags travel, and bytes are encrypted."""
    large_frames: bool = False
    """True if a slice goes in few large frames and packets, which makes fewer events: right where
    neither host nor link takes time."""
    free_host: bool = option(False, "Charge the host no time for frames and sums.")
    costs: MachineCosts = field(default_factory=MachineCosts)
    """Constants that replace the simulator's own."""
    port_burst_bytes: int = 0
    """Burst of the token bucket that shapes a port, as in the lab; 0: a wire."""
    share_seed: int = 0
    """Seed of the inequality of connections."""
    background_share: float = 0.0
    """Share of every port used by other traffic."""
    compute_spread: float = 0.0
    """Largest share by which a rank is slower than the profile."""
    compute_jitter: float = 0.0
    """Largest share by which a step of a rank is longer."""
    stragglers: str = WAIT
    """Rule for late ranks, as for `gradlane.init`."""
    straggler: StragglerSpec | None = option(
        None,
        "A rank that is stopped for moments: rank=3,share=0.1,burst=500ms.",
        read=parse_straggler,
    )
    topology: str = "flat"
    """Of `ring-fused`: `flat`, a ring over all workers, or `hierarchical`."""
    workers_per_node: int = option(8, "Of the hierarchical ring, without --ranks-per-node.")
    local_rate_bps: float | None = None
    """Rate between the workers of a node, of a collective that adds up on its way. None: shared
    memory at the host's costs, and `LOCAL_RATE_BPS` for the hierarchical ring."""
    additions: Sequence[tuple[float, float]] = field(default=())
    """Measured additions of vectors, (elements, seconds), of `ring-fused`."""
    seed: int = 0

    def __post_init__(self) -> None:
        """Check what the simulator and the formulas do not.

        Raises:
            ValueError: a number is out of its range; the text names it.
        """
        if not 0.0 <= self.latency_s <= LATENCY_MAX_S:
            raise ValueError(f"latency-s is {self.latency_s}; use 0 to {LATENCY_MAX_S:g} seconds")
        if self.sharded and self.ranks_per_node < 1:
            raise ValueError(f"ranks-per-node is {self.ranks_per_node}; use 1 or more")
        if self.workers_per_node < 1:
            raise ValueError(f"workers-per-node is {self.workers_per_node}; use 1 or more")


def engine_strategy(strategy: str) -> str:
    """Return the engine's strategy behind one of `STRATEGIES`."""
    named = strategy in (*SCHEME_STRATEGIES, *NODE_STRATEGIES, IN_NETWORK)
    return strategies.Strategy.name if named else strategy


def local_sums(cluster: Cluster) -> str:
    """Return the cluster's sums on nodes; a leader collects the factors of its ranks."""
    collects = cluster.strategy in ("poseidon", strategies.SFB) and cluster.ranks_per_node > 1
    return NODE_STRATEGIES.get(cluster.strategy, LEADER if collects else cluster.local)


def has_many_ranks(cluster: Cluster) -> bool:
    """Return whether a cluster is simulated for few steps; with late ranks none is."""
    return (
        cluster.workers >= MANY_RANKS and cluster.straggler is None and cluster.stragglers == WAIT
    )


def nodes_refusal(cluster: Cluster) -> str:
    """Return why a cluster cannot have its nodes; empty if it can."""
    node_size = cluster.ranks_per_node
    if why := cluster.unfilled or cluster.needs_no_network:
        return why
    if node_size > 1 and cluster.strategy == IN_NETWORK:
        return f"{IN_NETWORK} is simulated with one worker a port"
    if node_size == 1 and local_sums(cluster) != "off":
        return f"{cluster.strategy} adds up on nodes, and each has one rank"
    return ""


def check_rounds(cluster: Cluster) -> None:
    """Check that what is simulated in parts of a step, or of a round, exists.

    Raises:
        ValueError: local updates or a sharded model do not go with the other settings.
    """
    if cluster.update is None and not cluster.sharded:
        return
    name = cluster.strategy
    features = strategies.strategy_features(
        engine_strategy(name),
        "worker",
        strategies.SFB if name in SCHEME_STRATEGIES or cluster.schemes else "",
        cluster.stragglers,
    )
    features |= codec_features(codec_rules(cluster.codec), on_ring=name == strategies.RING)
    if cluster.serving:
        features[Feature.SERVING] = f"{cluster.serving} ranks that serve only"
    if cluster.update is not None:
        features[Feature.LOCAL] = f"--update {cluster.update.text}"
    if cluster.sharded:
        features[Feature.FSDP] = "--sharded"
        if cluster.update is None:
            features[Feature.FSDP_EXACT] = "--sharded"
        if local_sums(cluster) != "off":
            features[Feature.NODES] = f"--strategy {name}"
        if cluster.servers is not None:
            features[Feature.SERVERS] = f"servers={cluster.servers}"
    why = refusal(features)
    if not why and (name in (*FORMULAS, IN_NETWORK) or cluster.straggler is not None):
        what = "a rank that is stopped" if cluster.straggler is not None else name
        why = f"{what} with --update or --sharded is not simulated: use p3"
    if why:
        raise ValueError(why)


def columns_of(cluster: Cluster) -> Cluster:
    """Return a sharded model's nodes as ranks, whose ports carry what theirs carry.

    A node's ranks each have a shard, connections and threads of their own; together they exchange
    the model once with each other node.
    """
    each = cluster.ranks_per_node
    lanes, work_threads = cluster.host.threads(cluster.rate_bps)
    return replace(
        cluster,
        workers=cluster.workers // each,
        ranks_per_node=1,
        sharded=False,
        host=Host(
            min(lanes * each, LANES_MAX), work_threads * each, cluster.host.processors * each
        ),
    )


def needed_together(profile: Profile) -> Profile:
    """Return the profile of a step that waits for all means at the end of backward."""
    return replace(
        profile, tensors=tuple(replace(tensor, need_s=0.0) for tensor in profile.tensors)
    )


def _nodes(profile: Profile, cluster: Cluster) -> dict[str, Any]:
    """Return the nodes of a scenario: their size, and the parts of each leader.

    Raises:
        ValueError: the cluster cannot have them, or another setting excludes them.
    """
    why = nodes_refusal(cluster)
    if why:
        raise ValueError(f"{why}: give --ranks-per-node 2, for example, and a multiple as workers")
    if why := cluster.servers_refusal:
        raise ValueError(why)
    leaders = {"off": 0, "leader": 1}.get(local_sums(cluster), cluster.ranks_per_node)
    if leaders > 1 and codec_rules(cluster.codec) != RAW:
        codec = {Feature.CODEC: f"codec {cluster.codec}"}
        raise ValueError(refusal({Feature.SHARED: cluster.strategy}, codec))
    schemes = tensor_schemes(profile, cluster)
    blocks = {name for name, one in schemes.items() if one["scheme"] == strategies.SFB}
    rows = [
        {
            "numel": tensor.numel,
            "dtype": tensor.dtype,
            "role": "parameter",
            "scheme": BLOCKS if tensor.name in blocks else "",
        }
        for tensor in profile.tensors
    ]
    parts_of_leader: list[list[tuple[int, int]]] = [[] for _ in range(leaders)]
    for part in cut_into_parts(rows, leaders) if leaders else ():
        elems = part.nbytes * profile.tensors[part.tensor].numel
        whole = profile.tensors[part.tensor].size_bytes
        parts_of_leader[part.leader].append((part.tensor, elems // whole if whole else 0))
    return {
        "ranks": cluster.ranks_per_node,
        "carried": parts_of_leader,
        "rate_bps": cluster.local_rate_bps,
    }


def tensor_schemes(profile: Profile, cluster: Cluster) -> dict[str, dict[str, Any]]:
    """Return the tensors whose scheme is not the strategy's, for a scenario.

    Raises:
        ValueError: a layer is unknown or has no factors, or the engine does not run a scheme.
    """
    schemes = cluster.schemes
    if cluster.strategy in SCHEME_STRATEGIES:
        schemes = schemes_by_rule(cluster.strategy, profile, cluster.workers, cluster.serving)
    speed = cluster.costs.operations_per_s
    narrow = narrow_tensors(profile, cluster) if schemes else ()
    given = simulated_schemes(profile, schemes, cluster.workers, speed, narrow)
    return sparse_schemes(profile) | given if _sends_rows(cluster) else given


def narrow_tensors(profile: Profile, cluster: Cluster) -> frozenset[str]:
    """Return the tensors whose factors, if they have any, are rounded to 16 bits by their codec."""
    rules = codec_rules(cluster.codec)
    if rules == RAW:
        return frozenset()
    choices = codecs_in(profile, rules, strategies.ring_ranks(cluster.strategy, cluster.workers))
    return frozenset(
        tensor.name
        for tensor, choice in zip(profile.tensors, choices, strict=True)
        if choice.codec in ROUNDING and tensor.dtype == "f32" and tensor.sparse_rows is None
    )


def _sends_rows(cluster: Cluster) -> bool:
    """Return whether sparse gradients travel as rows; `options.rows_refusal` has the reasons."""
    refuses = (*FORMULAS, *strategies.SPLITTING_STRATEGIES, strategies.ASGD)
    return (
        cluster.workers > cluster.ranks_per_node
        and cluster.strategy not in refuses
        and cluster.stragglers == WAIT
    )


def scenario_of(
    profile: Profile, cluster: Cluster, *, trace: bool = False, trace_ranks: int = 0
) -> dict[str, Any]:
    """Return the scenario in the compiled core's format.

    Args:
        profile: of a step.
        cluster: that computes it.
        trace: whether to record a trace; `ring-fused` is a formula and has none.
        trace_ranks: on this many ranks, the first; 0: on all.

    Raises:
        ValueError: for an unknown strategy or topology, or nodes that the workers do not fill.
    """
    if cluster.strategy not in STRATEGIES:
        raise ValueError(
            f"unknown strategy {cluster.strategy!r}; choose from {', '.join(STRATEGIES)}"
        )
    if cluster.strategy == DDP:
        raise ValueError(f"{DDP} is a formula and no scenario of the engine")
    if cluster.serving and cluster.strategy in (strategies.RING, RING_FUSED):
        serving = {Feature.SERVING: f"{cluster.serving} ranks that only serve"}
        raise ValueError(refusal(serving, {Feature.RING: f"strategy {cluster.strategy}"}))
    if cluster.strategy == IN_NETWORK and (cluster.serving or cluster.servers is not None):
        raise ValueError(f"{IN_NETWORK} has a switch in place of servers: leave out --servers")
    rules = codec_rules(cluster.codec)
    if cluster.strategy == RING_FUSED:
        if rules != RAW:
            raise ValueError(
                f"{RING_FUSED} is a formula that knows no codec: give --compression instead of "
                f"--codec {cluster.codec}, or a strategy of the engine, such as p3"
            )
        return _ring_scenario(profile, cluster)
    lanes, work_threads = cluster.host.threads(cluster.rate_bps)
    scenario: dict[str, Any] = {
        "model": "cluster",
        "profile": profile.to_scenario(),
        "workers": cluster.workers,
        "servers": cluster.servers,
        "serving": cluster.serving,
        "strategy": engine_strategy(cluster.strategy),
        "slice_elems": cluster.slice_elems,
        "update": "server" if cluster.strategy == strategies.ASGD else "worker",
        # Fewer bytes over the same link take as long as all bytes over a faster one.
        "network": {
            "rate_bps": cluster.rate_bps * cluster.compression,
            "latency_s": cluster.latency_s,
            "burst_bytes": cluster.port_burst_bytes,
            "share_seed": cluster.share_seed,
            "background_share": cluster.background_share,
        },
        "compute_spread": cluster.compute_spread,
        "steps": cluster.steps,
        "seed": cluster.seed,
        "clips": cluster.clip,
        "seal": cluster.seal,
        "outputs": {"trace": trace, "trace_ranks": trace_ranks},
        "lanes": lanes,
        "work_threads": work_threads,
        "processors": cluster.host.processors * cluster.ranks_per_node,
    }
    if cluster.strategy == IN_NETWORK:
        scenario["serving"] = 1
        scenario["switch_sums"] = True
        # The switch lies halfway between two ports.
        scenario["network"]["latency_s"] = cluster.latency_s / 2.0
    if cluster.paths:
        cluster.paths.check(cluster.machines)
        scenario["paths"] = cluster.paths.to_scenario(cluster.rate_bps, cluster.compression)
    if cluster.large_frames:
        scenario["frame_bytes"] = LARGE_FRAME_BYTES
        scenario["network"]["piece_bytes"] = 2 * LARGE_FRAME_BYTES
    if cluster.free_host:
        scenario["costs"] = {**FREE_HOST, "encode_byte_s": 0.0, "decode_byte_s": 0.0}
    cluster.costs.apply_to(scenario)
    if cluster.ranks_per_node > 1 or local_sums(cluster) != "off":
        scenario["nodes"] = _nodes(profile, cluster)
    schemes = tensor_schemes(profile, cluster)
    _add_stragglers(scenario, cluster, factors=bool(schemes))
    if schemes:
        scenario["schemes"] = schemes
    if rules != RAW:
        ranks = strategies.ring_ranks(cluster.strategy, cluster.workers)
        choices = codecs_in(profile, rules, ranks)
        scenario["codecs"] = {
            choice.tensor: {"codec": choice.codec, "sizes": list(tensor.shape)}
            for choice, tensor in zip(choices, profile.tensors, strict=True)
            if choice.codec != RAW
            and schemes.get(choice.tensor, {}).get("scheme") not in strategies.FACTOR_SCHEMES
        }
        if any(local_clip(choice.codec) for choice in choices):
            scenario["profile"] = _ready_together(profile).to_scenario()
        measured = {text: CodecCost(*cost) for text, cost in cluster.costs.codecs.items()}
        cost = mean_cost(profile, choices, measured)
        if cost is not None and not cluster.free_host:
            scenario["costs"] = {
                **scenario.get("costs", {}),
                "encode_byte_s": cost.encode_byte_s,
                "decode_byte_s": cost.decode_byte_s,
            }
    late = cluster.straggler is not None or cluster.stragglers != WAIT
    differs = late or schemes or cluster.serving or cluster.paths
    alike = cluster.ranks_per_node == 1 and not differs
    if cluster.workers >= FOLDED_RANKS and alike and cluster.strategy in ("p3", "slicing", "wfbp"):
        scenario["representatives"] = REPRESENTATIVES
    return scenario


def _ready_together(profile: Profile) -> Profile:
    """Return a profile whose gradients wait for the last one, as for their norm."""
    last_s = max(tensor.ready_s for tensor in profile.tensors)
    return replace(
        profile, tensors=tuple(replace(tensor, ready_s=last_s) for tensor in profile.tensors)
    )


def ring_node_size(cluster: Cluster) -> int:
    """Return the number of workers on a node of the hierarchical ring."""
    return cluster.ranks_per_node if cluster.ranks_per_node > 1 else cluster.workers_per_node


def _add_stragglers(scenario: dict[str, Any], cluster: Cluster, *, factors: bool) -> None:
    """Add the stopped rank and the straggler rule to a scenario."""
    features = strategies.strategy_features(
        scenario["strategy"],
        scenario["update"],
        strategies.SFB if factors else "",
        cluster.stragglers,
    )
    why = refusal(features)
    if why:
        raise ValueError(why)
    rule = parse_stragglers(cluster.stragglers)
    if rule is not None:
        scenario["stragglers"] = json.loads(rule.core_rule(AHEAD_STEPS))
    if cluster.straggler is not None:
        scenario["stops"] = [cluster.straggler.to_json()]
    scenario["compute_jitter"] = cluster.compute_jitter


def _ring_scenario(profile: Profile, cluster: Cluster) -> dict[str, Any]:
    rings: dict[str, Any] = {"kind": "flat", "workers": cluster.workers}
    if cluster.topology == "hierarchical":
        node_size = ring_node_size(cluster)
        nodes, rest = divmod(cluster.workers, node_size)
        if rest:
            raise ValueError(
                f"{cluster.workers} workers do not fill nodes of {node_size}: "
                "the hierarchical ring needs a multiple"
            )
        rings = {
            "kind": "hierarchical",
            "nodes": nodes,
            "workers_per_node": node_size,
            "local_rate_bps": cluster.local_rate_bps or LOCAL_RATE_BPS,
        }
    elif cluster.topology != "flat":
        raise ValueError(f"unknown topology {cluster.topology!r}; choose flat or hierarchical")
    return {
        "model": RING_FUSED,
        "profile": profile.to_scenario(),
        "rings": rings,
        "rate_bps": cluster.rate_bps,
        "compression": cluster.compression,
        "additions": [list(point) for point in cluster.additions],
    }


def run_scenario(scenario: dict[str, Any]) -> dict[str, Any]:
    """Simulate a scenario.

    Returns:
        `report`, the figures, and `trace` (see `planning/simulation/timeline.py`) where the
        scenario asks for it.

    Raises:
        ValueError: the scenario makes no sense; the text names the field.
    """
    from gradlane import _core

    result: dict[str, Any] = json.loads(_core.simulate(json.dumps(scenario)))
    return result
