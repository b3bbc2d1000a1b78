"""How ranks find each other and agree before the first byte of training: through the c10d store.

Everything is a key under `gradlane/{job}/{start}/{channel}`, so restarts and models never meet in
one key. A rank that waits for a key names the rank that has not written it.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from gradlane.errors import GradlaneError, ProgressTimeout, RanksDiffer, RendezvousError
from gradlane.ranks import addresses
from gradlane.ranks.environment import Place, find_store_address
from gradlane.ranks.patience import Patience
from gradlane.ranks.starts import Start

_PRIVATE = b"private"
"""In place of a secret: every rank must have it from `GRADLANE_SECRET`."""
_SECRET_BYTES = 32
_LAST_WORDS = ("ending/", "metrics/")
"""Keys that rank 0 reads when all ranks have said goodbye."""
_OF_CHECKPOINTS = "checkpoint/"
"""Keys that are read while the last checkpoint is still written, and removed by who reads them."""


def open_store(place: Place, environment: Mapping[str, str], timeout_s: float) -> Store:
    """Return torch.distributed's default store, or else open the one that torchrun would use.

    Rank 0 hosts it, unless torchrun's agent does.

    Raises:
        ValueError: the environment names no host.
        RendezvousError: the store cannot be reached in time.
    """
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        from torch.distributed import distributed_c10d

        return distributed_c10d._get_default_store()
    if place.ranks == 1:
        return HashStore()
    host, port = find_store_address(environment)
    hosted_by_agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    try:
        return TCPStore(
            host,
            port,
            place.ranks,
            is_master=place.rank == 0 and not hosted_by_agent,
            timeout=datetime.timedelta(seconds=timeout_s),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except (RuntimeError, TimeoutError) as error:
        raise RendezvousError(
            f"rank {place.rank} cannot reach the rendezvous store at {host}:{port}: {error}; "
            "check MASTER_ADDR and MASTER_PORT, and that rank 0 is running"
        ) from error


def store_address(store: Store, environment: Mapping[str, str]) -> tuple[str, int]:
    """Return host and port of a store, as well as they are known; loopback when they are not."""
    inner: Any = store
    while isinstance(inner, PrefixStore):
        inner = inner.underlying_store
    host, port = getattr(inner, "host", None), getattr(inner, "port", None)
    if isinstance(host, str) and isinstance(port, int):
        return host, port
    try:
        return find_store_address(environment)
    except ValueError:
        return "127.0.0.1", 9


class Meeting:
    """One place in the store where all ranks agree on one channel."""

    def __init__(
        self,
        store: Store,
        place: Place,
        channel: int | str,
        timeout_s: float,
        start: Start | None = None,
    ) -> None:
        """Take part in a meeting.

        Args:
            store: the rendezvous store.
            place: this rank's place.
            channel: number of the channel, the same on every rank; or another name.
            timeout_s: how long to wait for other ranks, in seconds, for each question.
            start: as all ranks agreed; None: the launcher's count.
        """
        start = start or Start(str(place.restart), place.restart)
        self.place = place
        self.start = start
        self.channel = channel
        self.name = f"{place.job}/{start.name}/{channel}"
        self.generation = start.generation
        self._store = PrefixStore(f"gradlane/{self.name}", store)
        self._timeout_s = timeout_s
        self._written: set[str] = set()
        self._look: Callable[[], object] | None = None
        self.has_left = False
        """Whether nothing more is said here."""

    def put(self, key: str, value: bytes | str) -> None:
        """Write a key.

        Raises:
            RendezvousError: the store is gone.
        """
        try:
            self._store.set(key, cast(str, value))
        except RuntimeError as error:
            raise self._lost_store(error) from error
        self._written.add(key)

    def connected(self, timeout_s: float, look: Callable[[], object]) -> None:
        """Note that the ranks are connected: who is waited for from now on may be at other work.

        Args:
            timeout_s: how long to wait for a rank then, in seconds: the progress timeout.
            look: called while waiting; raises when the session has failed.
        """
        self._timeout_s = timeout_s
        self._look = look

    def get(self, key: str, rank: int) -> bytes:
        """Read a key that a rank writes, waiting for it.

        Raises:
            RendezvousError: the key did not appear in time, or the store is gone.
            ProgressTimeout: it did not appear in time, and the rank is connected.
            SessionFailed: the session has failed meanwhile.
        """
        # Asking again and again lets Ctrl-C through, which a wait inside the store does not.
        patience = Patience(self._timeout_s)
        pause_s = 0.001
        while True:
            try:
                if self._store.check([key]):
                    return bytes(self._store.get(key))
            except RuntimeError as error:
                raise self._lost_store(error) from error
            if patience.is_over(pause_s):
                raise self._too_late(key, rank)
            if self._look is not None:
                self._look()
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.1)

    def _too_late(self, key: str, rank: int) -> GradlaneError:
        waited = (
            f"rank {self.place.rank} waited {self._timeout_s:g} s for rank {rank} "
            f"({key} of {self.name})"
        )
        if self._look is None:
            calls = "gradlane.init and prepare as often as the others"
            if rank >= self.place.world_size > 0:
                calls = "session.serve(), or runs it `gradlane serve`"
            return RendezvousError(f"{waited}; is it running, and does it call {calls}?")
        return ProgressTimeout(
            f"{waited}, which is connected and does not take part; if it evaluates, saves or loads "
            "for longer than that, give all ranks a larger progress_timeout_s"
        )

    def peek(self, key: str) -> bytes | None:
        """Read a key that should be there, without waiting; None if it or the store is not."""
        try:
            return bytes(self._store.get(key)) if self._store.check([key]) else None
        except RuntimeError:
            return None

    @property
    def is_alive(self) -> bool:
        """Whether the store answers."""
        try:
            self._store.check(["anything"])
        except RuntimeError:
            return False
        return True

    def agree(self, table: dict[str, Any]) -> None:
        """Compare this rank's table with rank 0's, and learn what every other rank found.

        Args:
            table: JSON-serializable; `{"options": {...}, "tensors": [{...}, ...]}`.

        Raises:
            RanksDiffer: some rank's table is another one; the same text on every rank.
            RendezvousError: a rank did not appear.
        """
        rank, world_size = self.place.rank, self.place.world_size
        if rank == 0:
            self.put("table", json.dumps(table))
            verdicts = [self.get(f"verdict/{other}", other) for other in range(1, world_size)]
            differences = [verdict.decode() for verdict in verdicts if verdict]
            self.put("verdict", differences[0] if differences else "ok")
        else:
            first = json.loads(self.get("table", 0))
            own = json.loads(json.dumps(table))
            refused = "refused" in first
            self.put(f"verdict/{rank}", "" if refused else first_difference(first, own, rank))
        verdict = self.get("verdict", 0).decode()
        if verdict != "ok":
            raise RanksDiffer(f"{verdict} (all ranks must prepare the same model and options)")

    def refuse(self, reason: str) -> None:
        """Tell all ranks in `agree` that this rank cannot take part."""
        verdict = f"rank {self.place.rank} cannot take part: {reason}"
        if self.place.rank == 0:
            self.put("table", json.dumps({"refused": True}))
            self.put("verdict", verdict)
        else:
            self.put(f"verdict/{self.place.rank}", verdict)

    def secret(self, own: str | None) -> bytes:
        """Return the secret that connections are keyed with.

        Args:
            own: the user's own, or None for one that rank 0 draws and writes into the store.

        Raises:
            RanksDiffer: some ranks have a secret of their own and this one has none.
        """
        if self.place.rank == 0:
            drawn = secrets.token_hex(_SECRET_BYTES).encode()
            self.put("secret", _PRIVATE if own else drawn)
            return own.encode() if own else drawn
        published = self.get("secret", 0)
        if own:
            return own.encode()
        if published == _PRIVATE:
            raise RanksDiffer(
                f"rank 0 has a secret of its own and rank {self.place.rank} has none: "
                "set GRADLANE_SECRET, or secret=, on every rank"
            )
        return published

    def exchange_addresses(
        self, host: str, port: int, ranks: Sequence[int] | None = None
    ) -> list[str]:
        """Publish this rank's address and return all ranks', as `host:port`.

        Args:
            host: this rank's.
            port: this rank's.
            ranks: those that take part, in the order of the answer; None: all.

        Raises:
            RendezvousError: a rank did not appear, or published what cannot be reached from here.
            RanksDiffer: a rank that is to serve cannot.
        """
        node = node_name()
        own = {"host": host, "port": port, "node": node}
        self.put(f"address/{self.place.rank}", json.dumps(own))
        peers = []
        for rank in range(self.place.world_size) if ranks is None else ranks:
            peer = json.loads(self.get(f"address/{rank}", rank))
            if "refused" in peer:
                raise RanksDiffer(f"rank {rank} cannot serve: {peer['refused']}")
            if addresses.is_loopback(peer["host"]) and peer["node"] != node:
                raise RendezvousError(
                    f"rank {rank} on {peer['node']} advertises {peer['host']}, which rank "
                    f"{self.place.rank} on {node} cannot reach: give interface= or advertise=, "
                    "or set GRADLANE_INTERFACE"
                )
            try:
                peers.append(addresses.endpoint(addresses.resolve(peer["host"]), peer["port"]))
            except OSError as error:
                raise RendezvousError(
                    f"the address {peer['host']!r} of rank {rank} is unknown here: {error}"
                ) from error
        return peers

    def drop(self, key: str) -> None:
        """Remove a key that nobody reads any more, where the store can."""
        self._written.discard(key)
        with contextlib.suppress(RuntimeError):
            self._store.delete_key(key)

    def leave(self) -> None:
        """Remove the keys of this meeting, once every rank has said goodbye.

        A store lives as long as its job, and a program may open sessions again and again.
        """
        rank, world_size = self.place.rank, self.place.world_size
        for key in sorted(self._written):
            last = rank > 0 and key.startswith(_LAST_WORDS)
            if not last and not key.startswith(_OF_CHECKPOINTS):
                self.drop(key)
        if rank == 0:
            for word in _LAST_WORDS:
                for other in range(1, world_size):
                    self.drop(f"{word}{other}")
        self.has_left = True

    def _lost_store(self, error: Exception) -> RendezvousError:
        return RendezvousError(
            f"rank {self.place.rank} lost the rendezvous store during {self.name}: {error}"
        )


def first_difference(first: dict[str, Any], own: dict[str, Any], rank: int) -> str:
    """Say in one sentence where a rank's table differs from rank 0's; empty when it does not."""
    for name, value in first["options"].items():
        if own["options"].get(name) != value:
            return f"rank 0 has {name}={value!r}, rank {rank} has {own['options'].get(name)!r}"
    for index, (theirs, mine) in enumerate(zip(first["tensors"], own["tensors"], strict=False)):
        for key in ("name", "shape", "dtype", "stride", "role"):
            if theirs[key] != mine[key]:
                return (
                    f"tensor {index} ({theirs['name']!r}) has {key} {theirs[key]!r} on rank 0, "
                    f"but tensor {index} ({mine['name']!r}) has {key} {mine[key]!r} on rank {rank}"
                )
    if len(first["tensors"]) != len(own["tensors"]):
        longer = max(first["tensors"], own["tensors"], key=len)
        extra = longer[min(len(first["tensors"]), len(own["tensors"]))]["name"]
        return (
            f"the model has {len(first['tensors'])} tensors on rank 0 and {len(own['tensors'])} "
            f"on rank {rank}; the first that only one of them has is {extra!r}"
        )
    if first != own:
        return f"the tables of rank 0 and rank {rank} differ"
    return ""


def node_name() -> str:
    """Return a name of this machine, or container, that no other one has."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read(8)
    except OSError:
        boot = ""
    network = ""
    with contextlib.suppress(OSError):
        # Two network namespaces of one machine do not share a loopback interface.
        network = str(os.stat("/proc/self/ns/net").st_ino)
    return "-".join(part for part in (socket.gethostname(), boot, network) if part)
