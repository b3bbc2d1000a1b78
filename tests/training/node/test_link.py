"""What ranks of a node tell each other last is heard, however they end."""

from __future__ import annotations

import concurrent.futures
import itertools
import socket
from typing import Any

from gradlane.training.core import load_core
from gradlane.training.node.layout import NodeLayout
from gradlane.training.node.link import DISCONNECTED, FAILED, RESULT, LocalLink
from tests.built import needs_core

pytestmark = needs_core


def linked() -> list[LocalLink]:
    """Return the links of the two ranks of a node."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    core: Any = load_core()

    def link(rank: int) -> LocalLink:
        return LocalLink(NodeLayout(1, 2, 0, rank, 1), 64, {1 - rank: ends[rank]}, core, 60.0)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        return list(pool.map(link, range(2)))


def test_the_reason_of_a_rank_that_ends_before_it_has_read_everything() -> None:
    first, second = linked()
    # It closes with this unread, which resets the connection.
    first.send(1, RESULT)
    second.send_text(0, FAILED, b"the reason")
    second.close()
    heard = list(itertools.islice(first.messages(60.0), 2))
    first.close()
    assert [one.kind for one in heard if one is not None] == [FAILED, DISCONNECTED]
    assert heard[0] is not None and heard[0].text == b"the reason"
