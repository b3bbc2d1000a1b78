"""Failures of ranks before they are connected, told to all others within seconds.

Until the ranks have agreed on their incarnation no key of the store is of this start alone. So each
rank draws a request as it opens its session, and leaves it in the store; a rank that fails answers
the requests of all others with its reason. An answer to a request of an earlier start is none. A
thread of each session looks for an answer until the ranks are connected, also while the program
reads its data.

A rank that opens its session when nobody tells any more finds the last failure in the store, with
its time. It is of this start if this rank's process ran then, since a restart has new processes,
and has had no session before: a failure may be of that one.

A rank without the secret, whose file may be what is missing, answers unsigned. Such an answer ends
the start as well, which any process that writes the store can do anyway; its words are marked.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from gradlane.errors import RendezvousError
from gradlane.formats.untrusted import escaped
from gradlane.training.log import log
from gradlane.training.rendezvous.bounded_store import BoundedStore
from gradlane.training.rendezvous.deadline import SuspendAwareDeadline
from gradlane.training.rendezvous.environment import RankInfo

_REQUEST_BYTES = 8
_LOOK_EVERY_S = 0.25
_LOOKS = 40
"""Looks at this interval; later ones are four times as rare."""
TELL_S = 10.0
"""Longest time that a rank waits for the others to hear its reason."""
_PAUSE_S = 0.02
_QUIET_S = 1.0
_REASON_CHARS_MAX = 2000
_LAST_KEY = "last"
_SKEW_S = 2.0
"""Seconds that the clocks of two machines may be apart."""


@dataclass
class _Hearer:
    """A rank that is told of a failure.

    Attributes:
        knew: what it had heard before that, or in an earlier start; None: not looked at yet.
        told: its request that was answered.
    """

    knew: str | None
    told: str = ""


class StartFailures:
    """The failures of the ranks of a session's start, as one rank tells and hears them."""

    def __init__(self, store: BoundedStore, rank_info: RankInfo) -> None:
        """Know the other ranks.

        Args:
            store: the rendezvous store.
            rank_info: this rank's.
        """
        self._store = store.with_prefix(f"gradlane/{rank_info.job}/start")
        self._rank = rank_info.rank
        self._others = [rank for rank in range(rank_info.ranks) if rank != rank_info.rank]
        self.request = secrets.token_hex(_REQUEST_BYTES)
        """Drawn by this rank for this session."""
        self._hosts_store = rank_info.rank == 0 and store.ends_with_rank_0
        self._reason: str | None = None
        self._has_told = False
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def listen(self, is_connected: Callable[[], bool], *, is_first: bool = True) -> None:
        """Have the others know this rank, and look for failures from now on.

        Args:
            is_connected: whether a channel to the others is open, which tells failures itself.
            is_first: whether this process has had no session before.

        Raises:
            RendezvousError: the store is gone or does not answer.
        """
        if not self._others:
            return
        self._store.set(f"asked/{self._rank}", self.request)
        self._thread = threading.Thread(
            target=self._listen,
            args=(is_connected, is_first),
            name="gradlane-start",
            daemon=True,
        )
        self._thread.start()

    def check(self) -> None:
        """Raise the reason of a rank that has failed.

        Raises:
            RendezvousError: a rank has.
        """
        if self._reason is not None:
            raise RendezvousError(self._reason)

    def stop(self) -> None:
        """Look for no more failures."""
        self._done.set()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def tell(self, reason: str, limit_s: float = TELL_S) -> None:
        """Tell all ranks why this one does not come; it does not raise.

        It returns once all others have heard it or have failed as well, at the latest at the limit:
        ranks that have not opened their session by then wait in vain.

        Args:
            reason: one line, with this rank in it.
            limit_s: longest time, in seconds; also for a store that has not responded.
        """
        if self._has_told or (self._reason is not None and not self._hosts_store):
            return
        deadline = SuspendAwareDeadline(limit_s)
        if not self._store.answers:
            log.warning("%s; it tells the others if the store responds in %g s", reason, limit_s)
            self._store.wait_until_it_answers(limit_s)
            if not self._store.answers:
                return
        self._has_told = True
        # The store of rank 0 ends with it, and not all may have heard of the rank that has failed.
        reason = self._reason or reason
        # A store that this process has opened holds nothing of an earlier start.
        waiting = {rank: _Hearer("" if self._hosts_store else None) for rank in self._others}
        failing: dict[int, str] = {}
        is_quiet = True
        with contextlib.suppress(RendezvousError):
            failure = [time.time(), self._rank, reason, self.request]
            self._store.set(_LAST_KEY, json.dumps(failure))
            while waiting:
                for rank, hearer in list(waiting.items()):
                    if self._has_failed(rank, failing) or self._has_heard(rank, reason, hearer):
                        del waiting[rank]
                # After the look: a rank that has been seen here sees that, and may go.
                self._store.set(f"failing/{self._rank}", json.dumps([self.request, failing]))
                if deadline.is_over(_PAUSE_S):
                    return
                if is_quiet and deadline.remaining_s < limit_s - _QUIET_S:
                    is_quiet = False
                    log.warning("%s; it tells the others for up to %g s", reason, limit_s)
                time.sleep(_PAUSE_S)

    def _has_failed(self, rank: int, failing: dict[int, str]) -> bool:
        """Return whether a rank has failed in this start as well, and has seen this rank's failure.

        Args:
            rank: the rank.
            failing: takes the request of a rank that has failed, by rank.
        """
        with contextlib.suppress(ValueError):
            request, seen = json.loads(self._read(f"failing/{rank}") or "")
            failing[rank] = request
            # Drawn in this start, so what names it is of this start.
            return self._hosts_store or seen.get(str(self._rank)) == self.request
        return False

    def _has_heard(self, rank: int, reason: str, hearer: _Hearer) -> bool:
        """Answer a rank's request, once it is there; return whether it has heard of a failure."""
        asked = self._read(f"asked/{rank}")
        knows = self._read(f"knows/{rank}")
        if hearer.knew is None:
            hearer.knew = knows or ""
        if asked and hearer.told != asked:
            answer = [asked, self._rank, reason, self.request]
            self._store.set(f"failed/{rank}", json.dumps(answer))
            hearer.told = asked
        # What was there before may be of an earlier start.
        return bool(asked and knows and knows.startswith(asked) and knows != hearer.knew)

    def _read(self, key: str) -> str | None:
        claimed = self._store.read_claimed(key)
        return None if claimed is None else claimed[0].decode("utf-8", "replace")

    def _listen(self, is_connected: Callable[[], bool], is_first: bool) -> None:
        looks = 0
        heard = ""
        with contextlib.suppress(RendezvousError):
            self._look_back(is_first)
        # It goes on once it has heard of one: other ranks that fail wait until it has heard them.
        while not (self._done.is_set() or is_connected()):
            try:
                claimed = self._store.read_claimed(f"failed/{self._rank}", self._raise_if_done)
                teller = None if claimed is None else self._take(*claimed)
                if teller is not None and teller != heard:
                    heard = teller
                    self._store.set(f"knows/{self._rank}", f"{self.request} {heard}")
            except RendezvousError:
                # Calls of the program meet the loss of the store as well, and name it.
                return
            looks += 1
            self._done.wait(_LOOK_EVERY_S if looks < _LOOKS else 4 * _LOOK_EVERY_S)

    def _take(self, content: bytes, is_verified: bool) -> str | None:
        """Note a failure that answers this rank's request; return its rank's request, or None."""
        try:
            request, rank, reason, teller = json.loads(content)
        except (TypeError, ValueError):
            return None
        if request != self.request:
            return None
        self._note(rank, reason, is_verified)
        return str(teller)

    def _look_back(self, is_first: bool) -> None:
        """Note the last failure that nobody tells any more, if it is of this start."""
        claimed = self._store.read_claimed(_LAST_KEY, self._raise_if_done)
        if claimed is None:
            return
        with contextlib.suppress(TypeError, ValueError):
            at_s, rank, reason, _ = json.loads(claimed[0])
            if rank == self._rank:
                # It comes again.
                self._store.set(_LAST_KEY, json.dumps(None))
                return
            now_s = time.time()
            ran = now_s - process_age_s() + _SKEW_S < at_s < now_s + _SKEW_S
            if ran and is_first:
                late = f"{reason} ({max(0.0, now_s - at_s):.0f} s before this rank came)"
                self._note(rank, late, claimed[1])

    def _note(self, rank: object, reason: object, is_verified: bool) -> None:
        """Note a failure of a rank, to be raised by this one."""
        if not is_verified:
            words = escaped(str(reason), _REASON_CHARS_MAX)
            reason = (
                f"rank {rank!s:.20} cannot take part, by words in the store that are not signed "
                f"with this job's secret: {words}; set GRADLANE_SECRET_FILE to the same secret on "
                "every rank"
            )
        self._reason = self._reason or str(reason)

    def _raise_if_done(self) -> None:
        if self._done.is_set():
            raise RendezvousError("the start is over")


def process_age_s() -> float:
    """Return how long this process has run, in seconds."""
    with open("/proc/uptime", encoding="ascii") as uptime, open("/proc/self/stat") as stat:
        started_ticks = int(stat.read().rpartition(")")[2].split()[19])
        return float(uptime.read().split()[0]) - started_ticks / os.sysconf("SC_CLK_TCK")
