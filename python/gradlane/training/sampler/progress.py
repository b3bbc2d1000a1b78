"""How far a rank has come in a cut: batches that it has drawn, taken and trained."""

from __future__ import annotations

import array
import bisect
from collections import deque
from collections.abc import Iterable, Iterator

from gradlane.training.sampler.cut import Cut, Ranges


class Progress:
    """Counts the batches of a rank, from a cut on."""

    def __init__(self, cut: Cut, rank: int) -> None:
        """Begin a cut with nothing drawn.

        Args:
            cut: of all ranks.
            rank: this rank in it.
        """
        self.cut = cut
        self.rank = rank
        self.drawn = 0
        """Batches that this rank has drawn, its queue included."""
        self.before = 0
        """Batches that it trained before the cut."""
        self._waiting: deque[bool] = deque()
        # The step that each batch which the program has taken is trained in; 8 bytes each.
        self._steps = array.array("q")

    @property
    def taken(self) -> int:
        """Batches that the program has taken from the loader."""
        return len(self._steps)

    @property
    def waiting(self) -> int:
        """Batches that the loader has drawn and not yielded."""
        return len(self._waiting)

    @property
    def is_drawn(self) -> bool:
        """Whether this rank has drawn all its batches."""
        return self.drawn == self.cut.steps

    def draw(self) -> Ranges:
        """Return the positions of the next batch."""
        batch = self.cut.batch(self.rank, self.drawn)
        self.drawn += 1
        self._waiting.append(True)
        return batch

    def take(self, step: int) -> bool:
        """Count the next batch that the loader yields; return False if it is no longer this rank's.

        Args:
            step: the step that it is trained in.
        """
        is_own = self._waiting.popleft()
        if is_own:
            self._steps.append(step)
        return is_own

    def trained_before(self, step: int) -> int:
        """Return how many batches are trained in the steps before one."""
        return bisect.bisect_left(self._steps, step)

    def follow(self, cut: Cut, rank: int, trained: int) -> None:
        """Go over to another cut.

        Args:
            cut: the next one; this rank's queue in it has what it had drawn, or the first of it.
            rank: this rank in it.
            trained: batches of this cut that are trained.
        """
        self.cut, self.rank = cut, rank
        self.before += trained
        self._steps = self._steps[trained:]
        self.drawn = len(cut.queues[rank])
        self._waiting = deque(_first(self._waiting, self.drawn - self.taken))


def _first(waiting: Iterable[bool], number: int) -> Iterator[bool]:
    """Keep the first so many of the batches that were this rank's."""
    for is_own in waiting:
        yield is_own and number > 0
        number -= is_own
