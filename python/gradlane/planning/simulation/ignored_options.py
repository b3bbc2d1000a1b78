"""Options of a simulation that none of its strategies would take any notice of."""

from __future__ import annotations

from gradlane.planning.simulation.costs import MachineCosts
from gradlane.planning.simulation.lists import Grid
from gradlane.planning.simulation.scenarios import (
    ENGINE_STRATEGIES,
    FORMULAS,
    RING_FUSED,
    Cluster,
)
from gradlane.training.options.codec_choice import codec_rules, unused_codec_option
from gradlane.training.options.codec_options import RAW
from gradlane.training.options.stragglers import LEAVES_OUT, WAIT
from gradlane.training.options.strategy import ASGD, RING


def check_effects(grid: Grid, base: Cluster) -> None:
    """Check that every option that was given has an effect on one of the strategies.

    Args:
        grid: the values that will be simulated.
        base: everything that all clusters have in common; a default was not given.

    Raises:
        ValueError: one has none; the message names it and a strategy that it is for.
    """
    strategies = grid.strategies
    engine = [one for one in strategies if one not in FORMULAS]
    with_servers = [one for one in engine if one != RING]
    is_fused = RING_FUSED in strategies
    is_hierarchical = is_fused and "hierarchical" in grid.topologies
    has_nodes = max(grid.ranks_per_node) > 1
    # The formula of fused rings knows the rate of ports, and no more of the cluster.
    knows_hosts = any(one != RING_FUSED for one in strategies)
    servers = base.servers is not None or base.serving > 0
    encoded = any(codec_rules(codec) != RAW for codec in grid.codecs)
    any_engine = f"one of {', '.join(ENGINE_STRATEGIES)}"
    given: tuple[tuple[str, bool, bool, str], ...] = (
        ("--slice-elems", base.slice_elems is not None, bool(engine), any_engine),
        ("--codec", encoded, bool(engine) or is_fused, any_engine),
        ("--update", any(one is not None for one in grid.updates), bool(engine), any_engine),
        ("--sharded", base.sharded, bool(engine), any_engine),
        ("--servers", servers, bool(with_servers), "p3, or another strategy with servers"),
        (
            "--stragglers",
            any(rule != WAIT for rule in grid.rules),
            bool({*LEAVES_OUT} & {*engine}),
            "p3",
        ),
        ("--straggler", base.straggler is not None, knows_hosts, any_engine),
        ("--topology", any(one != "flat" for one in grid.topologies), is_fused, RING_FUSED),
        ("--additions", bool(base.additions), is_fused, RING_FUSED),
        (
            "--workers-per-node",
            base.workers_per_node != Cluster.workers_per_node,
            is_hierarchical and not has_nodes,
            f"{RING_FUSED} with --topology hierarchical and without --ranks-per-node",
        ),
        (
            "--local-rate",
            base.local_rate_bps is not None,
            has_nodes or is_hierarchical,
            "--ranks-per-node",
        ),
        ("--port, --link or --racks", bool(base.paths), knows_hosts, any_engine),
        ("--latency-s", base.latency_s != 0.0, knows_hosts, any_engine),
        ("--clip", base.clip, knows_hosts, any_engine),
        ("--free-host", base.free_host, knows_hosts, any_engine),
        ("--costs", base.costs != MachineCosts(), knows_hosts, any_engine),
    )
    for option, is_given, has_effect, remedy in given:
        if is_given and not has_effect:
            raise ValueError(
                f"{option} has no effect with --strategy {','.join(strategies)}: leave it out, or "
                f"add {remedy}"
            )
    has_ring, encodes_means = RING in engine, any(one != ASGD for one in engine)
    for codec in grid.codecs:
        unused = unused_codec_option(
            codec_rules(codec), has_ring=has_ring, encodes_means=encodes_means
        )
        if unused:
            raise ValueError(unused)
