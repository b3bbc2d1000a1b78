"""A cut: the samples that an epoch has left, shared out to the ranks by arithmetic alone.

Samples are named by their positions in the epoch's order, in ranges; nothing here is as long as the
dataset. Each rank begins with the batches that it had drawn before the cut, its queue, and then
takes new ones: step by step, and rank by rank in each, the next `batch_size` positions of what was
drawn by none, the pool.

Every rank has the same number of steps, the smallest in which all fits. Where queues end at
different steps near the end of the epoch, their last batches return to the pool, so that every rank
gets a part.
"""

from __future__ import annotations

import bisect
import itertools
import json
from collections.abc import Iterable, Sequence

from gradlane.errors import RefusedError

Ranges = tuple[tuple[int, int], ...]
"""First position and the one after the last, of each range; in the order of their training."""


class Cut:
    """The batch of every rank in every step from a change of the members on.

    Without `drop_last` the pool is used up: the batches of the last step, or of the last two, share
    evenly what is left. Where it has fewer samples than there are batches to fill, samples of the
    epoch are repeated, one a batch; the position of a repeated one has `samples` added to it.
    """

    def __init__(
        self,
        samples: int,
        left: Ranges,
        queues: Sequence[Sequence[Ranges]],
        batch_size: int,
        *,
        drop_last: bool,
        least_steps: int = 0,
    ) -> None:
        """Share out what is left.

        Args:
            samples: in the whole epoch.
            left: what no rank has drawn.
            queues: batches that each rank has drawn and not trained, by rank.
            batch_size: samples of a batch on one rank, from 1 on.
            drop_last: leave out the samples that fill no step of whole batches.
            least_steps: steps that there are at least: batches that a rank holds already.
        """
        self.samples = samples
        self._given = (left, tuple(map(tuple, queues)), least_steps)
        self._batch_size = batch_size
        self._drop_last = drop_last
        self._least = least_steps
        self._queued = self._given[1]
        self._left = _count(samples, left)
        depths = [len(queue) for queue in self._queued]
        self.steps = self._find_steps(max(depths))
        """Steps from this cut on, the same for all ranks."""
        depth = self._find_depth()
        self.queues = tuple(queue[:depth] for queue in self._queued)
        """Batches that each rank begins with; those behind them are no longer its own."""
        returned = [
            one
            for step in range(depth, max(depths))
            for queue in self._queued
            if step < len(queue)
            for one in queue[step]
        ]
        self._pool = _joined(samples, (*returned, *left))
        self._ends = list(itertools.accumulate(stop - start for start, stop in self._pool))
        self._pooled = self._ends[-1] if self._ends else 0
        self._slots = self._slots_before(self.steps)
        self._tail = self._find_tail()

    def describe(self) -> str:
        """Return the cut in JSON, for `from_description`."""
        return json.dumps(self._given)

    @classmethod
    def from_description(cls, text: str, samples: int, batch_size: int, *, drop_last: bool) -> Cut:
        """Return the cut of another rank; arguments as for a new one."""
        left, queues, least = json.loads(text)
        batches = [[tuple(map(tuple, batch)) for batch in queue] for queue in queues]
        return cls(
            samples,
            tuple(map(tuple, left)),
            batches,
            batch_size,
            drop_last=drop_last,
            least_steps=least,
        )

    def batch(self, rank: int, step: int) -> Ranges:
        """Return the positions of a rank's batch in a step, counted from the cut on."""
        queue = self.queues[rank]
        if step < len(queue):
            return queue[step]
        before = sum(len(other) <= step for other in self.queues[:rank])
        return self._fill(self._slots_before(step) + before)

    def batches(self, step: int) -> list[Ranges]:
        """Return the positions of all ranks' batches in a step."""
        slots = itertools.count(self._slots_before(step))
        return [
            queue[step] if step < len(queue) else self._fill(next(slots)) for queue in self.queues
        ]

    def untrained(self, trained: Sequence[int]) -> Ranges:
        """Return what is left when each rank has trained so many of its batches.

        Args:
            trained: batches by rank, from the cut on.
        """
        edge = min(self.steps, max(*trained, *map(len, self.queues)))
        found: list[tuple[int, int]] = []
        for step in range(min(trained), edge):
            for batch, done in zip(self.batches(step), trained, strict=True):
                if step >= done:
                    found.extend(batch)
        found.extend(self._take(self._offset(self._slots_before(edge)), self._pooled))
        return _joined(self.samples, found)

    def _find_steps(self, longest: int) -> int:
        """Return the smallest number of steps that all fits in, or the largest that is filled."""
        for steps in range(self._least, longest + 1):
            spare = self._batch_size * self._slots_at(steps, steps) - self._pool_at(steps)
            if spare >= 0:
                goes_back = self._drop_last and spare > 0 and steps > self._least
                return steps - 1 if goes_back else steps
        whole = self._left + self._batch_size * sum(map(len, self._queued))
        step = self._batch_size * len(self._queued)
        return max(self._least, whole // step if self._drop_last else -(-whole // step))

    def _find_depth(self) -> int:
        """Return how much of the queues stays, so that the pool fills all other batches."""
        depth = self.steps
        while depth > self._least and self._pool_at(depth) < self._slots_at(self.steps, depth):
            depth -= 1
        return depth

    def _slots_at(self, steps: int, depth: int) -> int:
        """Return the number of new batches in so many steps, with queues of at most a depth."""
        return sum(max(0, steps - min(depth, len(queue))) for queue in self._queued)

    def _pool_at(self, depth: int) -> int:
        """Return the samples of the pool, with queues of at most a depth."""
        return self._left + sum(
            _count(self.samples, batch) for queue in self._queued for batch in queue[depth:]
        )

    def _slots_before(self, step: int) -> int:
        return sum(max(0, step - len(queue)) for queue in self.queues)

    def _find_tail(self) -> int:
        """Return how many of the last new batches share what is left; the others are full."""
        missing = self._slots * self._batch_size - self._pooled
        if missing <= 0:
            return 0
        if self._pooled < self._slots:
            return self._slots
        # Each batch of the tail keeps one sample at least.
        return next(
            tail
            for steps in reversed(range(self.steps))
            if (tail := self._slots - self._slots_before(steps)) * (self._batch_size - 1) >= missing
        )

    def _offset(self, slot: int) -> int:
        """Return the first sample of a new batch, counted in the pool."""
        full = self._slots - self._tail
        if slot <= full:
            return slot * self._batch_size
        samples = self._pooled - full * self._batch_size
        share, more = divmod(samples, self._tail)
        return full * self._batch_size + (slot - full) * share + min(slot - full, more)

    def _fill(self, slot: int) -> Ranges:
        """Return the positions of a new batch."""
        start, stop = self._offset(slot), self._offset(slot + 1)
        if start == stop:
            repeated = self.samples + (slot - self._pooled) % self.samples
            return ((repeated, repeated + 1),)
        return self._take(start, stop)

    def _take(self, start: int, stop: int) -> Ranges:
        """Return the positions of a part of the pool."""
        found: list[tuple[int, int]] = []
        index = bisect.bisect_right(self._ends, start)
        while start < stop:
            end = self._ends[index]
            shift = self._pool[index][1] - end
            found.append((start + shift, min(stop, end) + shift))
            start, index = end, index + 1
        return tuple(found)


def ranges_of(left: object, samples: int) -> Ranges:
    """Return the ranges of a state.

    Raises:
        ValueError: they are no ranges of positions of that many samples, each at most once.
    """
    try:
        found = tuple((int(start), int(stop)) for start, stop in left)  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        raise RefusedError(
            f"the state's samples left are {left!r}, no list of ranges: load what state_dict() "
            "returned"
        ) from None
    edge = 0
    for start, stop in sorted(found):
        if not edge <= start < stop <= samples:
            raise RefusedError(
                f"the state's samples left include {start} to {stop} of {samples}, or have some "
                "twice: load what state_dict() returned"
            )
        edge = stop
    return found


def _joined(samples: int, ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return ranges without repeated samples, neighbours as one."""
    found: list[tuple[int, int]] = []
    for start, stop in ranges:
        if start >= samples or start == stop:
            continue
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return tuple(found)


def _count(samples: int, ranges: Ranges) -> int:
    """Return the number of samples in ranges, without repeated ones."""
    return sum(stop - start for start, stop in ranges if start < samples)
