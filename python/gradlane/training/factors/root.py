"""Makes the means of weights that this rank owns, for all ranks (scheme `adam`).

The factors of all ranks come to a weight's owner whenever the last of them is ready, and all others
wait for what it makes of them. So a thread of its own makes it: the program may be in its backward,
in an evaluation, or waiting for another owner, which may wait for this one. Of several weights the
one that forward needs first is next.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable

from gradlane.training.core import CoreModule, RankChannel


class RootThread:
    """The thread on which a rank answers; it ends with the channel."""

    def __init__(
        self,
        core: CoreModule,
        channel: RankChannel,
        answer: Callable[[int, int], None],
        describe: Callable[[int, int], str],
    ) -> None:
        """Start to answer.

        Args:
            core: where the channel's errors come from.
            channel: it asks.
            answer: makes a mean of all ranks' blocks and hands it over, for a tensor in a step;
                may raise.
            describe: what goes on, for messages, when tensor and step are being answered for.
        """
        self._core = core
        self._channel = channel
        self._make_answer = answer
        self._describe = describe
        thread = threading.Thread(target=self._run, name="gradlane-answers", daemon=True)
        thread.start()

    def _run(self) -> None:
        waiting: list[tuple[int, int]] = []
        try:
            while True:
                asked = self._channel.next_root_requests(wait=not waiting)
                for index, step in asked:
                    heapq.heappush(waiting, (step, index))
                step, index = heapq.heappop(waiting)
                self._answer(index, step)
        except self._core.ChannelError:
            return  # The session is over; its waits raise the reason.

    def _answer(self, index: int, step: int) -> None:
        try:
            self._make_answer(index, step)
        except self._core.ChannelError:
            raise
        except Exception as error:
            # No rank can go on without this answer: tell all of them the reason.
            self._channel.abort(f"{error} (noticed while {self._describe(index, step)})")
