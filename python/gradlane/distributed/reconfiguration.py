"""Groups whose members change: `init_process_group("gradlane", enable_reconfigure=True)`.

A handle names a process that is ready to join: where it listens, and a token. All members get the
same number and the same handles from their program, and each opens new connections to the others.
Whatever belongs to another membership is refused: by the handshake, whose job is the number and
all handles, and by the generation in every frame.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import DistBackendError
from torch.distributed import distributed_c10d as registry

from gradlane.distributed.backend import GradlaneBackend
from gradlane.distributed.group_connector import JOB, GroupConnector
from gradlane.distributed.options import GroupOptions
from gradlane.distributed.work import Futures, GradlaneWork
from gradlane.errors import RendezvousError
from gradlane.training.rendezvous.signatures import StoreSigner
from gradlane.training.torch_internals import c10d

_PATH = "gradlane/handle"

_open: set[ReconfigurableGroup] = set()
"""Groups that were not left: torch may lose the Python object, and all that the class overrides."""


class NoMembers:
    """What a group has in place of connections before it is configured."""

    def __init__(self, name: str) -> None:
        self._name = name

    def begin(self, *_: Any) -> Any:
        """Refuse a call."""
        raise DistBackendError(
            f"group {self._name!r} has no members: give all of them the same number and handles, "
            "and call torch.distributed._reconfigure, before its first call and after a failed one"
        )

    send = receive = begin

    def begun(self) -> int:
        """Return 0: no collective has begun."""
        return 0

    def close(self) -> None:
        """Do nothing."""

    join = close


@dataclass(frozen=True)
class Handle:
    """A process that is ready to join.

    Attributes:
        rank: its rank in the membership before, or that of `init_process_group`.
        address: where it listens.
        token: drawn for this handle.
    """

    rank: int
    address: str
    token: str

    @classmethod
    def read(cls, text: str, signer: StoreSigner) -> Handle:
        """Read a handle.

        Raises:
            DistBackendError: it is none, or not signed with this rank's secret.
        """
        try:
            found = json.loads(signer.check(_PATH, text.encode(), None))
            return cls(int(found["rank"]), str(found["address"]), str(found["token"]))
        except (RendezvousError, ValueError, KeyError, TypeError) as error:
            raise DistBackendError(f"{text[:80]!r} is no handle for this group: {error}") from None

    def write(self, signer: StoreSigner) -> str:
        """Return the handle's text."""
        return signer.sign(_PATH, json.dumps(self.__dict__)).decode()


class _Members(GradlaneBackend):
    """The backend of a group that can be reconfigured, as torch finds it for a device."""

    supports_reconfigure = True


