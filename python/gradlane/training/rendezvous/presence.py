"""Signs of life of ranks that are not connected yet, so that the others wait for them.

A rank may read its data for an hour between `init` and `prepare`. Until it is connected, a thread
of its session counts up in the store. A rank that waits for it sees that, and waits on for as long
as for a connected rank. A rank that gives no sign is waited for as long as one that has to appear.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection

from gradlane.errors import RendezvousError
from gradlane.formats.longer_waits import PROGRESS
from gradlane.formats.rank_names import ranks_text
from gradlane.training.rendezvous.bounded_store import BoundedStore
from gradlane.training.rendezvous.deadline import SuspendAwareDeadline

_SIGNS_PER_LIMIT = 8
_INTERVAL_MAX_S = 1.0
_LOOKS_PER_LIMIT = 4
_LOOK_MAX_S = 5.0
BUSY_TEXT = (
    "which is alive and busy before that call; if it reads data, evaluates or loads for longer, "
    f"give all ranks a larger {PROGRESS}"
)
"""What a rank does that gives signs of life, and does not come."""


class Presence:
    """This rank's signs of life in the store, and those of the others."""

    def __init__(
        self, store: BoundedStore, rank: int, connect_timeout_s: float, longest_s: float
    ) -> None:
        """Give no sign yet.

        Args:
            store: for the signs of this session alone.
            rank: this rank.
            connect_timeout_s: longest wait for a rank without a sign, in seconds.
            longest_s: longest wait for a rank with signs, in seconds.
        """
        self._store = store
        self._rank = rank
        self._interval_s = min(_INTERVAL_MAX_S, connect_timeout_s / _SIGNS_PER_LIMIT)
        self.longest_s = longest_s
        """Longest wait for a rank that is alive, in seconds."""
        self._connections: set[object] = set()
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def is_connected(self) -> bool:
        """Whether connections to all ranks are open, which tell who is alive."""
        return bool(self._connections)

    def begin(self) -> None:
        """Give signs from now on, in a thread, until the ranks are connected."""
        self._thread = threading.Thread(target=self._run, name="gradlane-presence", daemon=True)
        self._thread.start()

    def connected(self, scope: object) -> None:
        """Note that all ranks of a scope are connected."""
        self._connections.add(scope)
        self._done.set()

    def parted(self, scope: object) -> None:
        """Note that the ranks of a scope are connected no more."""
        self._connections.discard(scope)

    def end(self) -> None:
        """Give no more signs."""
        self._done.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()

    def sign_of(self, rank: int) -> bytes | None:
        """Return a rank's last sign; None: there is none.

        Raises:
            RendezvousError: the store is gone or does not answer.
        """
        return self._store.read(str(rank), rank)

    def _run(self) -> None:
        count = 0
        # Calls of the program meet the loss of the store as well, and name it.
        with contextlib.suppress(RendezvousError):
            while not self._done.wait(self._interval_s):
                count += 1
                self._store.set(str(self._rank), str(count), on_poll=self._raise_if_done)
        self._store.delete(str(self._rank))

    def _raise_if_done(self) -> None:
        if self._done.is_set():
            raise RendezvousError("the ranks are connected")


class RankDeadline:
    """The time limit of a wait for ranks, which signs of life of all of them renew."""

    def __init__(
        self,
        limit_s: float,
        presence: Presence | None = None,
        extra_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the wait.

        Args:
            limit_s: longest wait without signs of life, in seconds.
            presence: has the signs; None: there are none.
            extra_s: seconds beyond all limits.
            clock: seconds of a clock that only goes forward.
        """
        self._presence = presence
        self._silence = SuspendAwareDeadline(limit_s + extra_s, clock)
        longest_s = limit_s if presence is None else max(limit_s, presence.longest_s)
        self._whole = SuspendAwareDeadline(longest_s + extra_s, clock)
        self._look = SuspendAwareDeadline(min(_LOOK_MAX_S, limit_s / _LOOKS_PER_LIMIT), clock)
        self._signs: dict[int, bytes | None] = {}
        self._alive: set[int] = set()

    @property
    def remaining_s(self) -> float:
        """Seconds until the limit without signs of life, as of the last poll; not negative."""
        return self._silence.remaining_s

    def is_over(self, slept_s: float, ranks: Collection[int]) -> bool:
        """Return whether the limit has passed; call it after each sleep.

        Args:
            slept_s: requested length of the sleep, in seconds.
            ranks: those that are waited for.

        Raises:
            RendezvousError: the store is gone or does not answer.
        """
        is_over, is_long = self._silence.is_over(slept_s), self._whole.is_over(slept_s)
        if self._presence is not None and (self._look.is_over(slept_s) or is_over):
            self._look.renew()
            signs = {rank: self._presence.sign_of(rank) for rank in ranks}
            # The first one may be of an earlier start.
            alive = {
                rank for rank in ranks if signs[rank] != self._signs.setdefault(rank, signs[rank])
            }
            if self._presence.is_connected or alive.issuperset(ranks):
                self._silence.renew()
                self._signs = signs
                is_over = False
            else:
                self._alive = alive
        if is_long and not is_over:
            self._alive = set(ranks)
        return is_over or is_long

    def silent(self, ranks: Collection[int]) -> list[int]:
        """Return those ranks that have given no sign of life, once the limit has passed."""
        return [rank for rank in ranks if rank not in self._alive]

    def describe(self, ranks: Collection[int]) -> str:
        """Return how long which ranks were waited for: "5 s for ranks 1, 3"."""
        silent = self.silent(ranks)
        limit_s = (self._silence if silent else self._whole).limit_s
        awaited = silent or list(ranks)
        return f"{limit_s:g} s for {ranks_text(awaited)}"
