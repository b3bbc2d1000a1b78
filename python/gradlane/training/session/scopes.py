"""The places where the ranks of a session agree, one after the other."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence

from gradlane.errors import RendezvousError
from gradlane.formats.longer_waits import CONNECT
from gradlane.training.rendezvous.bounded_store import BoundedStore
from gradlane.training.rendezvous.deadlock import DeadlockDetector
from gradlane.training.rendezvous.environment import RankInfo
from gradlane.training.rendezvous.incarnation import incarnation_of
from gradlane.training.rendezvous.presence import Presence
from gradlane.training.rendezvous.rendezvous import RendezvousScope
from gradlane.training.rendezvous.start_failures import TELL_S, StartFailures

log = logging.getLogger("gradlane")

_LAST_WORD_S = 2.0
"""Longest time that a rank waits for others to hear that the ranks have not met."""

_sessions: dict[tuple[str, int, int], int] = {}
"""Sessions opened so far by (job, restart, rank), counted alike on all ranks."""
_channels: dict[tuple[str, int, int], int] = {}
"""Channels made so far by (job, restart, rank): ranks that make the same calls count the same."""


class SessionScopes:
    """Opens rendezvous scopes; all ranks open the same ones in the same order."""

    def __init__(
        self,
        store: BoundedStore,
        rank_info: RankInfo,
        timeout_s: float,
        deadlocks: DeadlockDetector,
        look: Callable[[], object],
        longest_s: float | None = None,
        failures: StartFailures | None = None,
    ) -> None:
        """Open nothing yet.

        Args:
            store: the rendezvous store.
            rank_info: this rank's.
            timeout_s: how long to wait for other ranks, in seconds, for each question.
            longest_s: how long for ranks that give signs of life; None: none are given.
            deadlocks: learns the name of the start.
            look: called while waiting; raises when the session has failed.
            failures: of ranks that do not get as far as being connected; None: nobody tells.
        """
        self._store = store
        self._rank_info = rank_info
        self._timeout_s = timeout_s
        self._deadlocks = deadlocks
        self._look = look
        self.presence: Presence | None = None
        """Signs of life of the ranks until they are connected."""
        self._failures = failures
        self._opened: list[RendezvousScope] = []
        key = (rank_info.job, rank_info.restart, rank_info.rank)
        number = _sessions[key] = _sessions.get(key, 0) + 1
        if longest_s is not None and rank_info.ranks > 1:
            signs = store.with_prefix(
                f"gradlane/{rank_info.job}/{rank_info.restart}/alive/{number}"
            )
            self.presence = Presence(signs, rank_info.rank, timeout_s, longest_s)
            self.presence.begin()
        self._arrivals = store.with_prefix(
            f"gradlane/{rank_info.job}/{rank_info.restart}/here/{number}"
        )
        if store.ends_with_rank_0 and rank_info.rank > 0:
            self._arrivals.set(str(rank_info.rank), "")
        if failures is not None:
            failures.listen(
                lambda: any(scope.is_connected for scope in self._opened), is_first=number == 1
            )

    @property
    def has_met(self) -> bool:
        """Whether a scope was opened."""
        return bool(self._opened)

    def open(self) -> RendezvousScope:
        """Open the next scope."""
        rank_info = self._rank_info
        key = (rank_info.job, rank_info.restart, rank_info.rank)
        request = None if self._failures is None else self._failures.request
        try:
            start = incarnation_of(
                self._store, rank_info, self._timeout_s, self._look, self.presence, request
            )
        except RendezvousError as error:
            if self._failures is not None:
                # Ranks that were there have heard it from rank 0, or do so at once.
                self._failures.tell(str(error), _LAST_WORD_S)
                # The store may have ended with the rank that has failed.
                self._failures.check()
            raise
        if not self._opened:
            self._deadlocks.use_incarnation(start.name)
        number = _channels.get(key, 0)
        _channels[key] = number + 1
        scope = RendezvousScope(
            self._store, rank_info, number, self._timeout_s, start, self._look, self.presence
        )
        self._opened = [one for one in self._opened if not one.has_deleted_keys] + [scope]
        return scope

    def end_presence(self) -> None:
        """Give no more signs of life: this rank does not come any more."""
        if self.presence is not None:
            self.presence.end()

    def wait_for_arrivals(self) -> None:
        """Keep rank 0's store until every rank has reached it, where they have never met.

        A late rank would take the store for one that is still to come, and wait for it in vain.
        """
        if not self._store.ends_with_rank_0 or self._rank_info.rank > 0:
            return
        ranks = range(1, self._rank_info.ranks)
        if not self._opened:
            self._wait_for(ranks)
        for rank in ranks:
            self._arrivals.delete(str(rank))

    def _wait_for(self, ranks: Sequence[int]) -> None:
        with contextlib.suppress(RendezvousError):
            self._arrivals.wait_for({str(rank): rank for rank in ranks}, self._timeout_s)
            for rank in ranks:
                if self._arrivals.read(str(rank), rank) is None:
                    log.warning(
                        "rank %d has not opened the session in the %g s that rank 0 waited to end "
                        "its own: look at that rank's log (longer waits: %s)",
                        rank,
                        self._timeout_s,
                        CONNECT,
                    )

    def leave(self) -> None:
        """Leave all scopes."""
        for scope in self._opened:
            if not scope.has_deleted_keys:
                scope.delete_keys()

    def give_up(self, reason: str, limit_s: float = TELL_S) -> None:
        """Tell the ranks that are not connected yet why this rank does not come.

        Args:
            reason: one line.
            limit_s: longest time that this rank waits for them to hear it, in seconds.
        """
        if self._opened and self._opened[-1].is_open:
            self._opened[-1].abort(reason)
        if self._failures is not None and not any(scope.is_connected for scope in self._opened):
            self._failures.tell(reason, limit_s)

    def stop(self) -> None:
        """Look for no more failures of other ranks."""
        if self._failures is not None:
            self._failures.stop()
