"""The values of `local` and `local_sums`, and the options that they exclude."""

from __future__ import annotations

from dataclasses import replace

from gradlane.errors import RefusedError
from gradlane.training.options.compatibility import Conflict, Feature, conflict
from gradlane.training.options.options import Options

LEADER, SHARED, OFF, AUTO = "leader", "shared", "off", "auto"
HOST, COLLECTIVE = "host", "collective"
NODE_STRATEGIES = {"hierarchical": LEADER, "hierarchical-shared": SHARED}
"""Names of `p3` between nodes with sums on nodes, and the value of `local` for each."""


def with_local(options: Options) -> Options:
    """Return options whose `local` goes with the others: `"auto"` becomes `"off"` where it does
    not.

    Raises:
        ValueError: sums on nodes were asked for and do not go with another option.
    """
    if options.local.mode == OFF:
        return options
    found = _nodes_conflict(options)
    if found is None:
        return options
    if options.local.where == COLLECTIVE:
        words = options.features[Feature.COLLECTIVE]
        raise RefusedError(f"{words} with {found.why}; {Feature.COLLECTIVE.without}")
    if options.local.mode == AUTO:
        return replace(options, local=replace(options.local, mode=OFF))
    raise RefusedError(found.text)


def nodes_refusal(options: Options) -> str:
    """Return the option that excludes sums on nodes, with its reason; empty if all go with them."""
    found = _nodes_conflict(options)
    return "" if found is None else found.why


def _nodes_conflict(options: Options) -> Conflict | None:
    return conflict({Feature.NODES: f'local="{options.local.mode}"'}, options.features)
