"""What needs single ranks is refused where a node's ranks take part as one."""

from __future__ import annotations

from typing import cast

import pytest

from gradlane.training.core import Channel, CoreModule, RankChannel, rank_channel
from gradlane.training.model.contributors import Contributors
from gradlane.training.model.failure_latch import FailureLatch
from gradlane.training.node.channel import NodeChannel

NODE = NodeChannel.__new__(NodeChannel)
CORE = cast(CoreModule, None)


def calls_of(protocol: type) -> set[str]:
    return {name for name in dir(protocol) if not name.startswith("_")}


def test_a_nodes_channel_has_every_call_but_those_of_single_ranks() -> None:
    channel: Channel = NODE  # The types say so, too.
    assert calls_of(Channel) <= calls_of(NodeChannel)
    of_single_ranks = calls_of(RankChannel) - calls_of(Channel)
    assert of_single_ranks and not of_single_ranks & calls_of(type(channel))


def test_what_needs_single_ranks_is_refused_with_the_remedy() -> None:
    refused = 'does not go with sums on nodes: use local="off"'
    with pytest.raises(ValueError, match=f"updating on servers {refused}"):
        rank_channel(NODE, "updating on servers")
    with pytest.raises(ValueError, match=f"leaving out late ranks {refused}"):
        Contributors(CORE, NODE, FailureLatch()).lack_this_rank(1)
