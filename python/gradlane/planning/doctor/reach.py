"""Whether each rank reaches each other one: plain TCP connections, one way at a time."""

from __future__ import annotations

import concurrent.futures
import contextlib
import socket
from collections.abc import Mapping

CONNECT_TIMEOUT_S = 5.0
_AT_ONCE = 16


def unreached(peers: Mapping[int, tuple[str, int]]) -> dict[int, str]:
    """Connect to ranks; return why each of those that are not reached is not.

    Args:
        peers: host and port of each rank.
    """

    def reach(rank: int) -> str:
        try:
            with contextlib.closing(
                socket.create_connection(peers[rank], timeout=CONNECT_TIMEOUT_S)
            ):
                return ""
        except OSError as error:
            return str(error)

    with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:
        reasons = dict(zip(peers, pool.map(reach, peers), strict=True))
    return {rank: reason for rank, reason in reasons.items() if reason}
