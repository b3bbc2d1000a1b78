"""Which ranks share a node, as all ranks see it alike.

Nodes are blocks of consecutive ranks, as torchrun, mpirun and srun number them. What launchers say
is checked against the machines that ranks say they are on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradlane.errors import RanksDifferError
from gradlane.training.node.rules import AUTO, SHARED
from gradlane.training.options.options import Options
from gradlane.training.rendezvous.environment import find_local_rank, find_local_size
from gradlane.training.rendezvous.rendezvous import RendezvousScope, node_name


@dataclass(frozen=True)
class Layout:
    """Where a rank stands among the ranks of its node, and its node among all.

    Attributes:
        nodes: number of nodes.
        local_size: ranks on each.
        node: this rank's node; nodes are numbered by their ranks.
        local_rank: this rank's number on its node.
        leaders: how many ranks of each node talk to the network, its first ones.
    """

    nodes: int
    local_size: int
    node: int
    local_rank: int
    leaders: int

    def rank_of(self, node: int, local_rank: int) -> int:
        """Return a rank's number among all."""
        return node * self.local_size + local_rank


def agree_on_layout(
    options: Options, scope: RendezvousScope, environment: Mapping[str, str]
) -> Layout | None:
    """Find the layout that all ranks can have; a collective call of all ranks with one `local`.

    Args:
        options: the session's.
        scope: where the ranks agree.
        environment: the launcher's variables.

    Returns:
        The layout; None where every rank talks to the network by itself: with `local="auto"` where
        ranks cannot be put together, or there is one a node.

    Raises:
        RanksDifferError: the ranks' nodes are no such blocks; the same text on every rank.
    """
    rank_info = scope.rank_info
    report = [find_local_rank(environment), find_local_size(environment), node_name()]
    scope.put(f"local/{rank_info.rank}", json.dumps(report))
    reports = [json.loads(scope.get(f"local/{rank}", rank)) for rank in range(rank_info.world_size)]
    obstacle = _block_obstacle(reports)
    size = reports[0][1]
    if options.local == AUTO and (obstacle or size == 1 or size == rank_info.world_size):
        return None
    if obstacle:
        raise RanksDifferError(
            f"local={options.local!r}: {obstacle}. Start as many ranks on every node, numbered "
            "node by "
            'node, as torchrun --nproc-per-node does, or use local="off"'
        )
    leaders = size if options.local == SHARED else 1
    return Layout(
        rank_info.world_size // size, size, rank_info.rank // size, rank_info.rank % size, leaders
    )


def _block_obstacle(reports: Sequence[Sequence[Any]]) -> str:
    """Say why ranks are no equal blocks of consecutive ranks, each on one machine; empty if so."""
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
