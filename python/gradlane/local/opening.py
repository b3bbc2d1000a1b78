"""How a channel is opened whose ranks add up on their nodes first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gradlane.codec_choice import codec_facts
from gradlane.core import Channel
from gradlane.local.channel import NodeChannel
from gradlane.local.layout import Layout
from gradlane.local.link import connect
from gradlane.local.shares import cut, memory_bytes, rows_of

if TYPE_CHECKING:
    from gradlane.connection import Surroundings
    from gradlane.rendezvous import Meeting

OpenBetween = Callable[[Sequence[Mapping[str, Any]], Sequence[int]], Channel]
"""Opens a channel of the core with these tensors between these ranks."""


def open_node_channel(
    around: Surroundings,
    meeting: Meeting,
    rows: Sequence[Mapping[str, Any]],
    layout: Layout,
    *,
    first: int,
    open_between: OpenBetween,
) -> NodeChannel:
    """Connect the ranks of this node, and, if this one carries, the nodes.

    Args:
        around: what the session gives.
        meeting: where the ranks agree.
        rows: the plan's tensors.
        layout: which ranks share nodes.
        first: the rank whose values step 0 spreads.
        open_between: opens the channel between nodes.

    Raises:
        ValueError: a tensor travels in a way that sums on nodes do not go with.
        RendezvousError: ranks cannot reach each other.
    """
    _check_rows(rows)
    parts = cut(rows, layout.carriers)
    link = connect(layout, meeting, memory_bytes(parts), around.options.connect_timeout_s)
    between = None
    if layout.local_rank < layout.carriers:
        ahead = first // layout.local_size
        nodes = [(ahead + index) % layout.nodes for index in range(layout.nodes)]
        ranks = [layout.rank_of(node, layout.local_rank) for node in nodes]
        try:
            between = open_between(rows_of(rows, parts, layout.local_rank), ranks)
        except BaseException:
            link.close()
            raise
    return NodeChannel(
        around.core,
        link,
        rows,
        parts,
        between,
        source_rank=first,
        progress_timeout_s=around.options.progress_timeout_s,
    )


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
