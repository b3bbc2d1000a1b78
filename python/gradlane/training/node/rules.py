"""The values of `local` and `local_sums`, and the options that they exclude."""

from __future__ import annotations

from dataclasses import replace

from gradlane.training.options.codec_options import RAW
from gradlane.training.options.options import Options
from gradlane.training.options.strategy import SPLITTING_STRATEGIES

LEADER, SHARED, OFF, AUTO = "leader", "shared", "off", "auto"
HOST, COLLECTIVE = "host", "collective"
NODE_STRATEGIES = {"hierarchical": LEADER, "hierarchical-shared": SHARED}
"""Names of `p3` between nodes with sums on nodes, and the value of `local` for each."""


def check_sums(options: Options) -> None:
    """Check that `local_sums` goes with `local`.

    Raises:
        ValueError: collectives were asked for, and every rank talks to the network by itself.
    """
    if options.local.where == COLLECTIVE and options.local.mode == OFF:
        raise ValueError(
            'local_sums="collective" with local="off": the ranks of a node add nothing up; use '
            'local="leader", "shared" or "auto"'
        )


def with_local(options: Options) -> Options:
    """Return options whose `local` goes with the others: `"auto"` becomes `"off"` where it does
    not.

    Raises:
        ValueError: sums on nodes were asked for and do not go with another option.
    """
    refusal = nodes_refusal(options)
    if not refusal or options.local.mode == OFF:
        return options
    if options.local.mode == AUTO:
        return replace(options, local=replace(options.local, mode=OFF))
    raise ValueError(f'local={options.local.mode!r} with {refusal}; use local="off"')


def nodes_refusal(options: Options) -> str:
    """Return the option that excludes sums on nodes, with its reason; empty if all go with them."""
    if options.going_on.on and options.local.mode == SHARED:
        return (
            "going_on: each rank of a node would agree on members by itself; "
            'with local="leader" one of them does'
        )
    if options.update == "server":
        return 'update="server": owners need the gradient of each rank, not sums of nodes'
    if options.stragglers.leaves_out:
        rule = options.stragglers.rule
        return (
            f"stragglers={rule!r}: a node's ranks wait for each other before anything leaves, so "
            "a late one makes all of them late, and a step without it would lose them all"
        )
    if options.servers is not None:
        return f"servers={options.servers}: nodes own slices, not single ranks"
    if options.workers is not None:
        return f"workers={options.workers}: a node's ranks add up as ranks that train"
    if options.strategy.factors:
        scheme = options.strategy.factors
        return (
            f'scheme="{scheme}": factors of a node\'s ranks do not add up to fewer: as many leave '
            "the node as there are ranks, so a sum in the node saves nothing"
        )
    if options.strategy.name in SPLITTING_STRATEGIES:
        return f"strategy {options.strategy.name!r}: each rank pulls from servers by itself there"
    if options.local.mode == SHARED and options.codec != RAW:
        return (
            f"codec {options.codec!r}: a rank carries a share of each large tensor, and a codec "
            'needs a tensor\'s shape; use local="leader"'
        )
    return ""
