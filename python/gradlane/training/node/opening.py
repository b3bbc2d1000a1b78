"""Opening of a channel whose ranks add up on their nodes first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import Tensor

from gradlane.errors import RefusedError
from gradlane.training.core import CoreChannel, CoreModule
from gradlane.training.node.blocks import room_offsets
from gradlane.training.node.channel import NodeChannel
from gradlane.training.node.collective_queue import CollectiveQueue
from gradlane.training.node.devices import agree_on_sum_backend
from gradlane.training.node.failure import KEEPALIVES_PER_TIMEOUT
from gradlane.training.node.group import NodeGroup, open_node_store
from gradlane.training.node.layout import NodeLayout
from gradlane.training.node.link import LocalLink, connect
from gradlane.training.node.parts import (
    BLOCKS,
    TensorPart,
    cut_into_parts,
    rows_of_leader,
)
from gradlane.training.options.codec_options import RAW
from gradlane.training.options.compatibility import Conflict, Feature, Features, conflict
from gradlane.training.options.momentum import keeps_momentum
from gradlane.training.options.options import Options
from gradlane.training.rendezvous.rendezvous import RendezvousScope

OpenInterNode = Callable[[Sequence[Mapping[str, Any]], Sequence[int]], CoreChannel]
"""Opens a channel of the core with these tensors between these ranks."""


def open_node_channel(
    core: CoreModule,
    options: Options,
    scope: RendezvousScope,
    rows: Sequence[Mapping[str, Any]],
    layout: NodeLayout,
    *,
    source_rank: int,
    open_inter_node: OpenInterNode,
    gradients: Sequence[Tensor] = (),
) -> NodeChannel:
    """Connect the ranks of this node and, on a leader, the nodes.

    Args:
        core: the compiled core or its double.
        options: the session's.
        scope: for the agreement of the ranks.
        rows: the plan's tensors.
        layout: of the ranks on nodes.
        source_rank: the rank whose values step 0 broadcasts.
        open_inter_node: opens the channel between nodes.
        gradients: tensors like the gradients of the first tensors, where they are torch's.

    Raises:
        ValueError: a tensor's scheme or codec excludes sums on nodes, collectives were asked for
            and cannot be used, or training that is to go on has a single node.
        RendezvousError: ranks cannot reach each other.
    """
    features = {Feature.GOING_ON: "going_on"} if options.going_on.on else {}
    if found := nodes_conflict(rows, layout, features):
        raise RefusedError(found.told('use local="off"'))
    sum_backend = agree_on_sum_backend(options, scope, layout, gradients)
    parts = cut_into_parts(rows, layout.leaders)
    rooms, memory_bytes = room_offsets(parts, layout)
    link = connect(
        layout,
        scope,
        memory_bytes,
        options.network.connect_timeout_s,
        core,
        options.network.silence_timeout_s / KEEPALIVES_PER_TIMEOUT,
    )
    collectives = inter_node = None
    try:
        if sum_backend.backend:
            collectives = _open_collectives(
                options, scope, link, parts, gradients, sum_backend.backend
            )
        if layout.local_rank < layout.leaders:
            source_node = source_rank // layout.local_size
            nodes = [(source_node + index) % layout.nodes for index in range(layout.nodes)]
            ranks = [layout.rank_of(node, layout.local_rank) for node in nodes]
            leader_rows = rows_of_leader(rows, parts, layout.local_rank, layout.local_size)
            inter_node = open_inter_node(leader_rows, ranks)
    except BaseException:
        if collectives is not None:
            collectives.cancel()
        link.close()
        raise
    return NodeChannel(
        core,
        link,
        rows,
        parts,
        rooms,
        inter_node,
        source_rank=source_rank,
        progress_timeout_s=options.network.progress_timeout_s,
        silence_timeout_s=options.network.silence_timeout_s,
        goes_on=options.going_on.on,
        collectives=collectives,
        sum_backend=sum_backend,
    )


def _open_collectives(
    options: Options,
    scope: RendezvousScope,
    link: LocalLink,
    parts: Sequence[TensorPart],
    gradients: Sequence[Tensor],
    backend: str,
) -> CollectiveQueue:
    layout, timeout_s = link.layout, options.network.connect_timeout_s

    def open_group() -> NodeGroup:
        return NodeGroup(backend, open_node_store(layout, scope, timeout_s), layout)

    collectives = CollectiveQueue(link, parts, gradients, open_group)
    collectives.wait_open(timeout_s)
    return collectives


def nodes_conflict(
    rows: Sequence[Mapping[str, Any]], layout: NodeLayout, among: Features = MappingProxyType({})
) -> Conflict | None:
    """Return what keeps these nodes from adding up a plan's tensors; None if nothing does.

    Args:
        rows: the plan's tensors.
        layout: of the ranks on nodes.
        among: further features in force.
    """
    features = dict(among)
    for row in rows:
        scheme, codec = row.get("scheme", "ps"), row.get("codec", RAW)
        if scheme not in ("ps", "ring", BLOCKS):
            features[Feature.ONE_OWNER] = f"tensor {row['name']!r} by scheme {scheme!r}"
        if keeps_momentum(codec):
            features[Feature.MOMENTUM_CODEC] = f"codec {codec!r} of {row['name']!r}"
    nodes = {Feature.NODES: "sums on nodes"}
    if layout.nodes == 1:
        nodes[Feature.ONE_NODE] = "sums on a single node"
    return conflict(nodes, features)
