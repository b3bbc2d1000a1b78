"""Ranks in one thread whose members change: a double of sessions that go on after a lost rank.

A round gives every rank a batch and trains it; changes come after a round, some ranks hearing of
them only when they have taken their next batch. Gathers of a change are run twice: the first time
each one is broken off, for its numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from gradlane.training.rendezvous.membership import MembershipChange
from gradlane.training.sampler.sampler import ElasticSampler


def change(
    step: int, rank: int, members: tuple[int, ...], joined: tuple[int, ...]
) -> MembershipChange:
    """Return a change as one rank hears of it."""
    return MembershipChange(1, rank, len(members), members, (), joined, step, "")


@dataclass
class Pending:
    """A change that not all ranks have heard of: `broken_off` by another one in its gather."""

    step: int
    members: tuple[int, ...]
    joined: tuple[int, ...]
    broken_off: Pending | None = None


class BrokenOffError(Exception):
    """The first run of a gather has the rank's numbers."""


class Session:
    """The session of one rank."""

    def __init__(self, world: World, name: int, rank: int) -> None:
        self._world = world
        self.name = name
        self.rank = rank
        self.callback: Callable[[MembershipChange], object] = lambda change: None
        self.told: list[int] = []
        self.gathers = 0
        self.waits_for: Pending | None = None

    @property
    def world_size(self) -> int:
        return len(self._world.members)

    @property
    def step(self) -> int:
        return self._world.step

    def on_membership(self, callback: Callable[[MembershipChange], object]) -> object:
        self.callback = callback
        return None

    def hear(self, pending: Pending) -> None:
        self.waits_for = pending
        self.rank = pending.members.index(self.name)
        self.callback(change(pending.step, self.rank, pending.members, pending.joined))

    def gather_integers(self, values: list[int]) -> list[list[int]]:
        if self.waits_for is None:
            if self._world.pending is not None:
                self._world.deliver()
                return []
            self.gathers += 1
            return [values] * self.world_size
        if self.waits_for.broken_off is not None:
            self.hear(self.waits_for.broken_off)
            return []
        self.told = values
        return self._world.gathered()


