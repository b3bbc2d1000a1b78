"""How a channel is opened whose ranks add up on their nodes first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from gradlane.training.core import Channel, CoreModule
from gradlane.training.node.channel import NodeChannel
from gradlane.training.node.collective_queue import CollectiveQueue
from gradlane.training.node.devices import agree_on_sums
from gradlane.training.node.failure import SIGNS_PER_TIMEOUT
from gradlane.training.node.group import NodeGroup, meet_on_node
from gradlane.training.node.layout import Layout
from gradlane.training.node.link import LocalLink, connect
from gradlane.training.node.shares import Part, cut, memory_bytes, rows_of
from gradlane.training.options.codec_choice import codec_facts
from gradlane.training.options.options import Options
from gradlane.training.rendezvous.rendezvous import RendezvousScope

OpenBetween = Callable[[Sequence[Mapping[str, Any]], Sequence[int]], Channel]
"""Opens a channel of the core with these tensors between these ranks."""


def open_node_channel(
    core: CoreModule,
    options: Options,
    meeting: RendezvousScope,
    rows: Sequence[Mapping[str, Any]],
    layout: Layout,
    *,
    first: int,
    open_between: OpenBetween,
    gradients: Sequence[Tensor] = (),
) -> NodeChannel:
    """Connect the ranks of this node, and, if this one carries, the nodes.

    Args:
        core: the compiled core or its double.
        options: the session's.
        meeting: where the ranks agree.
        rows: the plan's tensors.
        layout: which ranks share nodes.
        first: the rank whose values step 0 spreads.
        open_between: opens the channel between nodes.
        gradients: tensors like the gradients of the first tensors, where they are torch's.

    Raises:
        ValueError: a tensor travels in a way that sums on nodes do not go with, or collectives
            were asked for and cannot be.
        RendezvousError: ranks cannot reach each other.
    """
    _check_rows(rows)
    sums = agree_on_sums(options, meeting, layout, gradients)
    parts = cut(rows, layout.carriers)
    link = connect(
        layout,
        meeting,
        memory_bytes(parts),
        options.network.connect_timeout_s,
        core,
        options.network.silence_timeout_s / SIGNS_PER_TIMEOUT,
    )
    lane = between = None
    try:
        if sums.backend:
            lane = _open_lane(options, meeting, link, parts, gradients, sums.backend)
        if layout.local_rank < layout.carriers:
            ahead = first // layout.local_size
            nodes = [(ahead + index) % layout.nodes for index in range(layout.nodes)]
            ranks = [layout.rank_of(node, layout.local_rank) for node in nodes]
            between = open_between(rows_of(rows, parts, layout.local_rank), ranks)
    except BaseException:
        if lane is not None:
            lane.let_go()
        link.close()
        raise
    return NodeChannel(
        core,
        link,
        rows,
        parts,
        between,
        source_rank=first,
        progress_timeout_s=options.network.progress_timeout_s,
        silence_timeout_s=options.network.silence_timeout_s,
        lane=lane,
        sums=sums,
    )


def _open_lane(
    options: Options,
    meeting: RendezvousScope,
    link: LocalLink,
    parts: Sequence[Part],
    gradients: Sequence[Tensor],
    backend: str,
) -> CollectiveQueue:
    layout, timeout_s = link.layout, options.network.connect_timeout_s

    def open_group() -> NodeGroup:
        return NodeGroup(backend, meet_on_node(layout, meeting, timeout_s), layout)

    lane = CollectiveQueue(link, parts, gradients, open_group)
    lane.wait_open(timeout_s)
    return lane


def _check_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    for row in rows:
        scheme = row.get("scheme", "ps")
        if scheme not in ("ps", "ring"):
            raise ValueError(
                f"tensor {row['name']!r} goes by scheme {scheme!r}, whose blocks are each rank's "
                'own and are not added up on nodes: use local="off"'
            )
        if "codec" in row:
            facts = codec_facts(row["codec"], row["dtype"], row["sizes"])
            if facts is not None and facts.residual_width:
                raise ValueError(
                    f"codec {row['codec']!r} of {row['name']!r} keeps what it has lost, which is "
                    'not kept where a node\'s ranks add up first: use local="off", or a codec '
                    "without error feedback, such as 'qsgd:bits=8'"
                )