class ReconfigurableGroup(c10d.ProcessGroup):  # type: ignore[misc]
    """A process group that opens a new membership each time it is reconfigured.

    It is a `ProcessGroup`, since torch asks a backend for its rank and size once.

    Args:
        store: of the group, for the interface that reaches it.
        rank: this rank until the group is configured.
        size: number of ranks until then.
        name: of the group, the same in every process.
        timeout: for connections, and of calls that give none.
        options: see `GroupOptions`.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        name: str,
        timeout: timedelta,
        options: GroupOptions,
    ) -> None:
        super().__init__(store, rank, size)
        self._options, self._store, self._own_name = options, store, name
        self._timeout = timeout
        none: Any = NoMembers(name)
        self._members = _Members(none, rank, size, name, timeout)
        kind = c10d.ProcessGroup.BackendType.CUSTOM
        self._set_default_backend(kind)
        for device in ("cpu", "cuda"):
            self._register_backend(torch.device(device), kind, self._members)
        self._used: set[int] = set()
        self._connector: GroupConnector | None = None
        self._handle = ""
        _open.add(self)

    # What the group is

    def rank(self) -> int:
        """Return this rank in the membership."""
        return self._members.rank()

    def size(self) -> int:
        """Return the number of members."""
        return self._members.size()

    getRank, getSize = rank, size  # noqa: N815

    def shutdown(self) -> None:
        """Leave the group."""
        self._forget_handle()
        _open.discard(self)
        self._members.shutdown()

    @property
    def supports_reconfigure(self) -> bool:
        """Return True; a group of several backends is refused.

        Raises:
            DistBackendError: the group has another backend, too.
        """
        backends = registry._world.pg_backend_config.get(self, "")
        others = {it.rpartition(":")[2] for it in backends.split(",")} - {"gradlane", ""}
        if others:
            raise DistBackendError(
                f"a group of several backends ({backends}) cannot be reconfigured: give gradlane a "
                'group of its own, init_process_group("gradlane", enable_reconfigure=True)'
            )
        return True

    def get_reconfigure_handle(self) -> str:
        """Return what the others need to include this process, the same until it is used."""
        assert self.supports_reconfigure
        if self._connector is None:
            connector = GroupConnector(self._options, self._store, self._own_name)
            handle = Handle(self.rank(), connector.listen(), secrets.token_hex(16))
            self._connector, self._handle = connector, handle.write(self._signer(connector))
        return self._handle

    def reconfigure(self, opts: Any) -> GradlaneWork:
        """Leave the membership, and connect that of the handles.

        Calls that run fail here, and the ranks that wait for them are told. A mistake is said
        before, and the group goes on as it is.

        Args:
            opts: torch's `ReconfigureOptions`. A list of handles gives the ranks; a set is ordered
                by the ranks before.

        Raises:
            DistBackendError: a handle is wrong, this process has none among them, the number was
                used, or a member did not come in time.
            ValueError: a hint was given, or handles are missing or doubled.
        """
        assert self.supports_reconfigure
        connector, texts = self._connector, list(opts.handles)
        self._check(opts, texts)
        if connector is None or self._handle not in texts:
            raise DistBackendError(
                f"rank {self.rank()}, group {self._own_name!r}: its own handle is not among the "
                f"{len(texts)} given: get a new one after each call, give it to all members, and "
                "give all of their handles to each"
            )
        signer = self._signer(connector)
        handles = {text: Handle.read(text, signer) for text in texts}
        if isinstance(opts.handles, (set, frozenset)):
            texts.sort(key=lambda text: (handles[text].rank, text))
        rank, peers = texts.index(self._handle), [handles[text].address for text in texts]
        digest = _digest(opts.uuid, texts)
        tokens = "".join(sorted(handle.token for handle in handles.values()))
        secret = connector.secret if connector.secret is not None else _digest(opts.uuid, [tokens])
        self._used.add(opts.uuid)
        none: Any = NoMembers(self._own_name)
        self._members.replace(none, self.rank(), self.size())
        try:
            generation = int(digest[:8], 16)
            wait_s = connector.wait_s(self._timeout if opts.timeout is None else opts.timeout)
            group = connector.connect(digest, rank, peers, generation, secret, wait_s)
        finally:
            self._forget_handle()
        self._members.replace(group, rank, len(texts))
        return GradlaneWork(Futures(group), group, [], [], [], self._members.failure, None)

    def _check(self, opts: Any, texts: list[str]) -> None:
        where = f"rank {self.rank()}, group {self._own_name!r}"
        if not texts:
            raise ValueError(f"{where}: reconfigure needs the handle of at least one process")
        if len(set(texts)) != len(texts):
            raise ValueError(f"{where}: reconfigure was given a handle twice")
        if opts.uuid in self._used:
            raise DistBackendError(
                f"{where}: the number {opts.uuid} was already used: give each call a new one"
            )
        if opts.hints:
            raise ValueError(f"{where}: there are no hints, and {opts.hints} were given")

    def _forget_handle(self) -> None:
        connector, self._connector, self._handle = self._connector, None, ""
        if connector is not None:
            connector.close()

    def _signer(self, connector: GroupConnector) -> StoreSigner:
        return StoreSigner.of(self.rank(), connector.secret, JOB, "of handles")


def _digest(number: int, texts: Iterable[str]) -> str:
    content = json.dumps([number, *texts])
    return hashlib.sha256(content.encode()).hexdigest()
