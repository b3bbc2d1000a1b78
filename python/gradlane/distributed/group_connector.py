"""This rank's end of a group's connections: where it listens, and what it connects with."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch.distributed import DistBackendError

from gradlane.training.core import load_core
from gradlane.training.options.option_fields import with_environment
from gradlane.training.rendezvous import addresses
from gradlane.training.rendezvous.rendezvous import store_address

if TYPE_CHECKING:
    from gradlane.distributed.core import CoreGroup
    from gradlane.distributed.options import GroupOptions

JOB = "torch.distributed"
"""What signatures of groups are for."""


class GroupConnector:
    """A listener, until a group takes it.

    Args:
        options: of the group; what is not given is read from the environment.
        store: of the group, for the interface that reaches it.
        name: of the group.
    """

    def __init__(self, options: GroupOptions, store: Any, name: str) -> None:
        self._core: Any = load_core()
        self._network = with_environment(options.network, os.environ)
        self._spin_us, self._name = options.spin_us, name
        self._reached = store_address(store, os.environ)
        self._listener: Any = None
        self.secret = self._network.read_secret()

    def wait_s(self, timeout: timedelta | None) -> float:
        """Return the seconds within which all ranks have to come."""
        given_s = float("inf") if timeout is None else timeout.total_seconds()
        return min(self._network.connect_timeout_s, given_s)

    def listen(self) -> str:
        """Listen, and return the `host:port` that other ranks reach this one at."""
        network = self._network
        low, high = network.ports or (0, 0)
        hosts = addresses.listening_addresses(
            network.interface or os.environ.get("GRADLANE_INTERFACE"),
            network.advertise,
            self._reached,
        )
        for host in hosts:
            try:
                self._listener = self._core.Listener(host, low, high)
            except OSError:
                if host == hosts[-1]:
                    raise
                continue
            reached = addresses.resolve(network.advertise or host)
            return addresses.endpoint(reached, self._listener.port)
        raise AssertionError("there is an address to listen on")

    def connect(
        self, job: str, rank: int, peers: list[str], generation: int, secret: str, wait_s: float
    ) -> CoreGroup:
        """Connect all ranks.

        Args:
            job: the same on every rank.
            rank: this rank.
            peers: `host:port` of every rank.
            generation: number of the membership.
            secret: the same on every rank.
            wait_s: seconds for all ranks to come.

        Raises:
            DistBackendError: a rank did not come in time, or was refused; the message names it.
        """
        try:
            group: CoreGroup = self._core.Group(
                self._listener,
                name=self._name,
                job=job,
                rank=rank,
                peers=peers,
                generation=generation,
                secret=secret.encode(),
                seal=self._network.seal and self.secret is not None,
                connect_timeout_s=wait_s,
                silence_timeout_s=self._network.silence_timeout_s,
                spin_us=self._spin_us,
            )
        except self._core.ChannelError as error:
            raise DistBackendError(f"rank {rank}, group {self._name!r}: {error.args[0]}") from error
        return group

    def close(self) -> None:
        """Stop to listen, unless a group has taken the listener."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
