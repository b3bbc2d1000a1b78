"""Ranks that only serve: rank 0 tells them which channels there are, and they serve these.

A rank that serves has no model and needs none. Rank 0 leaves an invitation in the store for each
channel that the ranks that train open, with the tensor table and all settings; whoever serves makes
the plan of it, listens, and is part of the channel as soon as all are connected. That all have the
same plan is checked in the core's handshake, as between ranks that train.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gradlane.errors import GradlaneError, PeerLostError, RanksDifferError, RendezvousError
from gradlane.formats.version import __version__
from gradlane.training.core import Channel, CoreModule, Listener, translate_error
from gradlane.training.options.codec_choice import CodecChoice
from gradlane.training.rendezvous.bounded_store import BoundedStore, StoreLostError
from gradlane.training.rendezvous.connecting import connect_channel, wait_until_all_are_connected
from gradlane.training.rendezvous.deadline import SuspendAwareDeadline
from gradlane.training.rendezvous.environment import RankInfo
from gradlane.training.rendezvous.incarnation import incarnation_of
from gradlane.training.rendezvous.rendezvous import RendezvousScope

_NO_LIMIT_S = 1e9
"""No time limit: who serves waits for the ranks that train, whose ends it hears of."""
_TICK_S = 0.1

_sessions: dict[tuple[str, int, int], int] = {}
"""Sessions with ranks that serve, so far, by (job, restart, rank)."""


class ServerRegistry:
    """The place in the store where a session's announcements are left; on every rank alike."""

    def __init__(self, store: BoundedStore, rank_info: RankInfo, timeout_s: float) -> None:
        """Count the session; nobody is waited for yet.

        Args:
            store: the rendezvous store.
            rank_info: this rank's.
            timeout_s: how long to wait for other ranks, in seconds, for each question.
        """
        key = (rank_info.job, rank_info.restart, rank_info.rank)
        self._number = _sessions.get(key, 0)
        _sessions[key] = self._number + 1
        self._store = store
        self._timeout_s = timeout_s
        self._scope: RendezvousScope | None = None
        self.rank_info = rank_info

    @property
    def scope(self) -> RendezvousScope:
        """The place itself; the first time all ranks of the job come together.

        Raises:
            RendezvousError: they do not, or the store is gone.
        """
        if self._scope is None:
            incarnation, number = (
                incarnation_of(self._store, self.rank_info, self._timeout_s),
                self._number,
            )
            self._scope = RendezvousScope(
                self._store, self.rank_info, f"serving/{number}", self._timeout_s, incarnation
            )
        return self._scope


def refuse_to_serve(scope: RendezvousScope, reason: str) -> None:
    """Tell all ranks of a channel, in place of an address, that this one cannot serve it."""
    scope.put(f"address/{scope.rank_info.rank}", json.dumps({"refused": reason}))


def check_codecs_served(choices: Sequence[CodecChoice], rank_info: RankInfo) -> None:
    """Check that ranks that only serve can add up what travels in these codecs.

    Raises:
        ValueError: one of them keeps what results have lost on the slice's owner, where no
            checkpoint reaches it; the message names the tensor.
    """
    for choice in choices if rank_info.serving else ():
        if choice.facts is not None and choice.facts.residual_width > 0:
            raise ValueError(
                f"codec {choice.codec!r} of {choice.tensor!r} while {rank_info.serving} ranks only "
                "serve: it keeps what results have lost on the owner of each slice, where "
                "checkpoints do not reach it; use a codec without error feedback, such as "
                "qsgd:bits=8, or servers="
            )


def _agreed_facts(rank_info: RankInfo) -> dict[str, object]:
    """Return what all ranks must agree on before any of them serves."""
    return {"workers": rank_info.world_size, "ranks": rank_info.ranks, "version": __version__}


