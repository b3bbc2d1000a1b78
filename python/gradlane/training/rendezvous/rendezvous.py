"""Agreement of all ranks before the first byte of training, through the c10d store.

Every key is under `gradlane/{job}/{incarnation}/{channel}`, so restarts and models never share
keys. Where the job has a secret, all values are signed (`signatures`). A rank that waits for a key
names the rank that has not written it. Until the ranks are connected, the first rank that cannot go
on stores its reason, which all others raise as well. Rank 0 then stays for a moment so that the
others can read it, since the store may end with its process.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import torch

from gradlane.errors import (
    CheckpointError,
    GradlaneError,
    ProgressTimeoutError,
    RanksDifferError,
    RendezvousError,
    SessionFailedError,
    UsageError,
)
from gradlane.formats.longer_waits import CONNECT, PROGRESS
from gradlane.formats.version import __version__
from gradlane.training.log import log
from gradlane.training.options.options import Options
from gradlane.training.rendezvous import addresses
from gradlane.training.rendezvous.bounded_store import BoundedStore, StoreLostError
from gradlane.training.rendezvous.environment import RankInfo, find_store_address
from gradlane.training.rendezvous.incarnation import Incarnation
from gradlane.training.rendezvous.presence import BUSY_TEXT, Presence, RankDeadline
from gradlane.training.rendezvous.signatures import StoreValueRefusedError
from gradlane.training.rendezvous.store_server import serve_on
from gradlane.training.rendezvous.torch_reports import hide_reports_of
from gradlane.training.torch_internals import (
    HashStore,
    PrefixStore,
    Store,
    TCPStore,
    default_store,
)


class PublishedAddress(TypedDict):
    """Where a rank listens, as all ranks read it."""

    host: str
    """Name or address that the others reach it at."""
    port: int
    node: str
    """Name of its machine."""


_SECRET_BYTES = 32
warned: set[Incarnation] = set()
"""Incarnations whose rank 0 has warned of ranks elsewhere without a secret."""
_CLOSING_KEYS = ("ending/", "metrics/")
"""Keys that rank 0 reads when all ranks have said goodbye."""
_CHECKPOINT_KEYS = "checkpoint/"
"""Keys of a checkpoint that may still be being written; their reader deletes them."""
_ABORT_KEY = "reason"
"""The key with the first reason why the ranks of a scope are not connected."""
_ABORT_POLL_S = 0.25
"""Interval at which a connecting rank polls for another rank's abort."""
_PROBE_S = 0.5
_OPEN_GRACE_S = 1.0
_REPORT_S = 2.0
"""Longest time that an aborting rank waits for the store, and rank 0 for its readers."""
_ALIKE_S = 10.0
"""Longest time that a rank keeps an error back which the others are about to have."""
_CAUSE_S = 2 * _REPORT_S
"""Seconds to wait for the reason of a rank that was lost while the ranks connect."""


