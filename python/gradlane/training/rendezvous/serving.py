"""Dedicated servers: ranks that own slices of the channels that rank 0 announces, and do not train.

A dedicated server has no model. Rank 0 announces each channel of the workers in the store, with the
tensor table and all settings. A server builds the plan from the announcement, listens, and joins
the channel. The core's handshake checks that all ranks have the same plan, as between workers.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gradlane.errors import (
    GradlaneError,
    PeerLostError,
    RanksDifferError,
    RefusedError,
    RendezvousError,
)
from gradlane.formats.longer_waits import PROGRESS
from gradlane.formats.version import __version__
from gradlane.training.core import Channel, CoreModule, Listener, translate_error
from gradlane.training.options.codec_choice import CodecChoice
from gradlane.training.rendezvous.bounded_store import BoundedStore, StoreLostError
from gradlane.training.rendezvous.connecting import connect_channel, wait_until_all_are_connected
from gradlane.training.rendezvous.deadline import SuspendAwareDeadline
from gradlane.training.rendezvous.environment import RankInfo
from gradlane.training.rendezvous.incarnation import incarnation_of
from gradlane.training.rendezvous.presence import Presence
from gradlane.training.rendezvous.rendezvous import RendezvousScope
from gradlane.training.rendezvous.signatures import StoreValueRefusedError
from gradlane.training.rendezvous.start_failures import StartFailures

_NO_LIMIT_S = 1e9
"""No time limit: a server waits for the workers, whose ends the channel reports."""
_TICK_S = 0.1

_sessions: dict[tuple[str, int, int], int] = {}
"""Number of sessions with dedicated servers so far, by (job, restart, rank)."""


class ServerRegistry:
    """The scope in which a session's channels are announced; the same on every rank."""

    def __init__(
        self,
        store: BoundedStore,
        rank_info: RankInfo,
        timeout_s: float,
        failures: StartFailures,
    ) -> None:
        """Count the session, without waiting for other ranks.

        Args:
            store: the rendezvous store.
            rank_info: this rank.
            timeout_s: longest wait for other ranks for each key, in seconds.
            failures: of ranks that do not get as far as being connected.
        """
        key = (rank_info.job, rank_info.restart, rank_info.rank)
        self._number = _sessions.get(key, 0)
        _sessions[key] = self._number + 1
        self._store = store
        self._timeout_s = timeout_s
        self._failures = failures
        self._scope: RendezvousScope | None = None
        self.rank_info = rank_info
        self.presence: Presence | None = None
        """Signs of life of the ranks until they are connected; None: there are none."""

    @property
    def scope(self) -> RendezvousScope:
        """The scope; its first use is a collective call of all ranks of the job.

        Raises:
            RendezvousError: they do not, or the store is gone.
        """
        if self._scope is None:
            look = self._failures.check
            incarnation = incarnation_of(
                self._store,
                self.rank_info,
                self._timeout_s,
                look,
                self.presence,
                self._failures.request,
            )
            name = f"serving/{self._number}"
            self._scope = RendezvousScope(
                self._store,
                self.rank_info,
                name,
                self._timeout_s,
                incarnation,
                look,
                presence=self.presence,
            )
        return self._scope


def refuse_to_serve(scope: RendezvousScope, reason: str) -> None:
    """Publish, in place of an address, that this rank cannot serve a channel."""
    scope.put(f"address/{scope.rank_info.rank}", json.dumps({"refused": reason}))


def check_codecs_served(choices: Sequence[CodecChoice], rank_info: RankInfo) -> None:
    """Check that dedicated servers can add up tensors in these codecs.

    Raises:
        ValueError: a codec keeps residuals of results on the slice's owner, where no checkpoint
            reaches them; the message names the tensor.
    """
    for choice in choices if rank_info.serving else ():
        if choice.facts is not None and choice.facts.residual_width > 0:
            raise RefusedError(
                f"codec {choice.codec!r} of {choice.tensor!r} while {rank_info.serving} ranks only "
                "serve: residuals of means stay on each slice's owner, where checkpoints do not "
                "reach them; use a codec without error feedback, such as qsgd:bits=8, or servers= "
                "in place of workers="
            )


