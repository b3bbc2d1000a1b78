"""A barrier for ranks that train asynchronously.

With `strategy="asgd"` every rank is somewhere else in its training. Where all of them have to be at
one point, as for equal parameters at the end, they say so in the rendezvous store and wait for each
other there. Meanwhile their channels go on serving the ranks that are still training.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

from gradlane.errors import ProgressTimeoutError, RanksDifferError
from gradlane.formats.longer_waits import PROGRESS
from gradlane.training.core import Channel
from gradlane.training.rendezvous.deadline import SuspendAwareDeadline
from gradlane.training.rendezvous.rendezvous import RendezvousScope
from gradlane.training.rendezvous.wait_notifier import WAIT_NOTIFIER

_LONGEST_PAUSE_S = 0.05
_LOOK_S = 1.0


class Barrier:
    """Waits until all ranks of one channel are at the same point."""

    def __init__(
        self,
        channel: Channel,
        scope: RendezvousScope,
        timeout_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Start; all ranks wait equally often and for the same reasons.

        Args:
            channel: raises when the session has failed.
            scope: where the ranks of the channel have met.
            timeout_s: how long to wait while no rank that is missing pushes anything, in seconds.
            clock: seconds of a clock that only goes forward.
            sleep: waits some seconds.
        """
        self._channel = channel
        self._scope = scope
        self._timeout_s = timeout_s
        self._clock = clock
        self._sleep = sleep
        self._number = 0

    def all_here(self, call: str, word: str = "") -> list[str]:
        """Wait until every rank is at this point.

        Args:
            call: why; the same on every rank.
            word: this rank's message to the others.

        Returns:
            Every rank's word, by rank.

        Raises:
            RanksDifferError: another rank is there for another reason.
            ProgressTimeoutError: a rank does not come, and does not train either.
            ChannelError: the session has failed.
        """
        rank_info = self._scope.rank_info
        self._number += 1
        key = f"gather/{self._number}"
        self._scope.put(f"{key}/{rank_info.rank}", json.dumps([call, word]))
        missing = list(range(rank_info.world_size))
        words = [""] * rank_info.world_size
        with WAIT_NOTIFIER:
            self._wait(key, call, missing, words)
        if self._number > 1:
            # Everybody has read the last point's words before coming to this one.
            self._scope.delete(f"gather/{self._number - 1}/{rank_info.rank}")
        return words

    def _wait(self, key: str, call: str, missing: list[int], words: list[str]) -> None:
        pause_s = 0.0005
        looked_s = self._clock()
        deadline = SuspendAwareDeadline(self._timeout_s, self._clock)
        pushes = -1
        while True:
            for rank in list(missing):
                said = self._scope.peek(f"{key}/{rank}", rank)
                if said is None:
                    break
                theirs, words[rank] = json.loads(said)
                self._compare(call, rank, theirs)
                missing.remove(rank)
            if not missing:
                return
            self._channel.is_ready(0, 0)
            if self._scope.on_poll is not None:
                self._scope.on_poll()
            now_s = self._clock()
            if now_s - looked_s >= _LOOK_S or pushes < 0:
                looked_s = now_s
                if pushes != (pushes := self._pushes()):
                    deadline.renew()
                if deadline.is_over(_LOOK_S):
                    raise ProgressTimeoutError(
                        f"rank {self._scope.rank_info.rank} waited {self._timeout_s:g} s in "
                        f"{call} "
                        f"for ranks {', '.join(map(str, missing))}, which neither came there nor "
                        'trained: with strategy="asgd" all ranks have to call it (where they '
                        f"evaluate, save or load for longer than that: {PROGRESS})",
                        None,
                    )
            self._sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _compare(self, call: str, rank: int, theirs: str) -> None:
        if theirs != call:
            raise RanksDifferError(
                f"rank {self._scope.rank_info.rank} is in {call}, and rank {rank} in "
                f"{theirs}: with "
                'strategy="asgd" both wait for all ranks, so that all of them have to make the '
                "same calls in the same order"
            )

    def _pushes(self) -> int:
        """Return the number of pushes that were applied here so far."""
        readings = json.loads(self._channel.metrics_json()).get("staleness", [])
        return sum(reading["pushes"] for reading in readings)