def open_store(
    rank_info: RankInfo,
    environment: Mapping[str, str],
    timeout_s: float,
    store_timeout_s: float,
    secret: str | None = None,
    given: tuple[str, int] | None = None,
) -> BoundedStore:
    """Open the store at the given address, or torch.distributed's, or the one torchrun would use.

    torch.distributed's is left alone where its group has fewer ranks than the job, as those of a
    node have that are a group by themselves: the others would never be there. No rank hosts the
    store at a given address. Rank 0 hosts torchrun's, unless torchrun's agent does: on the loopback
    interface alone where `MASTER_ADDR` is a loopback address or `localhost`, else on all addresses.

    Args:
        rank_info: this rank.
        environment: the launcher's variables.
        timeout_s: longest time to connect, in seconds.
        store_timeout_s: longest response time afterwards, in seconds.
        secret: of the user, which signs all values; None: they are not signed.
        given: host and port of a store in a process of its own; None: there is none.

    Raises:
        ValueError: the environment names no host.
        RendezvousError: the store cannot be reached in time.
    """
    import torch.distributed as dist

    agent_hosts_store = environment.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    host_text = (
        "which the launcher's agent on rank 0's host keeps"
        if agent_hosts_store
        else "which rank 0 keeps"
    )
    remedy = "check MASTER_ADDR and MASTER_PORT, and that rank 0 is running"
    if given is not None:
        host_text = "which a process of its own keeps"
        remedy = "check GRADLANE_STORE or store=, and that `gradlane store` is running there"
    elif dist.is_available() and dist.is_initialized() and dist.get_world_size() >= rank_info.ranks:
        store = default_store()
        return wrap_store(store, rank_info, environment, store_timeout_s, secret, host_text)
    elif rank_info.ranks == 1:
        return wrap_store(HashStore(), rank_info, environment, store_timeout_s, secret)
    host, port = given or find_store_address(environment)
    at = addresses.endpoint(host, port)
    is_host = rank_info.rank == 0 and not agent_hosts_store and given is None
    bounded = BoundedStore(
        rank_info.rank, f"at {at}, {host_text}", store_timeout_s, job=rank_info.job, secret=secret
    )

    bounded.ends_with_rank_0 = not agent_hosts_store and given is None

    def connect() -> TCPStore:
        arguments: dict[str, Any] = {
            "world_size": rank_info.ranks,
            "is_master": is_host,
            "timeout": datetime.timedelta(seconds=timeout_s),
            "wait_for_workers": False,
            "multi_tenant": True,
        }
        if is_host and addresses.names_loopback(host):
            # The port is taken where this process has opened the store before: torch shares it.
            with contextlib.suppress(OSError):
                bound = addresses.bind(host, port)
                return serve_on(bound, host, port, **arguments)
        store = TCPStore(host, port, **arguments)
        if is_host:
            hide_reports_of(store)
        return store

    try:
        # Torch's own limit comes first: a thread that it ends later may meet the process's end.
        opened = bounded.connect(connect, timeout_s + _OPEN_GRACE_S)
    except (RuntimeError, TimeoutError) as error:
        if is_host:
            raise RendezvousError(
                f"rank 0 cannot open the rendezvous store at {at}: {_first_line(error)}; "
                "MASTER_ADDR must be an address of rank 0's host, and MASTER_PORT a free port there"
            ) from error
        opened, reason = None, _first_line(error)
    else:
        reason = f"no answer in {timeout_s:g} s (longer waits: {CONNECT})"
    if opened is None:
        if agent_hosts_store and given is None and addresses.names_loopback(host):
            remedy += (
                f"; where rank 0 is on another machine, torchrun took {host} for its name: give "
                "each torchrun --local-addr and its machine's own address, or mend /etc/hosts"
            )
        raise RendezvousError(
            f"rank {rank_info.rank} cannot reach the rendezvous store at {at}, {host_text}: "
            f"{reason}; {_listener_at(host, port)}; {remedy}"
        )
    return bounded


def store_timeout_s(options: Options) -> float:
    """Return the longest response time of the store, in seconds.

    It exceeds the silence timeout a little, so that the channel names the rank whose host is gone.
    """
    return 1.25 * options.network.silence_timeout_s + 1.0


def wrap_store(
    store: Store,
    rank_info: RankInfo,
    environment: Mapping[str, str],
    store_timeout_s: float,
    secret: str | None = None,
    host_text: str = "which rank 0 or its launcher keeps",
) -> BoundedStore:
    """Wrap an open store so that its calls time out.

    Args:
        store: of any kind.
        rank_info: this rank.
        environment: the launcher's variables.
        store_timeout_s: longest response time, in seconds.
        secret: of the user, which signs all values; None: they are not signed.
        host_text: the process that hosts the store, for errors.
    """
    at = addresses.endpoint(*store_address(store, environment))
    return BoundedStore.wrapping(
        store,
        rank_info.rank,
        f"at {at}, {host_text}",
        store_timeout_s,
        job=rank_info.job,
        secret=secret,
    )


def _listener_at(host: str, port: int) -> str:
    """Describe in one clause what listens at an address."""
    try:
        socket.create_connection((host, port), timeout=_PROBE_S).close()
    except ConnectionRefusedError:
        return "nothing listens there"
    except OSError as error:
        return f"a connection there fails, too ({error})"
    return "a process that listens there takes connections and does not answer as a store does"


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def store_address(store: Store, environment: Mapping[str, str]) -> tuple[str, int]:
    """Return host and port of a store; loopback if they are unknown."""
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


