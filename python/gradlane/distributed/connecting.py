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
from gradlane.distributed.options import GroupOptions
from gradlane.training.core import load_core
from gradlane.training.options.option_fields import with_environment
from gradlane.training.options.option_groups import Network
from gradlane.training.options.secret import draw_secret
from gradlane.training.rendezvous import addresses
from gradlane.training.rendezvous.rendezvous import store_address
from gradlane.training.rendezvous.signatures import StoreSigner

_JOB = "torch.distributed"
_START = "gradlane/start"


def connect(settings: Any, options: Any) -> GradlaneBackend:
    """Connect all ranks of a group and return the backend of this one.

    Args:
        settings: torch's `_DistributedBackendOptions`.
        options: `GroupOptions`, other options of torch, or None.

    Raises:
        DistBackendError: a rank did not come in time, or was refused; the message names it.
        ValueError: an option is wrong.
    """
    rank, size, name = settings.group_rank, settings.group_size, str(settings.group_id or "")
    own = options if isinstance(options, GroupOptions) else GroupOptions()
    network = with_environment(own.network, os.environ)
    if getattr(settings, "enable_reconfigure", False):
        raise DistBackendError(
            f"group {name!r}: the backend gradlane cannot be reconfigured yet: leave "
            "enable_reconfigure off"
        )
    core: Any = load_core()
    store, wait_s = settings.store, min(network.connect_timeout_s, _seconds(settings.timeout))
    at = addresses.endpoint(*store_address(store, os.environ))
    user_secret = network.read_secret()
    meeting = _Meeting(store, StoreSigner.of(rank, user_secret, _JOB, at), rank, size, name, wait_s)
    start = {"job": secrets.token_hex(16), "secret": draw_secret()} if rank == 0 else None
    if start is not None and user_secret is not None:
        del start["secret"]
    start = meeting.share(start)
    listener, host = _listen(core, network, store)
    try:
        peers = meeting.exchange(addresses.endpoint(host, listener.port))
        secret = user_secret if user_secret is not None else start["secret"]
        group = core.Group(
            listener,
            name=name,
            job=start["job"],
            rank=rank,
            peers=peers,
            secret=secret.encode(),
            seal=network.seal and user_secret is not None,
            connect_timeout_s=wait_s,
            silence_timeout_s=network.silence_timeout_s,
            spin_us=own.spin_us,
        )
    except core.ChannelError as error:
        raise DistBackendError(f"rank {rank}, group {name!r}: {error.args[0]}") from error
    finally:
        # A listener that the group has taken is not this one's any more.
        listener.close()
    return GradlaneBackend(group, rank, size, name, settings.timeout)


def _seconds(timeout: timedelta | None) -> float:
    return float("inf") if timeout is None else timeout.total_seconds()


def _listen(core: Any, network: Network, store: Any) -> tuple[Any, str]:
    """Return a listener and the host that other ranks reach it at."""
    low, high = network.ports or (0, 0)
    reached = store_address(store, os.environ)
    hosts = addresses.listening_addresses(
        network.interface or os.environ.get("GRADLANE_INTERFACE"), network.advertise, reached
    )
    for host in hosts:
        try:
            listener = core.Listener(host, low, high)
        except OSError:
            if host == hosts[-1]:
                raise
            continue
        return listener, addresses.resolve(network.advertise or host)
    raise AssertionError("there is an address to listen on")


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