def _agreed_facts(rank_info: RankInfo) -> dict[str, object]:
    """Return the facts that all ranks must agree on before any of them serves."""
    return {"workers": rank_info.world_size, "ranks": rank_info.ranks, "version": __version__}


@dataclass(frozen=True)
class JobAnnouncement:
    """Everything that a server needs to know of a channel.

    Attributes:
        channel: number of the scope of its ranks.
        ranks: of the session, in the channel's order.
        rows: the plan's tensors.
        strategy: of the plan.
        slice_elems: of the plan.
        seed: of the plan.
        update: of the plan.
        settings: the core's options; a server replaces those of a rank or a machine.
    """

    channel: int | str
    ranks: Sequence[int]
    rows: Sequence[Mapping[str, Any]]
    strategy: str
    slice_elems: int | None
    seed: int
    update: str
    settings: Mapping[str, Any]

    def plan(self, core: CoreModule, rank_info: RankInfo) -> str:
        """Return the plan, the same text on every rank."""
        return core.plan_json(
            json.dumps(self.rows),
            self.strategy,
            self.slice_elems,
            self.seed,
            self.update,
            rank_info.ranks,
            workers=rank_info.world_size,
        )


class JobAnnouncements:
    """Rank 0's announcements to the dedicated servers."""

    def __init__(self, registry: ServerRegistry) -> None:
        """Start without announcements.

        Args:
            registry: with the scope of announcements.
        """
        self._registry = registry
        self._count = 0
        self._ended = False

    def announce(self, announcement: JobAnnouncement) -> None:
        """Announce a channel to all servers; the first announcement also tells which ranks train.

        Raises:
            RendezvousError: the store is gone.
        """
        scope = self._registry.scope
        if self._count == 0:
            scope.put("terms", json.dumps(_agreed_facts(self._registry.rank_info)))
        scope.put(f"channel/{self._count}", json.dumps(asdict(announcement)))
        self._count += 1

    def end(self, reason: str = "") -> None:
        """Announce the end of the session, and its reason if it was aborted.

        Before the first channel the ranks have not met: servers find the store gone, or time out.
        """
        if self._ended or self._count == 0:
            return
        self._ended = True
        try:
            record = json.dumps({"reason": reason, "channels": self._count})
            self._registry.scope.put("end", record)
        except RendezvousError:
            # Servers learn of the end through their channels, or find the store gone.
            return


@dataclass(frozen=True)
class ServedStats:
    """Traffic that a server has handled for one channel.

    Attributes:
        tensors: trained tensors of the channel.
        owned_bytes: bytes of them that this rank owns.
        total_bytes: bytes of all of them.
        steps: training steps, estimated from the number of slices.
        rx_bytes: payload of received gradients.
        tx_bytes: payload of sent results.
    """

    tensors: int
    owned_bytes: int
    total_bytes: int
    steps: int
    rx_bytes: int
    tx_bytes: int