@dataclass(frozen=True)
class JobAnnouncement:
    """All that a rank needs to know of a channel to serve it.

    Attributes:
        channel: number of the meeting of its ranks.
        ranks: of the session, in the order that they have in the channel.
        rows: the plan's tensors.
        strategy: of the plan.
        slice_elems: of the plan.
        seed: of the plan.
        update: where the optimizer runs.
        settings: the core's options; those of a rank or a machine are its own.
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
    """Rank 0's word to the ranks that serve."""

    def __init__(self, registry: ServerRegistry) -> None:
        """Invite nobody yet.

        Args:
            registry: where announcements are left.
        """
        self._registry = registry
        self._count = 0
        self._ended = False

    def announce(self, announcement: JobAnnouncement) -> None:
        """Invite all ranks that serve to a channel; with the first one, say who trains.

        Raises:
            RendezvousError: the store is gone.
        """
        scope = self._registry.scope
        if self._count == 0:
            scope.put("terms", json.dumps(_agreed_facts(self._registry.rank_info)))
        scope.put(f"channel/{self._count}", json.dumps(asdict(announcement)))
        self._count += 1

    def end(self, reason: str = "") -> None:
        """Say that there will be no more channels, and why, if the session was given up.

        Before the first channel nobody has met: who serves finds the store gone, or gives up.
        """
        if self._ended or self._count == 0:
            return
        self._ended = True
        try:
            record = json.dumps({"reason": reason, "channels": self._count})
            self._registry.scope.put("end", record)
        except RendezvousError:
            # Who serves has heard of the end through its channels, or finds the store gone.
            return


@dataclass(frozen=True)
class ServedStats:
    """What a rank has served of one channel.

    Attributes:
        tensors: trained tensors of the channel.
        owned_bytes: bytes of them that this rank owns.
        total_bytes: bytes of all of them.
        steps: training steps, as well as they can be counted by slices.
        rx_bytes: payload of gradients that came.
        tx_bytes: payload of results that left.
    """

    tensors: int
    owned_bytes: int
    total_bytes: int
    steps: int
    rx_bytes: int
    tx_bytes: int


class _ServedChannel:
    """One channel that is served, on a thread of its own."""

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
    """What a rank that only serves does in a session."""

    def __init__(
        self,
        core: CoreModule,
        registry: ServerRegistry,
        store: BoundedStore,
        secret: str | None,
        listen: Callable[[RankInfo], tuple[Listener, str]],
        *,
        work_threads: int,
        io_threads: int,
        idle_timeout_s: float,
    ) -> None:
        """Serve nothing yet.

        Args:
            core: the compiled core.
            registry: where rank 0 leaves announcements.
            store: the rendezvous store.
            secret: the user's own, or None.
            listen: binds a socket; returns it and the address that others reach it at.
            work_threads: threads that add gradients up.
            io_threads: threads that drive the sockets.
            idle_timeout_s: seconds to wait for a channel where none is open.
        """
        self._core = core
        self._registry = registry
        self._store = store
        self._secret = secret
        self._listen = listen
        self._work_threads = work_threads
        self._io_threads = io_threads
        self._idle_timeout_s = idle_timeout_s
        self._channels: list[_ServedChannel] = []
        self._abort_reason: str | None = None

    def served(self) -> list[ServedStats]:
        """Return what was served so far, by channel."""
        return [channel.served() for channel in self._channels]

    def run(self, on_channel: Callable[[ServedStats], None], on_tick: Callable[[], None]) -> None:
        """Serve until the ranks that train have closed their sessions.

        Args:
            on_channel: called when a channel is connected.
            on_tick: called some ten times a second.

        Raises:
            RanksDifferError: rank 0 says something else of who trains, or has another version.
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
                # Channels that are open tell whose loss it is; `_has_ended` looks at the rest.
                with contextlib.suppress(StoreLostError):
                    record = self._registry.scope.peek(f"channel/{len(self._channels)}")
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
                        f"for {self._idle_timeout_s:g} s: do they run, and do they call prepare?"
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
        """Give up all channels and tell their ranks why."""
        self._abort_reason = self._abort_reason or reason
        for channel in self._channels:
            if channel.is_open:
                channel.abort(reason)

    def _agreed_rank_info(self) -> RankInfo:
        """Wait for rank 0's word on who trains, and compare it with this rank's own."""
        rank_info = self._registry.rank_info
        try:
            agreed = json.loads(self._registry.scope.get("terms", 0))
        except RendezvousError as error:
            raise RendezvousError(
                f"{error}; a rank that serves waits for a training script that calls "
                "gradlane.init(workers=...), with the number of ranks that train"
            ) from error
        if not rank_info.world_size:
            # The command knows no number of its own.
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
        # Without a channel the others fail by themselves: a rank that should train is missing.
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
        settings["io_threads"] = self._io_threads
        settings["trace"] = False
        channel = connect_channel(
            self._core, scope, listener, host, settings, plan, secret, announcement.ranks
        )
        wait_until_all_are_connected(self._core, channel, scope)
        return _ServedChannel(self._core, channel, plan, rank_info.rank)

    def _has_ended(self) -> bool:
        """Whether rank 0 has said that there is no more to serve, or is gone after its goodbye."""
        if self._abort_reason is not None:
            return True
        try:
            record = self._registry.scope.peek("end")
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
