"""The layout of ranks on nodes, the same on all ranks.

Nodes are blocks of consecutive ranks, as torchrun, mpirun and srun number them. The launchers'
variables are checked against the machines that the ranks report.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradlane.errors import RanksDifferError
from gradlane.formats.untrusted import escaped
from gradlane.training.log import log
from gradlane.training.node.rules import AUTO, SHARED
from gradlane.training.options.options import Options
from gradlane.training.rendezvous.environment import find_local_rank, find_local_size
from gradlane.training.rendezvous.rendezvous import RendezvousScope, node_name


@dataclass(frozen=True)
class NodeLayout:
    """Position of a rank on its node, and of its node among all.

    Attributes:
        nodes: number of nodes.
        local_size: ranks on each.
        node: this rank's node; nodes are numbered by their ranks.
        local_rank: this rank's number on its node.
        leaders: number of ranks of each node that talk to the network, its first ones.
    """

    nodes: int
    local_size: int
    node: int
    local_rank: int
    leaders: int

    def rank_of(self, node: int, local_rank: int) -> int:
        """Return the world rank of a local rank of a node."""
        return node * self.local_size + local_rank


def agree_on_layout(
    options: Options, scope: RendezvousScope, environment: Mapping[str, str]
) -> NodeLayout | None:
    """Agree on the layout; a collective call of all ranks with one `local`.

    Args:
        options: the session's.
        scope: for the agreement of the ranks.
        environment: the launcher's variables.

    Returns:
        The layout; None with `local="auto"` where ranks cannot be grouped by node or each node has
        one rank, so that every rank talks to the network by itself.

    Raises:
        RanksDifferError: the ranks' nodes are no such blocks; the same text on every rank.
    """
    rank_info = scope.rank_info
    report = [find_local_rank(environment), find_local_size(environment), node_name()]
    scope.put(f"local/{rank_info.rank}", json.dumps(report))
    reports = [json.loads(scope.get(f"local/{rank}", rank)) for rank in range(rank_info.world_size)]
    obstacle = _block_obstacle(reports)
    size = reports[0][1]
    if options.local.mode == AUTO and (obstacle or size == 1 or size == rank_info.world_size):
        if obstacle and rank_info.rank == 0:
            log.warning("each rank talks to the network by itself: %s", escaped(obstacle))
        return None
    if obstacle:
        raise RanksDifferError(
            f"local={options.local.mode!r}: {obstacle}. Start as many ranks on every node, "
            'numbered node by node, as torchrun --nproc-per-node does, or use local="off"'
        )
    leaders = size if options.local.mode == SHARED else 1
    return NodeLayout(
        rank_info.world_size // size, size, rank_info.rank // size, rank_info.rank % size, leaders
    )


def _block_obstacle(reports: Sequence[Sequence[Any]]) -> str:
    """Return why the ranks are no equal blocks, each on one machine; empty if they are."""
    size = reports[0][1]
    for rank, (local_rank, local_size, node) in enumerate(reports):
        if local_size != size:
            return f"rank 0 is one of {size} ranks of its node and rank {rank} one of {local_size}"
        if local_rank != rank % size:
            return f"rank {rank} has local rank {local_rank} of {size}, not {rank % size}"
        first = rank - rank % size
        if node != reports[first][2]:
            return f"ranks {first} and {rank} should share a node and are on different machines"
    if len(reports) % size:
        return f"{len(reports)} ranks do not fill nodes of {size}"
    return ""