class _ServedChannel:
    """A channel that is served, on a thread of its own."""

    def __init__(self, core: CoreModule, channel: Channel, plan: str, rank: int) -> None:
        self.error: GradlaneError | None = None
        self.channel = channel
        self._core = core
        parsed = json.loads(plan)
        trained = {
            index for index, row in enumerate(parsed["tensors"]) if row["role"] == "parameter"
        }
        self._tensors = len(trained)
        self._own_slices = sum(
            1 for one in parsed["slices"] if one["owner"] == rank and one["tensor"] in trained
        )
        self._rank = rank
        self._thread = threading.Thread(target=self._run, name="gradlane-serve", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.channel.finish(_NO_LIMIT_S)
        except self._core.ChannelError as error:
            self.error = translate_error(self._core, error, "serving")

    @property
    def is_open(self) -> bool:
        return self._thread.is_alive()

    def abort(self, reason: str) -> None:
        self.channel.abort(reason)
        self._thread.join()

    def served(self) -> ServedStats:
        counted = json.loads(self.channel.metrics_json())
        owned = [peer["owned_bytes"] for peer in counted["peers"]]
        return ServedStats(
            tensors=self._tensors,
            owned_bytes=owned[self._rank],
            total_bytes=sum(owned),
            steps=counted["gathered_slices"] // max(1, self._own_slices),
            rx_bytes=counted["served_rx_bytes"],
            tx_bytes=counted["served_tx_bytes"],
        )


class Server:
    """The serving of a session's channels on a dedicated server."""

    def __init__(
        self,
        core: CoreModule,
        registry: ServerRegistry,
        store: BoundedStore,
        secret: str | None,
        listen: Callable[[RankInfo], tuple[Listener, str]],
        *,
        work_threads: int,
        lanes: int,
        idle_timeout_s: float,
    ) -> None:
        """Start without channels.

        Args:
            core: the compiled core.
            registry: with the scope of announcements.
            store: the rendezvous store.
            secret: the user's own, or None.
            listen: binds a socket; returns it and its address for other ranks.
            work_threads: threads that add gradients up.
            lanes: connections to each other rank, at most.
            idle_timeout_s: longest wait for a channel while none is open, in seconds.
        """
        self._core = core
        self._registry = registry
        self._store = store
        self._secret = secret
        self._listen = listen
        self._work_threads = work_threads
        self._lanes = lanes
        self._idle_timeout_s = idle_timeout_s
        self._channels: list[_ServedChannel] = []
        self._abort_reason: str | None = None

    def served(self) -> list[ServedStats]:
        """Return the statistics of each channel so far."""
        return [channel.served() for channel in self._channels]

    @property
    def has_channels(self) -> bool:
        """Whether ranks have connected to this one."""
        return bool(self._channels)

    def run(self, on_channel: Callable[[ServedStats], None], on_tick: Callable[[], None]) -> None:
        """Serve until the workers have closed their sessions.

        Args:
            on_channel: called when a channel is connected.
            on_tick: called some ten times a second.

        Raises:
            RanksDifferError: rank 0 has another number of workers, or another version.
            RendezvousError: the other ranks do not come, or cannot be reached.
            GradlaneError: a rank was lost, fell silent or gave up; the message names it.
        """
        rank_info = self._agreed_rank_info()
        self._registry.scope.on_poll = self._raise_failure
        deadline = SuspendAwareDeadline(self._idle_timeout_s)
        try:
            while True:
                self._raise_failure()
                record = None
                # Open channels name the lost rank; `_has_ended` handles the rest.
                with contextlib.suppress(StoreLostError):
                    record = self._registry.scope.peek(f"channel/{len(self._channels)}", 0)
                if record is not None:
                    self._channels.append(
                        self._serve(JobAnnouncement(**json.loads(record)), rank_info)
                    )
                    on_channel(self._channels[-1].served())
                elif any(channel.is_open for channel in self._channels):
                    time.sleep(_TICK_S)
                elif self._has_ended():
                    return
                elif deadline.is_over(_TICK_S):
                    raise RendezvousError(
                        f"rank {rank_info.rank} serves, and the ranks that train have opened "
                        "nothing "
                        f"for {self._idle_timeout_s:g} s: do they run, and do they call prepare? "
                        f"(longer waits: {PROGRESS})"
                    )
                else:
                    time.sleep(_TICK_S)
                    on_tick()
                    continue
                deadline.renew()
                on_tick()
        except BaseException as error:
            self.abort(
                f"rank {rank_info.rank}, which serves, gave up: {error or type(error).__name__}"
            )
            raise

    def abort(self, reason: str) -> None:
        """Abort all channels and tell their ranks the reason."""
        self._abort_reason = self._abort_reason or reason
        for channel in self._channels:
            if channel.is_open:
                channel.abort(reason)

    def _agreed_rank_info(self) -> RankInfo:
        """Wait for rank 0's facts, and compare them with this rank's own."""
        rank_info = self._registry.rank_info
        try:
            agreed = json.loads(self._registry.scope.get("terms", 0))
        except StoreValueRefusedError:
            raise
        except RendezvousError as error:
            raise RendezvousError(
                f"{error}; a rank that serves waits for a training script that calls "
                "gradlane.init(workers=...), with the number of ranks that train"
            ) from error
        if not rank_info.world_size:
            # The command has no number of workers of its own.
            rank_info = rank_info.with_workers(min(rank_info.ranks, agreed["workers"]))
        for name, value in _agreed_facts(rank_info).items():
            if agreed[name] != value:
                self._refuse(
                    f"rank 0 has {name}={agreed[name]!r}, rank {rank_info.rank} has {value!r}"
                )
        if not rank_info.serves:
            self._refuse(
                f"rank {rank_info.rank} is one of the {rank_info.world_size} of "
                f"{rank_info.ranks} ranks that "
                "train: start the training script there"
            )
        return rank_info

    def _refuse(self, reason: str) -> None:
        """Tell all ranks, at the first channel, that this one cannot serve; raises."""
        rank_info = self._registry.rank_info
        # Without a channel the others fail by themselves: a worker is missing.
        with contextlib.suppress(RendezvousError):
            announcement = JobAnnouncement(**json.loads(self._registry.scope.get("channel/0", 0)))
            refuse_to_serve(
                self._scope_of(rank_info, announcement.channel, self._idle_timeout_s), reason
            )
        raise RanksDifferError(reason)

    def _scope_of(
        self, rank_info: RankInfo, channel: int | str, timeout_s: float
    ) -> RendezvousScope:
        return RendezvousScope(
            self._store, rank_info, channel, timeout_s, self._registry.scope.incarnation
        )

    def _serve(self, announcement: JobAnnouncement, rank_info: RankInfo) -> _ServedChannel:
        settings = dict(announcement.settings)
        timeout_s = float(settings["connect_timeout_s"])
        scope = self._scope_of(rank_info, announcement.channel, timeout_s)
        try:
            plan = announcement.plan(self._core, rank_info)
            secret = scope.secret(self._secret)
            listener, host = self._listen(rank_info)
        except (GradlaneError, ValueError) as error:
            refuse_to_serve(scope, str(error))
            raise
        settings["rank"] = announcement.ranks.index(rank_info.rank)
        settings["work_threads"] = self._work_threads
        settings["work_depth"] = max(2, 2 * self._work_threads)
        settings["lanes"] = min(settings["lanes"], self._lanes)
        settings["trace"] = False
        channel = connect_channel(
            self._core, scope, listener, host, settings, plan, secret, announcement.ranks
        )
        wait_until_all_are_connected(self._core, channel, scope)
        if self._registry.presence is not None:
            self._registry.presence.connected(scope.name)
        return _ServedChannel(self._core, channel, plan, rank_info.rank)

    def _has_ended(self) -> bool:
        """Return whether rank 0 has announced the end, or is gone after its goodbye."""
        if self._abort_reason is not None:
            return True
        try:
            record = self._registry.scope.peek("end", 0)
        except StoreLostError:
            if not self._channels:
                raise
            return True
        if record is None:
            return False
        end = json.loads(record)
        if end["reason"]:
            raise PeerLostError(f"rank 0 gave up: {end['reason']}", 0)
        return bool(end["channels"] == len(self._channels))

    def _raise_failure(self) -> None:
        failed = next((one.error for one in self._channels if one.error is not None), None)
        if failed is not None:
            raise failed
