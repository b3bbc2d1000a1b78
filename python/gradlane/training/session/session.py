"""Sessions: how a training program gets its ranks connected and its model hooked.

The loop stays the user's own::

    session = gradlane.init()
    model, optimizer = session.prepare(model, optimizer)
    for x, y in loader:
        loss_fn(model(x), y).backward()     # gradients leave as soon as they are ready
        optimizer.step()                    # returns at once
        optimizer.zero_grad()
    session.close()

`optimizer.step()` records the hyper-parameters of the moment; each parameter is updated when its
averaged gradient has arrived, at the latest when something reads it. References to parameters that
the program already holds (such as a list made before `step()`) are not guarded: call
`session.synchronize()` before reading through them.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from gradlane.errors import GradlaneError, SessionClosedError, UsageError
from gradlane.training.arrays.exchange import ArrayExchange
from gradlane.training.arrays.surface import SessionArrays
from gradlane.training.checkpoints.manager import make_checkpoints
from gradlane.training.connection import SessionContext
from gradlane.training.core import CoreModule, translate_error
from gradlane.training.model.join import Join
from gradlane.training.model.prepared import CLOSE_TIMEOUT_S, PreparedModel
from gradlane.training.monitoring.observer import make_observer
from gradlane.training.monitoring.recorder import make_recorder
from gradlane.training.options.options import Options
from gradlane.training.plans.in_force import ActivePlan
from gradlane.training.rendezvous.bounded_store import BoundedStore
from gradlane.training.rendezvous.deadlock import DeadlockDetector
from gradlane.training.rendezvous.environment import RankInfo
from gradlane.training.rendezvous.incarnation import incarnation_of
from gradlane.training.rendezvous.rendezvous import RendezvousScope, store_address
from gradlane.training.rendezvous.serving import JobAnnouncements, ServerRegistry
from gradlane.training.session import lifecycle
from gradlane.training.session.models import SessionModels
from gradlane.training.session.pace import SessionPace
from gradlane.training.session.reports import SessionReports
from gradlane.training.session.serving import SessionServing
from gradlane.training.session.staleness import StalenessSums
from gradlane.training.session.state import SessionState

_channels: dict[tuple[str, int, int], int] = {}
"""Channels made so far by (job, restart, rank): ranks that make the same calls count the same."""


class Session(
    SessionModels, SessionArrays, SessionState, SessionReports, SessionPace, SessionServing
):
    """A rank's part in a training job; made by `gradlane.init`."""

    def __init__(
        self,
        core: CoreModule,
        options: Options,
        place: RankInfo,
        store: BoundedStore,
        secret: str | None,
    ) -> None:
        """Open a session; use `gradlane.init` instead."""
        host, port = store_address(store.store, os.environ)
        registry = (
            ServerRegistry(store, place, options.connect_timeout_s) if place.serving else None
        )
        self._recorder = None if place.serves else make_recorder(options, place)
        self._observer = make_observer(options, place)
        self._checkpoints = make_checkpoints(
            None if place.serves else options.checkpoint,
            options.checkpoint_every,
            options.checkpoint_keep,
            place,
            options.connect_timeout_s,
        )
        self._standstill = DeadlockDetector(store, place)
        self._ctx = SessionContext(
            core,
            options,
            place,
            host,
            port,
            secret,
            self._standstill,
            self._observer,
            self._checkpoints,
            self._recorder,
            announcements=JobAnnouncements(registry)
            if registry is not None and place.rank == 0
            else None,
        )
        self._store = store
        self._server = (
            self._make_server(registry) if registry is not None and place.serves else None
        )
        self._prepared: list[PreparedModel] = []
        self._meetings: list[RendezvousScope] = []
        self._start_arrays()
        self._plans = ActivePlan(options, self._meet, self._prepared, self.abort)
        self._ended: str | None = None
        lifecycle.watch(self)

    @property
    def rank(self) -> int:
        """This rank."""
        return self._ctx.rank_info.rank

    @property
    def world_size(self) -> int:
        """Number of ranks that train: all, unless `workers` said otherwise."""
        return self._ctx.rank_info.world_size

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients add up in `.grad` without sending them, for accumulation over batches.

        As with DDP: run all backward calls of a step but the last inside, and the last outside,
        which sends the sums. Where all were inside, `optimizer.step()` sends them. It holds for all
        models of the session. What is sent are sums over batches: divide each loss by their number.
        """
        self._check_open()
        before = [(prepared.steps, prepared.steps.accumulates) for prepared in self._prepared]
        for steps, _ in before:
            steps.accumulates = True
        try:
            yield
        finally:
            for steps, accumulates in before:
                steps.accumulates = accumulates

    def join(self, *, throw_on_early_termination: bool = False) -> Join:
        """Return a context for loops over uneven data; all ranks run theirs inside.

        A rank that leaves the block goes on taking part in the others' steps without gradients,
        which count as zeros: means still divide by the number of all ranks, as with DDP. When the
        last rank leaves, all get its parameters, buffers, optimizer state and hyper-parameters.
        Nothing is sent for that where the data was even. Schedulers are the user's own: those that
        count batches must count alike, for example by epochs.

        Args:
            throw_on_early_termination: raise `UnevenDataError` on all ranks as soon as one has run
                out, in the same step, which is not taken.

        Raises:
            UsageError: on entry: with `update="server"`, or inside another one; at the end: a
                backward without `optimizer.step()` or `zero_grad()`.
        """
        self._check_open()
        if self._ctx.options.leaves_out:
            raise UsageError(
                "session.join() where stragglers are left out: a rank without data would be one, "
                'and the others would not wait for it; use stragglers="wait"'
            )
        return Join(list(self._prepared), self.rank, throw_on_early_termination)

    def synchronize(self) -> None:
        """Wait until every parameter of every model has its update.

        With `strategy="asgd"` it is a collective call: it waits until all ranks have made it, and
        then gives all of them the servers' parameters, so that they are the same everywhere.

        Raises:
            GradlaneError: the session has failed or was closed.
        """
        self._check_open()
        for prepared in self._prepared:
            prepared.synchronize()

    def staleness(self) -> list[dict[str, Any]]:
        """Return how stale gradients were, with `strategy="asgd"`; empty with all others.

        The staleness of a gradient is the number of updates that its slice had had since this
        gradient's rank received it. Every rank counts what it applied as an owner of slices, which
        is an even part of the whole.

        Returns:
            For each rank whose gradients were applied here: `rank`, `pushes`, `mean`, `max` and
            `histogram` (pushes by staleness from 0 on; entry 64 counts that and all above).
        """
        total: dict[int, StalenessSums] = {}
        for prepared in self._prepared:
            for rank, reading in enumerate(prepared.staleness()):
                total.setdefault(rank, StalenessSums()).add(reading)
        return [{"rank": rank, **tally.to_json()} for rank, tally in sorted(total.items())]

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Bring the last step to an end, unhook the models and part from the other ranks.

        Gradients without an `optimizer.step()` are forgotten. Closing twice is allowed.

        Args:
            timeout_s: how long to wait for the other ranks to close, in seconds.

        Raises:
            GradlaneError: the session has failed, or the last step could not be finished.
        """
        if self._ended is not None:
            return
        self._ended = "closed"
        lifecycle.unwatch(self)
        self._plans.stop()
        errors: list[GradlaneError] = []
        for part in self._parts():
            try:
                part.close(timeout_s)
            except GradlaneError as error:
                errors.append(error)
        if self._checkpoints is not None:
            self._checkpoints.close()
        self._standstill.close()
        self._stop_serving()
        parts = self._parts()
        if parts and all(part.has_parted for part in parts):
            for meeting in (one for one in self._meetings if not one.has_deleted_keys):
                meeting.delete_keys()
        self._store.close()
        self._write_reports()
        if errors:
            raise errors[0]

    def abort(self, reason: str) -> None:
        """Give up at once and tell every other rank why; their next call raises it.

        Args:
            reason: one line.
        """
        if self._ended is not None:
            return
        self._ended = f"given up: {reason}"
        lifecycle.unwatch(self)
        self._plans.stop()
        if self._checkpoints is not None:
            self._checkpoints.stop()
        for part in self._parts():
            part.abort(reason)
        last = self._meetings[-1] if self._meetings else None
        if last is not None and not self._parts() and last.is_open:
            # The others wait for this rank there, and have no channel to hear of it through.
            last.abort(f"rank {self.rank} gave up: {reason}")
        self._standstill.close()
        self._stop_serving(reason)
        self._write_reports()

    def __enter__(self) -> Session:
        """Return the session itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close, or, if an exception comes through, give up with its text."""
        if error is None:
            self.close()
        else:
            self.abort(lifecycle.describe_exception(error))

    def close_at_exit(self) -> None:
        """Close while the interpreter ends: what goes wrong is printed, not raised."""
        try:
            if any(part.in_step for part in self._parts()):
                self.abort("the program ended between backward() and optimizer.step()")
            else:
                self.close()
        except GradlaneError as error:
            print(f"gradlane: rank {self.rank}: {error}", file=sys.stderr)

    def forget_in_child(self) -> None:
        """Drop the session in a forked child, where it cannot be used."""
        self._ended = "left behind in the parent of this forked child"
        self._observer.forget_in_child()
        for part in self._parts():
            part.forget_in_child()

    def _parts(self) -> list[PreparedModel | ArrayExchange]:
        """Return what has a channel of its own: models, and the arrays if there are some."""
        return [*self._prepared, *([self._exchange] if self._exchange is not None else [])]

    def _meet(self) -> RendezvousScope:
        """Open the next place for ranks to meet; all ranks open the same ones in the same order."""
        place, timeout_s = self._ctx.rank_info, self._ctx.options.connect_timeout_s
        key = (place.job, place.restart, place.rank)
        start = incarnation_of(self._store, place, timeout_s)
        if not self._meetings:
            self._standstill.use_incarnation(start.name)
        number = _channels.get(key, 0)
        _channels[key] = number + 1
        meeting = RendezvousScope(self._store, place, number, timeout_s, start, self._look)
        self._meetings = [one for one in self._meetings if not one.has_deleted_keys] + [meeting]
        return meeting

    def _look(self) -> None:
        """Raise if a model or the arrays have lost a rank."""
        core = self._ctx.core
        for part in self._parts():
            if not part.has_parted:
                try:
                    part.channel.is_ready(0, 0)
                except core.ChannelError as error:
                    raise translate_error(core, error, "waiting for other ranks") from error

    def _write_reports(self) -> None:
        self._observer.close()
        if self._recorder is not None:
            self._recorder.write()

    def _check_open(self) -> None:
        if self._ended is not None:
            raise SessionClosedError(
                f"the session was {self._ended}; open a new one with gradlane.init"
            )
        self._check_trains()