@dataclass(frozen=True)
class RankAddresses:
    """Addresses of the ranks of a channel, as `host:port`, and what they agree on."""

    called: list[str]
    """To call."""
    published: list[str]
    """As published: hosts may be names."""
    lanes: int
    """As many as the rank with the fewest can have."""


class AwaitedRankLostError(SessionFailedError):
    """Training goes on without a rank that all others wait for."""


class RendezvousScope:
    """The keys of one channel in the store, through which all ranks agree on it."""

    def __init__(
        self,
        store: BoundedStore,
        rank_info: RankInfo,
        channel: int | str,
        timeout_s: float,
        incarnation: Incarnation | None = None,
        on_poll: Callable[[], object] | None = None,
        presence: Presence | None = None,
    ) -> None:
        """Open the scope.

        Args:
            store: the rendezvous store.
            rank_info: this rank.
            channel: number of the channel, the same on every rank; or another name.
            timeout_s: longest wait for other ranks for each key, in seconds.
            incarnation: as all ranks agreed; None: the launcher's count.
            on_poll: called while waiting; raises when the session has failed.
            presence: signs of life of ranks that are not connected; None: there are none.
        """
        self._presence = presence
        incarnation = incarnation or Incarnation(str(rank_info.restart), rank_info.restart)
        self.rank_info = rank_info
        self.incarnation = incarnation
        self.channel = channel
        self.name = f"{rank_info.job}/{incarnation.name}/{channel}"
        self.generation = incarnation.generation
        self._store = store.with_prefix(f"gradlane/{self.name}")
        self._timeout_s = timeout_s
        self._written: set[str] = set()
        self.on_poll = on_poll
        """Called while waiting; raises when the session has failed."""
        self.is_connected = False
        """True once the scope's channel is open on all ranks."""
        self.has_deleted_keys = False
        """True once this rank has deleted its keys."""
        self.has_refused = False
        """True once this rank has told the others in `agree` that it cannot take part."""
        self._abort_reason: str | None = None
        """Why the ranks are not connected, once this rank knows."""
        self.loss_of: Callable[[int], str | None] = lambda rank: None
        """Tells why training goes on without a rank, whose keys nobody writes any more."""

    @property
    def is_open(self) -> bool:
        """True if the others may wait here for this rank and have no other way to learn of its
        failure."""
        return not (self.is_connected or self.has_deleted_keys or self.has_refused)

    def put(self, key: str, value: bytes | str) -> None:
        """Write a key.

        Raises:
            RendezvousError: the store is gone or does not answer.
        """
        self._store.set(key, value, on_poll=self.on_poll)
        self._written.add(key)

    def put_lasting(self, key: str, value: str) -> None:
        """Write a key that stays in the store when the session is closed; errors as for `put`."""
        self._store.set(key, value, on_poll=self.on_poll)

    def replace(self, key: str, old: bytes, new: str) -> bytes | None:
        """Write a key, which any rank may write, if it has an old value; return its value then.

        Args:
            key: the key.
            old: the value that it is to have.
            new: the value that it gets.

        Returns:
            The new value, or what is there instead; None if the key is not there.

        Raises:
            RendezvousError: the store is gone or does not answer.
        """
        return self._store.replace(key, old, new)

    def mark_connected(self, timeout_s: float, on_poll: Callable[[], object]) -> None:
        """Record that the ranks are connected: waits now raise `ProgressTimeoutError`.

        Args:
            timeout_s: longest wait for a rank from now on, in seconds: the progress timeout.
            on_poll: called while waiting; raises when the session has failed.
        """
        self._timeout_s = timeout_s
        self.on_poll = on_poll
        self.is_connected = True
        if self._presence is not None:
            self._presence.connected(self.name)

    def outlasting_session(self) -> RendezvousScope:
        """Return this scope for calls that go on when the session has ended."""
        scope = copy.copy(self)
        scope.on_poll = None
        return scope

    def mark_closed(self) -> None:
        """Record that the channel was closed in good order."""
        self.on_poll = None
        if self._presence is not None:
            self._presence.parted(self.name)

    def get(self, key: str, rank: int) -> bytes:
        """Wait for a key that a rank writes, and return its value.

        Raises:
            RendezvousError: the key did not appear in time, another rank gave up, or the store is
                gone or does not answer.
            StoreValueRefusedError: the value is not signed as the job's secret signs it.
            ProgressTimeoutError: it did not appear in time, and the rank is connected.
            SessionFailedError: the session has failed meanwhile.
        """
        return self.get_all({rank: key})[0]

    def get_all(self, keys: Mapping[int, str], extra_s: float = 0.0) -> list[bytes]:
        """Wait for one key of each given rank, with one time limit for all; errors as for `get`.

        Args:
            keys: by rank.
            extra_s: seconds beyond the scope's limit.
        """
        # Rank 0 waits for the others as well, and its reason names the right rank.
        if self.rank_info.rank > 0 and 0 in keys and not self.is_connected:
            extra_s += 1.0 + self._timeout_s / 4
        presence = None if self.is_connected else self._presence
        deadline = RankDeadline(self._timeout_s, presence, extra_s)
        return [self._get(key, rank, deadline) for rank, key in keys.items()]

    def get_first(self, keys: Mapping[int, str]) -> bytes:
        """Wait until any of some ranks, which are connected, has written its key; its value.

        Args:
            keys: by rank.

        Raises:
            RendezvousError: the store is gone or does not answer.
            ProgressTimeoutError: no rank has written one in time.
            SessionFailedError: the session has failed meanwhile.
        """
        deadline = RankDeadline(self._timeout_s)
        writers: dict[str, int | None] = {key: rank for rank, key in keys.items()}
        pause_s = 0.001
        while True:
            found = self._store.read_first(writers, on_poll=self.on_poll)
            if found is not None:
                return found[1]
            if self.on_poll is not None:
                self.on_poll()
            if deadline.is_over(pause_s, list(keys)):
                rank = min(keys)
                raise self._timeout_error(keys[rank], rank, deadline)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.1)

    def _get(self, key: str, rank: int, deadline: RankDeadline) -> bytes:
        # Polling lets Ctrl-C through, which a wait inside the store does not.
        pause_s = 0.001
        writers: dict[str, int | None] = {key: rank}
        if not self.is_connected:
            writers[_ABORT_KEY] = None
        while True:
            try:
                found = self._store.read_first(
                    writers, limit_s=deadline.remaining_s, on_poll=self.on_poll
                )
                if found is None and self.on_poll is not None:
                    self.on_poll()
            except StoreLostError:
                raise
            except StoreValueRefusedError as error:
                if self.is_open:
                    self.abort(str(error))
                raise
            except GradlaneError:
                # A rank that fails writes its keys first, maybe since this one looked.
                value = None
                with contextlib.suppress(StoreLostError):
                    value = self._store.read(key, rank, limit_s=_REPORT_S)
                if value is None:
                    raise
                return value
            if found is not None and found[0] == key:
                return found[1]
            if found is not None:
                raise self._acknowledge_abort(found[1].decode())
            if (loss := self.loss_of(rank)) is not None:
                # It may have written the key since this rank looked, and then was lost.
                value = self._store.read(key, rank)
                if value is not None:
                    return value
                raise self._loss_error(key, rank, loss)
            if deadline.is_over(pause_s, [rank]):
                raise self._timeout_error(key, rank, deadline)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.1)

    def _timeout_error(self, key: str, rank: int, deadline: RankDeadline) -> GradlaneError:
        waited = (
            f"rank {self.rank_info.rank} waited {deadline.describe([rank])} ({key} of {self.name})"
        )
        if not self.is_connected and not deadline.silent([rank]):
            return self.abort(f"{waited}, {BUSY_TEXT}", [rank])
        if not self.is_connected:
            calls = "gradlane.init and prepare as often as the others"
            if rank >= self.rank_info.world_size > 0:
                calls = "session.serve(), or runs it `gradlane serve`"
            return self.abort(
                f"{waited}; is it running, and does it call {calls}? (longer waits for ranks to "
                f"appear: {CONNECT})",
                [rank],
            )
        return ProgressTimeoutError(
            f"{waited}, which is connected and does not take part; if it evaluates, saves or loads "
            f"for longer than that, give all ranks a larger {PROGRESS}"
        )

    def _loss_error(self, key: str, rank: int, loss: str) -> GradlaneError:
        """Return the error of a wait for a rank that was lost."""
        text = f"{loss}, while rank {self.rank_info.rank} waited for rank {rank} ({key})"
        if not self.is_connected:
            return self.abort(f"{loss} (while the ranks connected)", [rank])
        return AwaitedRankLostError(f"{text}; restart from the last checkpoint", None)

    def abort(self, reason: str, missing: Iterable[int] = ()) -> RendezvousError:
        """Tell all ranks why they will not be connected; return the error that all of them raise.

        Args:
            reason: a sentence; if another rank was first, all raise its reason.
            missing: ranks that will not read the reason.
        """
        if self._abort_reason is not None:
            return RendezvousError(self._abort_reason)
        record = json.dumps({"reason": reason, "missing": sorted(missing)})
        # A store that is gone cannot carry the reason, and a stranger's is not believed.
        with contextlib.suppress(StoreLostError, StoreValueRefusedError):
            record = self._store.set_if_absent(_ABORT_KEY, record, limit_s=_REPORT_S)
        return self._acknowledge_abort(record)

    def abort_on_loss(self, reason: str) -> RendezvousError:
        """Abort since a connected rank was lost, unless that rank reports its own reason first.

        A rank that cannot connect to another drops its connections before it knows whether the
        rank or the link is to blame.

        Args:
            reason: a sentence, for a rank that does not report itself.
        """
        if self._abort_reason is None:
            with contextlib.suppress(StoreLostError, StoreValueRefusedError):
                self._store.wait_for({_ABORT_KEY: None}, _CAUSE_S)
        return self.abort(reason)

    def abort_unreachable(self, missing: int, reason: str) -> RendezvousError:
        """Abort since a rank is unreachable: blame it, or the link to it.

        Args:
            missing: the rank.
            reason: a sentence, for a rank that does not report itself.
        """
        own = self.rank_info.rank
        if self._abort_reason is not None:
            return RendezvousError(self._abort_reason)
        try:
            self.put(f"unconnected/{own}", "")
            # A live rank that misses this one reports it at about the same time.
            key = f"unconnected/{missing}"
            self._store.wait_for({key: missing}, _REPORT_S)
            is_alive = self._store.read(key, missing) is not None
        except (StoreLostError, StoreValueRefusedError) as error:
            # All ranks lose the store's host, so its loss is the cause.
            return error
        if not is_alive:
            return self.abort(reason, [missing])
        first, second = sorted((own, missing))
        return self.abort(
            f"the link between rank {first} and rank {second} is cut: both run and reach the "
            f"rendezvous store, and could not connect to each other ({reason}); check routes and "
            "firewalls between their hosts, or give Network(interface=...) or advertise="
        )

    def wait_until_opened(self, on_poll: Callable[[], object]) -> None:
        """Report that the channel is open here, and wait until it is open on all ranks.

        Args:
            on_poll: called while waiting; raises when the channel has failed.

        Raises:
            RendezvousError: it is not opened on a rank.
        """
        keys = {rank: f"opened/{rank}" for rank in range(self.rank_info.ranks)}
        self._store.set(keys[self.rank_info.rank], "", on_poll=on_poll)
        before, self.on_poll = self.on_poll, on_poll
        # Connecting may take a rank as long as waiting for its address did.
        extra_s = 1.0 + self._timeout_s / 4
        try:
            self.get_all(keys, extra_s)
        finally:
            self.on_poll = before
        # Ranks that share a node may leave before all others have read: the last reader cleans up.
        if self._store.increment("opened", on_poll=on_poll) == self.rank_info.ranks:
            for key in ("opened", *keys.values()):
                self._store.delete(key)

    @contextlib.contextmanager
    def failing_alike(self) -> Iterator[None]:
        """Let an error that all ranks meet through once they have it.

        Such are `CheckpointError`, `UsageError` and `AwaitedRankLostError`. The first rank to give
        up would leave the others in a step that needs it, and they would only hear of its reason.
        An error of this rank alone comes through after 10 s.
        """
        try:
            yield
        except (CheckpointError, UsageError, AwaitedRankLostError):
            everyone = range(self.rank_info.world_size)
            ranks = [rank for rank in everyone if self.loss_of(rank) is None]
            scope = self.outlasting_session()
            with contextlib.suppress(StoreLostError, StoreValueRefusedError):
                scope.put(f"failing/{self.rank_info.rank}", "")
                self._store.wait_for({f"failing/{rank}": rank for rank in ranks}, _ALIKE_S)
            raise

    def _acknowledge_abort(self, record: str) -> RendezvousError:
        """Return the error of an abort; rank 0 first waits until the others have read it."""
        abort_record = json.loads(record)
        with contextlib.suppress(StoreLostError, StoreValueRefusedError):
            self._store.set(f"heard/{self.rank_info.rank}", "")
            if self.rank_info.rank == 0:
                others = set(range(1, self.rank_info.ranks)).difference(abort_record["missing"])
                self._store.wait_for({f"heard/{rank}": rank for rank in others}, _REPORT_S)
        self._abort_reason = str(abort_record["reason"])
        return RendezvousError(self._abort_reason)

    @contextlib.contextmanager
    def watching_for_abort(self) -> Iterator[Callable[[], None]]:
        """Read another rank's abort meanwhile: the store may have ended with that rank afterwards.

        Yields:
            A function that waits for nothing, and raises once there is an abort or the session has
            failed.
        """
        done = threading.Event()

        def on_poll() -> None:
            if done.is_set():
                raise RendezvousError("the watch for an abort has ended")

        def listen() -> None:
            # An abort of this rank uses the store again and reports its loss.
            with contextlib.suppress(RendezvousError):
                while not done.wait(_ABORT_POLL_S):
                    record = self._store.read(_ABORT_KEY, None, on_poll=on_poll)
                    if record is not None:
                        self._acknowledge_abort(record.decode())
                        return

        def check() -> None:
            if self._abort_reason is not None:
                raise RendezvousError(self._abort_reason)
            if self.on_poll is not None:
                self.on_poll()

        thread = threading.Thread(target=listen, name="gradlane-listen", daemon=True)
        thread.start()
        try:
            yield check
        finally:
            done.set()
            thread.join()

    def peek(self, key: str, rank: int | None) -> bytes | None:
        """Return the value of a key that a rank writes, without waiting; None if it is not there.

        Args:
            key: the key.
            rank: the rank; None: any.

        Raises:
            RendezvousError: the store is gone or does not answer.
            StoreValueRefusedError: the value is not signed as the job's secret signs it.
            SessionFailedError: the session has failed.
        """
        return self._store.read(key, rank, on_poll=self.on_poll)

    def agree(self, table: dict[str, Any]) -> None:
        """Compare this rank's table with rank 0's, and raise the first difference on all ranks.

        Another version of gradlane is a difference, too; one of torch is a warning on this rank.

        Args:
            table: JSON-serializable; `{"options": {...}, "tensors": [{...}, ...]}`.

        Raises:
            RanksDifferError: some rank's table is another one; the same text on every rank.
            RendezvousError: a rank did not appear.
        """
        rank, world_size = self.rank_info.rank, self.rank_info.world_size
        own_verdict = ""
        if rank == 0:
            self.put("table", json.dumps({**table, "versions": software_versions()}))
            verdicts = self.get_all({other: f"verdict/{other}" for other in range(1, world_size)})
            differences = [verdict.decode() for verdict in verdicts if verdict]
            self.put("verdict", differences[0] if differences else "ok")
        else:
            first = json.loads(self.get("table", 0))
            if "refused" not in first:
                own = json.loads(json.dumps(table))
                own_verdict = _compare_versions(first.pop("versions", {}), rank)
                own_verdict = own_verdict or first_difference(first, own, rank)
            self.put(f"verdict/{rank}", own_verdict)
        verdict = self.get("verdict", 0).decode()
        if verdict == "ok" and own_verdict:
            # Rank 0 does not read this rank's: it is outside of rank 0's world.
            verdict = own_verdict
        if verdict != "ok":
            raise RanksDifferError(
                f"{verdict} (all ranks must prepare the same model, optimizer and options)"
            )

    def refuse(self, reason: str) -> None:
        """Tell all ranks in `agree` that this rank cannot take part."""
        self.has_refused = True
        verdict = f"rank {self.rank_info.rank} cannot take part: {reason}"
        if self.rank_info.rank == 0:
            self.put("table", json.dumps({"refused": True}))
            self.put("verdict", verdict)
        else:
            self.put(f"verdict/{self.rank_info.rank}", verdict)

    def secret(self, own: str | None) -> bytes:
        """Return the secret that keys the connections.

        Args:
            own: the user's; None: rank 0 draws one and writes it into the store, unsigned.
        """
        if own:
            return own.encode()
        if self.rank_info.rank == 0:
            drawn = secrets.token_hex(_SECRET_BYTES).encode()
            self.put("secret", drawn)
            return drawn
        return self.get("secret", 0)

    def exchange_addresses(
        self, host: str, port: int, ranks: Sequence[int] | None = None, *, lanes: int = 1
    ) -> RankAddresses:
        """Publish this rank's address and return all ranks'.

        What this rank has published is not read back: a change in the store misleads others alone.

        Args:
            host: this rank's.
            port: this rank's.
            ranks: of the channel, in the order of the result; None: all.
            lanes: that this rank can have, at most.

        Raises:
            RendezvousError: a rank did not appear, or published what cannot be reached from here.
            RanksDifferError: a rank that is to serve cannot.
        """
        node = node_name()
        own: dict[str, Any] = {
            "host": host,
            "port": port,
            "lanes": lanes,
            "node": node,
            "machine": machine_name(),
        }
        self.put(f"address/{self.rank_info.rank}", json.dumps(own))
        peers = []
        everyone = range(self.rank_info.world_size) if ranks is None else ranks
        found = self.get_all({rank: f"address/{rank}" for rank in everyone})
        rows = [
            own if rank == self.rank_info.rank else json.loads(row)
            for rank, row in zip(everyone, found, strict=True)
        ]
        for rank, peer in zip(everyone, rows, strict=True):
            if "refused" in peer:
                raise RanksDifferError(f"rank {rank} cannot serve: {peer['refused']}")
            if addresses.is_loopback(peer["host"]) and peer["node"] != node:
                raise self.abort(
                    f"rank {rank} on {peer['node']} advertises {peer['host']}, which rank "
                    f"{self.rank_info.rank} on {node} cannot reach: give interface= or advertise=, "
                    "or set GRADLANE_INTERFACE"
                )
            try:
                peers.append(addresses.endpoint(addresses.resolve(peer["host"]), peer["port"]))
            except OSError as error:
                raise self.abort(
                    f"the address {peer['host']!r} of rank {rank} is unknown on rank "
                    f"{self.rank_info.rank}: {error}"
                ) from error
            if peer.get("machine", own["machine"]) != own["machine"]:
                self._warn_without_secret(rank)
        published = [addresses.endpoint(row["host"], row["port"]) for row in rows]
        return RankAddresses(peers, published, min(int(row.get("lanes", 1)) for row in rows))

    def _warn_without_secret(self, rank: int) -> None:
        """Warn on rank 0, once a start, that a rank elsewhere is reached without a secret."""
        if self.rank_info.rank > 0 or self._store.is_signed or self.incarnation in warned:
            return
        warned.add(self.incarnation)
        log.warning(
            "rank %d is on another machine, and the job has no secret: anybody on the network "
            "between the ranks, or with access to the store, can read and change gradients. "
            "`gradlane secret new` writes a secret; set GRADLANE_SECRET_FILE to it on every rank",
            rank,
        )

    def published_address(self, rank: int) -> PublishedAddress | None:
        """Return where a rank listens for this scope's channels; None if it does not.

        Raises:
            RendezvousError: the store is gone or does not answer.
        """
        published = self.peek(f"address/{rank}", rank)
        found: PublishedAddress | None = None if published is None else json.loads(published)
        return found

    def exchange(self, value: Any) -> list[Any]:
        """Return a value of each rank, in rank order; a collective call, once a scope.

        Args:
            value: this rank's; JSON-serializable.

        Raises:
            RendezvousError: a rank did not appear.
        """
        rank, everyone = self.rank_info.rank, range(self.rank_info.world_size)
        self.put(f"value/{rank}", json.dumps(value))
        values = self.get_all({other: f"value/{other}" for other in everyone})
        # Rank 0 may host the store: it stays until everyone has read.
        self.put(f"left/{rank}", "")
        if rank == 0:
            self.get_all({other: f"left/{other}" for other in everyone})
        return [json.loads(one) for one in values]

    def delete(self, key: str) -> None:
        """Delete a key that no rank reads any more, if the store supports it."""
        self._written.discard(key)
        self._store.delete(key)

    def delete_keys(self) -> None:
        """Delete this rank's keys, once every rank has said goodbye.

        A store lives as long as its job, and a program may open many sessions.
        """
        rank, world_size = self.rank_info.rank, self.rank_info.world_size
        for key in sorted(self._written):
            last = rank > 0 and key.startswith(_CLOSING_KEYS)
            if not last and not key.startswith(_CHECKPOINT_KEYS):
                self.delete(key)
        if rank == 0:
            for prefix in _CLOSING_KEYS:
                for other in range(1, world_size):
                    self.delete(f"{prefix}{other}")
        self._store.drain()
        self.has_deleted_keys = True

    def delete_keys_if_last(self) -> None:
        """Delete all ranks' keys, if all others have called this before.

        For ranks that have not heard a goodbye of every rank, which may still read their keys.
        """
        self.has_deleted_keys = True
        # A store that is gone, as rank 0's process may be, has no keys.
        with contextlib.suppress(StoreLostError):
            self.put(f"keys/{self.rank_info.rank}", json.dumps(sorted(self._written)))
            if self._store.increment("parted") < self.rank_info.world_size:
                return
            for rank in range(self.rank_info.world_size):
                written = self.peek(f"keys/{rank}", rank)
                for key in json.loads(written or b"[]"):
                    if not key.startswith(_CHECKPOINT_KEYS):
                        self._store.delete(key)
                self._store.delete(f"keys/{rank}")
            self._store.delete("parted")
            self._store.drain()