class World:
    """Trains epochs on ranks that come and go, and counts what was trained."""

    def __init__(
        self,
        size: int,
        make: Callable[[Session], ElasticSampler],
        load: Callable[[ElasticSampler], Iterable[list[int]]],
        batches_per_step: int = 1,
    ) -> None:
        """Begin with members 0 to size - 1.

        Args:
            size: the number of members.
            make: makes a rank's sampler.
            load: makes a rank's loader, which yields batches of indices.
            batches_per_step: that gradients are accumulated over; fewer at the end of an epoch.
        """
        self.step = 0
        self.members = tuple(range(size))
        self.pending: Pending | None = None
        self.trained: Counter[int] = Counter()
        self.batches: list[list[int]] = []
        self._made = size
        self._make, self._load = make, load
        self._collects = False
        self.sessions: dict[int, Session] = {}
        self.samplers: dict[int, ElasticSampler] = {}
        self._loops: dict[int, Iterator[list[int]]] = {}
        self._taken: dict[int, list[list[int]]] = {}
        self._yielded: Counter[int] = Counter()
        """Batches that each member's loop has yielded."""
        self._per_step = batches_per_step
        for name in self.members:
            self._add(name)

    def begin_epoch(self) -> None:
        """Have all members enter their loops."""
        self.trained.clear()
        self.batches.clear()
        self._yielded.clear()
        self._loops = {name: self._loop(name) for name in self.members}

    def train(
        self, lost: Iterable[int] = (), joining: int = 0, late: int = 0, fail: int = 0
    ) -> bool:
        """Train a step on all members; return False if the epoch is over.

        Args:
            lost: ranks that are lost in it.
            joining: ranks that join after it.
            late: so many of the ranks that stay hear of that after their next batch.
            fail: so many of the ranks that stay are lost while that is cut.
        """
        for count in range(1, self._per_step + 1):
            for name in self.members:
                while len(self._taken.get(name, ())) < count and self._take(name):
                    pass
            if all(self._yielded[name] == len(self.samplers[name]) for name in self.members):
                break
        assert self.pending is None
        gathers = {self.sessions[name].gathers for name in self.members}
        assert len(gathers) == 1, "a rank waits in a gather that others do not call"
        if not self._taken:
            return False
        numbers = {len(self._taken.get(name, ())) for name in self.members}
        assert len(numbers) == 1, "ranks train different numbers of batches"
        gone = {self.members[rank] for rank in lost}
        stay = tuple(name for name in self.members if name not in gone)
        failing = stay[1 : 1 + fail]
        self.step += 1
        for name in self.members:
            # The last batch of a lost rank counts as not trained.
            if name not in {*gone, *failing}:
                self.batches += self._taken[name]
                for batch in self._taken[name]:
                    self.trained.update(batch)
        self._taken.clear()
        if gone or joining or failing:
            self._change(stay, failing, joining, late)
        return True

    def deliver(self) -> None:
        """Tell all members of a change."""
        pending = self.pending
        assert pending is not None
        self.pending = None
        last = pending.broken_off or pending
        self._collects = True
        for name in last.members:
            session = self.sessions[name]
            try:
                session.hear(pending)
            except BrokenOffError:
                continue
            raise AssertionError("a change without a gather")
        self._collects = False
        self.members = last.members
        for name in last.members:
            self.sessions[name].hear(pending)
        for name in last.members:
            self.sessions[name].waits_for = None
            if name not in self._loops:
                self.sessions[name].gathers = self.sessions[last.members[0]].gathers
                self._loops[name] = self._loop(name)

    def gathered(self) -> list[list[int]]:
        """Return the numbers of all members, or have the first run of a gather broken off."""
        if self._collects:
            raise BrokenOffError
        return [self.sessions[name].told for name in self.members]

    def steps_left(self, epoch: int) -> set[int]:
        """Return the different numbers of batches that members have left of an epoch."""
        return {
            len(self.samplers[name]) - self._yielded[name] + len(self._taken.get(name, ()))
            for name in self.members
            if self.samplers[name].epoch == epoch
        }

    def _change(
        self, stay: tuple[int, ...], failing: tuple[int, ...], joining: int, late: int
    ) -> None:
        new = tuple(range(self._made, self._made + joining))
        self._made += joining
        for name in new:
            self._add(name)
        self.pending = Pending(self.step + 1, (*stay, *new), new)
        if failing:
            left = tuple(name for name in self.pending.members if name not in failing)
            self.pending.broken_off = Pending(self.step + 1, left, ())
        stay = tuple(name for name in stay if name not in failing)
        for name in set(self.members) - set(stay):
            del self._loops[name]
        for name in stay[:late]:
            self._take(name)
        if self.pending is not None:
            self.deliver()

    def _add(self, name: int) -> None:
        session = self.sessions[name] = Session(self, name, min(name, len(self.members) - 1))
        self.samplers[name] = self._make(session)

    def _loop(self, name: int) -> Iterator[list[int]]:
        sampler = self.samplers[name]
        return sampler.track(self._load(sampler))

    def _take(self, name: int) -> bool:
        batch = next(self._loops[name], None)
        if batch is not None:
            self._taken.setdefault(name, []).append(batch)
            self._yielded[name] += 1
        return batch is not None


class AheadLoader:
    """Draws up to `ahead` batches ahead, as a data loader with workers does; does not copy them."""

    def __init__(self, sampler: ElasticSampler, ahead: int) -> None:
        self._sampler = sampler
        self._ahead = ahead

    def __iter__(self) -> Iterator[list[int]]:
        draws = iter(self._sampler)
        drawn: list[list[int]] = []
        while True:
            while len(drawn) <= self._ahead:
                batch = next(draws, None)
                if batch is None:
                    break
                drawn.append(batch)
            if not drawn:
                return
            yield drawn.pop(0)
