"""Whether each rank reaches each other one: plain TCP connections, one way at a time."""

from __future__ import annotations

import concurrent.futures
import contextlib
import socket
from collections.abc import Mapping
from types import TracebackType

from gradlane.training.options.groups import Network

CONNECT_TIMEOUT_S = 5.0
_AT_ONCE = 16


class Doorstep:
    """A listening socket, as a session would have it; the kernel accepts for it."""

    def __init__(self, address: str, network: Network) -> None:
        """Listen.

        Args:
            address: of the interface that a session would take.
            network: with the ports that it would take.

        Raises:
            OSError: no port is free, or this machine has no such address.
        """
        low, high = network.ports or (0, 0)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        error: OSError | None = None
        for port in range(low, high + 1):
            try:
                self._socket = socket.create_server((address, port), family=family, backlog=1024)
                break
            except OSError as reason:
                error = reason
        else:
            raise OSError(f"cannot listen on {address}, ports {low} to {high}: {error}")
        self.port: int = self._socket.getsockname()[1]

    def __enter__(self) -> Doorstep:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop listening."""
        self._socket.close()


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
