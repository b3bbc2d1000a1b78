"""Random runs of trainings whose machines are lost and replaced, event by event.

They know nothing of the formulas that they are compared with: machines fail and come back one by
one, and the training does what it does at each of these moments.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random


@dataclass
class Machines:
    """Machines that are lost and come back, each by itself."""

    count: int
    mtbf_s: float
    away_s: float
    """Seconds from a loss until the machine's ranks are there again."""
    random: Random
    up: set[int] = field(init=False)

    def __post_init__(self) -> None:
        self.up = set(range(self.count))

    def events(self, losses: int) -> Iterator[tuple[float, int, bool]]:
        """Yield time, machine and whether it is lost; `up` is as it was before the event."""
        queue = [(self.random.expovariate(1 / self.mtbf_s), one, True) for one in self.up]
        heapq.heapify(queue)
        while losses:
            at, one, is_lost = heapq.heappop(queue)
            yield at, one, is_lost
            if is_lost:
                losses -= 1
                self.up.discard(one)
                heapq.heappush(queue, (at + self.away_s, one, False))
            else:
                self.up.add(one)
                following = at + self.random.expovariate(1 / self.mtbf_s)
                heapq.heappush(queue, (following, one, True))


@dataclass
class Progress:
    """Machine-seconds of training: those since the checkpoint may be lost."""

    interval_s: float
    write_s: float
    kept: float = 0.0
    pending: float = 0.0
    _phase_s: float = 0.0
    """Seconds since the last checkpoint was complete, those of writing the next included."""

    def train(self, seconds: float, members: int) -> None:
        """Train and write checkpoints for some time."""
        while seconds > 0:
            is_writing = self._phase_s >= self.interval_s
            end_s = self.interval_s + (self.write_s if is_writing else 0.0)
            part = min(seconds, end_s - self._phase_s)
            # The rest of a float is no time.
            if part < 1e-9:
                self._phase_s = end_s
            else:
                self._phase_s += part
                seconds -= part
                self.pending += 0.0 if is_writing else part * members
            if self._phase_s >= self.interval_s + self.write_s:
                self.kept, self.pending, self._phase_s = self.kept + self.pending, 0.0, 0.0

    def restart(self) -> None:
        """Go back to the last checkpoint."""
        self.pending, self._phase_s = 0.0, 0.0


def run_waiting(
    machines: Machines, progress: Progress, *, losses: int, detection_s: float, restart_s: float
) -> float:
    """Return the share that trains where all ranks are started again once all are there."""
    now, begins = 0.0, 0.0
    for at, _, is_lost in machines.events(losses):
        if len(machines.up) == machines.count and at > begins:
            progress.train(at - max(now, begins), machines.count)
        now = at
        if is_lost:
            progress.restart()
            begins = at + detection_s + restart_s
        else:
            begins = max(begins, at + restart_s)
    return progress.kept / (machines.count * now)


def run_shrinking(
    machines: Machines, progress: Progress, *, losses: int, detection_s: float, restart_s: float
) -> float:
    """Return the share that trains where ranks that are left are started again at once, and all
    again when a machine comes back."""
    now, begins = 0.0, 0.0
    for at, _, is_lost in machines.events(losses):
        if machines.up and at > begins:
            progress.train(at - max(now, begins), len(machines.up))
        now = at
        progress.restart()
        begins = max(begins, at + restart_s + (detection_s if is_lost else 0.0))
    return progress.kept / (machines.count * now)


def run_going_on(
    machines: Machines,
    progress: Progress,
    *,
    losses: int,
    pause_s: float,
    join_s: float,
    restart_s: float,
) -> float:
    """Return the share that trains where ranks that are left go on after a pause.

    More than half of the members lost in one pause end the training; then it starts again at
    the checkpoint, with those that are there.
    """
    now, begins, generation, lost = 0.0, 0.0, machines.count, 0
    for at, _, is_lost in machines.events(losses):
        if at > begins:
            progress.train(at - max(now, begins), len(machines.up))
            generation, lost = len(machines.up), 0
        now = at
        if not is_lost:
            begins = max(begins, at) + join_s
            continue
        lost += 1
        begins = max(begins, at + pause_s)
        if 2 * lost > generation:
            progress.restart()
            begins = at + pause_s + restart_s
            generation, lost = max(1, len(machines.up) - 1), 0
    return progress.kept / (machines.count * now)