def software_versions() -> dict[str, str]:
    """Return the versions of this process that ranks compare."""
    return {"gradlane": __version__, "torch": str(torch.__version__)}


def _compare_versions(first: dict[str, str], rank: int) -> str:
    """Return in one sentence that rank 0 has another gradlane; warn of another torch."""
    own = software_versions()
    theirs = first.get("gradlane", "an older one")
    if theirs != own["gradlane"]:
        return (
            f"rank 0 has gradlane {theirs}, rank {rank} has {own['gradlane']}: install one version "
            "on all ranks"
        )
    if first.get("torch") != own["torch"]:
        log.warning(
            "rank %d has torch %s and rank 0 has %s: the same step may give other bits, so that "
            "the ranks' parameters part; install one version on all ranks, or compare parameters "
            "with check_every",
            rank,
            own["torch"],
            first.get("torch"),
        )
    return ""


def first_difference(first: dict[str, Any], own: dict[str, Any], rank: int) -> str:
    """Describe in one sentence the first difference from rank 0's table; empty if there is none."""
    # Where `local` is "auto" it follows from the others, and may differ since one of them does.
    for name, value in sorted(first["options"].items(), key=lambda one: one[0] == "local"):
        if own["options"].get(name) != value:
            return f"rank 0 has {name}={value!r}, rank {rank} has {own['options'].get(name)!r}"
    for index, (theirs, mine) in enumerate(zip(first["tensors"], own["tensors"], strict=False)):
        for key in ("name", "shape", "dtype", "stride", "role", "scheme"):
            # Rows without a scheme have the strategy's own.
            first_value, own_value = (row.get(key, "of the strategy") for row in (theirs, mine))
            if first_value != own_value:
                return (
                    f"tensor {index} ({theirs['name']!r}) has {key} {first_value!r} on rank 0, "
                    f"but tensor {index} ({mine['name']!r}) has {key} {own_value!r} on rank {rank}"
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


def machine_name() -> str:
    """Return a name of this machine that no other one has; containers share it."""
    return _boot_id() or socket.gethostname()


def node_name() -> str:
    """Return a name of this machine, or container, that no other one has."""
    boot = _boot_id()[:8]
    network = ""
    with contextlib.suppress(OSError):
        # Two network namespaces of one machine do not share a loopback interface.
        network = str(os.stat("/proc/self/ns/net").st_ino)
    return "-".join(part for part in (socket.gethostname(), boot, network) if part)


def _boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""
