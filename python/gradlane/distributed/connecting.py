"""Connection of a group's ranks through the store that torch gives it."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from torch.distributed import DistBackendError

from gradlane.distributed.backend import GradlaneBackend
from gradlane.distributed.group_connector import JOB, GroupConnector
from gradlane.distributed.options import GroupOptions
from gradlane.distributed.reconfiguration import ReconfigurableGroup
from gradlane.training.options.secret import draw_secret
from gradlane.training.rendezvous import addresses
from gradlane.training.rendezvous.rendezvous import store_address
from gradlane.training.rendezvous.signatures import StoreSigner

_START = "gradlane/start"


def create(settings: Any, options: Any) -> Any:
    """Return the backend of this rank, or a group that waits for its members.

    Args:
        settings: torch's `_DistributedBackendOptions`.
        options: `GroupOptions`, other options of torch, or None.

    Raises:
        DistBackendError: a rank did not come in time, or was refused; the message names it.
        ValueError: an option is wrong.
    """
    own = options if isinstance(options, GroupOptions) else GroupOptions()
    rank, size = settings.group_rank, settings.group_size
    name, store = str(settings.group_id or ""), settings.store
    if getattr(settings, "enable_reconfigure", False):
        return ReconfigurableGroup(store, rank, size, name, settings.timeout, own)
    return connect(store, rank, size, name, settings.timeout, own)


def connect(
    store: Any, rank: int, size: int, name: str, timeout: timedelta, options: GroupOptions
) -> GradlaneBackend:
    """Connect all ranks of a group by way of their store, and return the backend of this one.

    Args:
        store: of the group alone.
        rank: this rank.
        size: number of ranks.
        name: of the group, the same on every rank.
        timeout: for connections, and of calls that give none.
        options: see `GroupOptions`.

    Raises:
        DistBackendError: a rank did not come in time, or was refused; the message names it.
        ValueError: an option is wrong.
    """
    connector = GroupConnector(options, store, name)
    wait_s = connector.wait_s(timeout)
    at = addresses.endpoint(*store_address(store, os.environ))
    signer = StoreSigner.of(rank, connector.secret, JOB, at)
    meeting = _Meeting(store, signer, rank, size, name, wait_s)
    start = {"job": secrets.token_hex(16), "secret": draw_secret()} if rank == 0 else None
    if start is not None and connector.secret is not None:
        del start["secret"]
    start = meeting.share(start)
    try:
        peers = meeting.exchange(connector.listen())
        secret = connector.secret if connector.secret is not None else start["secret"]
        group = connector.connect(start["job"], rank, peers, 0, secret, wait_s)
    finally:
        connector.close()
    return GradlaneBackend(group, rank, size, name, timeout)


class _Meeting:
    """The values that the ranks of a group leave for each other in its store."""

    def __init__(
        self, store: Any, signer: StoreSigner, rank: int, size: int, name: str, wait_s: float
    ) -> None:
        self._store, self._signer = store, signer
        self._rank, self._size, self._name, self._wait_s = rank, size, name, wait_s

    def share(self, value: Mapping[str, str] | None) -> dict[str, str]:
        """Return the value of rank 0, which gives it."""
        if value is not None:
            self._leave(_START, json.dumps(value))
        found = json.loads(self._read(_START, 0))
        return {str(key): str(text) for key, text in found.items()}

    def exchange(self, address: str) -> list[str]:
        """Return the addresses of all ranks; this one gives its own."""
        self._leave(f"gradlane/address/{self._rank}", address)
        return [self._read(f"gradlane/address/{rank}", rank) for rank in range(self._size)]

    def _leave(self, key: str, value: str) -> None:
        self._store.set(key, self._signer.sign(self._path(key), value))

    def _read(self, key: str, writer: int) -> str:
        try:
            self._store.wait([key], timedelta(seconds=min(self._wait_s, 1e6)))
        except RuntimeError as error:
            raise DistBackendError(
                f"rank {self._rank}, group {self._name!r}: rank {writer} of {self._size} did not "
                f"come within {self._wait_s:g} s: check that every rank of the group calls "
                "init_process_group or new_group"
            ) from error
        return self._signer.check(self._path(key), self._store.get(key), writer).decode()

    def _path(self, key: str) -> str:
        return f"{self._name}/{key}"
