"""The sampler of a training that goes on when ranks are lost, or join.

A data loader's workers draw batches ahead, so at a change each rank has drawn another number of
them. These stay with the ranks that live and are trained by them; the batches of lost ranks, from
the step on in which they were lost, go back to the samples that are left; and all members cut these
anew, from the same numbers and so alike (`cut`).

For that the sampler must know which batches are trained, not only drawn: `track` notes for every
batch that the program takes in which step it is trained.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, TypeVar

import torch
from torch.utils.data import Sampler

from gradlane.errors import RefusedError, UsageError
from gradlane.training.rendezvous.membership import MembershipChange
from gradlane.training.sampler.agreement import AgreementRow, check_alike
from gradlane.training.sampler.cut import Cut, Ranges, ranges_of
from gradlane.training.sampler.membership import ElasticSession
from gradlane.training.sampler.progress import Progress

BatchType = TypeVar("BatchType")
_STATE_VERSION = 1
_SEED_MAX = (1 << 62) - 1


class ElasticSampler(Sampler[list[int]]):
    """Draws the batches of each epoch for a data loader, and anew when ranks are lost or join.

    ::

        sampler = gradlane.ElasticSampler(data, batch_size=32, session=session)
        loader = DataLoader(data, batch_sampler=sampler, num_workers=2)
        for epoch in range(sampler.epoch, epochs):
            sampler.set_epoch(epoch)
            for x, y in sampler.track(loader):
                ...

    All ranks train the same number of batches of an epoch, and all together each sample once,
    whichever ranks come and go. A batch that a rank was lost with, in the middle of a step, is
    trained again by others. Two exceptions: `drop_last` leaves samples out; without it, where
    fewer samples are left than ranks, or batches have one sample, up to `world_size - 1` samples
    are repeated, so that every rank has a batch in the last step.

    Attributes:
        epoch: the epoch that is drawn from, or comes next; one more once all of it is trained.
    """

    def __init__(
        self,
        data: Sized,
        batch_size: int,
        session: ElasticSession,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        """Begin with epoch 0; on all ranks alike, before `session.prepare()`.

        Args:
            data: a dataset with a length, the same on every rank.
            batch_size: samples of a batch on each rank, from 1 on.
            session: tells of changes.
            shuffle: draw in another order in each epoch, that of `torch.randperm` under the seed
                `seed + epoch`; False: in the dataset's order. It takes 4 bytes a sample on each
                rank (8 from 2^31 samples on).
            seed: the same on every rank, 0 to 2^62 - 1.
            drop_last: every batch is full: the last samples, fewer than `batch_size * world_size`,
                are left out of the epoch. Otherwise they make smaller batches, which differ by one
                sample at most.

        Raises:
            ValueError: the dataset is empty or has no length, or an argument is out of range.
        """
        if not isinstance(data, Sized):
            raise RefusedError(
                f"ElasticSampler of a {type(data).__name__}, which has no length: samples are "
                "drawn by index, so give a dataset with __len__ and __getitem__"
            )
        if len(data) < 1:
            raise RefusedError(
                f"ElasticSampler of an empty {type(data).__name__}: there is nothing to draw"
            )
        if batch_size < 1:
            raise RefusedError(f"batch_size={batch_size}: give samples for each rank, 1 or more")
        if not 0 <= seed <= _SEED_MAX:
            raise RefusedError(f"seed={seed}: give a number from 0 to 2^62 - 1")
        self.epoch = 0
        self._samples = len(data)
        self._batch_size = batch_size
        self._session = session
        self._shuffle = shuffle
        self._seed = seed
        self._drop_last = drop_last
        self._whole: Ranges = ((0, self._samples),)
        self._order: torch.Tensor | None = None
        self._rank, self._world_size = session.rank, session.world_size
        self._progress = Progress(self._cut(self._whole), self._rank)
        self._run: object | None = None
        """The `track` loop under way."""
        self._has_begun = False
        """Whether all ranks have begun it."""
        self._draws = 0
        """Batches drawn so far, in all epochs."""
        self._changes = 0
        """Changes of the members so far."""
        self._joined: set[int] = set()
        """Names of members for which nothing is cut yet."""
        self._joins = False
        """Whether this rank is one of them."""
        session.on_membership(self._on_change)

    def __repr__(self) -> str:
        return (
            f"<ElasticSampler of {self._samples} samples, batch_size={self._batch_size}, epoch "
            f"{self.epoch}, rank {self._rank} of {self._world_size}>"
        )

    def __len__(self) -> int:
        """Return the batches of this `track` loop in all; it changes with the members."""
        return self._progress.before + self._progress.cut.steps

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch; one that is in the middle, as after `load_state_dict`, goes on.

        Args:
            epoch: from 0 on, the same on every rank.

        Raises:
            ValueError: the number is negative.
        """
        if epoch < 0:
            raise RefusedError(f"set_epoch({epoch}): epochs are counted from 0 on")
        if epoch != self.epoch:
            self._begin(epoch, self._whole)

    def track(self, loader: Iterable[BatchType]) -> Iterator[BatchType]:
        """Yield a loader's batches until what is left of the epoch is trained; collective.

        A batch belongs to the step that ends next. A loop that is left early puts back what was not
        trained: the next one goes on with it, unless `set_epoch` begins another epoch. All ranks
        leave their loops at the same batch.

        Args:
            loader: a `DataLoader` with this sampler as its `batch_sampler`, or something that
                yields its batches one for one, in their order.

        Raises:
            UsageError: the loader draws from another sampler, or not in order; or another epoch was
                begun inside of the loop.
            RanksDifferError: the ranks' datasets, settings or epochs differ.
            SessionFailedError: the ranks have trained different numbers of batches.
            GradlaneError: the session has failed or is closed.
        """
        if not getattr(loader, "in_order", True):
            raise UsageError(
                "track() of a DataLoader with in_order=False: which batches were trained is known "
                "by their order alone; leave in_order at True"
            )
        self._put_back()
        run = self._run = object()
        try:
            while not self._has_begun and not self._agree():
                pass
            self._has_begun = True
            while True:
                if not self._progress.is_drawn:
                    yield from self._track_pass(loader, run)
                elif self._agree():
                    break
            self._begin(self.epoch + 1, self._whole)
        finally:
            if self._run is run:
                self._put_back()

    def __iter__(self) -> Iterator[list[int]]:
        """Draw batches of indices; for the data loader inside of `track`.

        Raises:
            UsageError: there is no `track` loop.
        """
        if self._run is None:
            raise UsageError(
                "an ElasticSampler was drawn from outside of its track(): write `for batch in "
                "sampler.track(loader)` in place of `for batch in loader`, so that it knows which "
                "batches are trained when a rank is lost"
            )
        return self._draw(self._run)

    def state_dict(self) -> dict[str, Any]:
        """Return what is left of the epoch, in plain numbers and lists: for a checkpoint.

        Each rank has the same, and no rank waits for another. Batches whose `optimizer.step()` was
        called are trained; what a data loader has drawn ahead is not.
        """
        left = self._left()
        return {
            "version": _STATE_VERSION,
            "epoch": self.epoch,
            "left": None if left == self._whole else [list(one) for one in left],
            **self._fixed(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what a state has left of its epoch, in a world of any size; on all ranks.

        Args:
            state: the result of `state_dict`; `batch_size` and `drop_last` may be others here.

        Raises:
            ValueError: it is no such state, or of another dataset, seed or order.
            UsageError: a `track` loop is under way.
        """
        if self._run is not None:
            raise UsageError("load_state_dict() inside of a track() loop: load it before")
        if state.get("version") != _STATE_VERSION:
            raise RefusedError(
                f"this is no state of an ElasticSampler (version {state.get('version')!r}, "
                f"expected {_STATE_VERSION}): load what state_dict() returned"
            )
        for name, own in self._fixed().items():
            if state.get(name) != own:
                raise RefusedError(
                    f"the state is of a sampler with {name}={state.get(name)!r}, and this one has "
                    f"{own!r}: positions in one order say nothing about another; make the sampler "
                    "as it was"
                )
        epoch, left = state.get("epoch"), state.get("left")
        if not isinstance(epoch, int) or epoch < 0:
            raise RefusedError(f"the state's epoch is {epoch!r}: load what state_dict() returned")
        self._begin(epoch, self._whole if left is None else ranges_of(left, self._samples))

    # ---- inside

    def _fixed(self) -> dict[str, Any]:
        """Return what decides the order of an epoch."""
        return {"samples": self._samples, "shuffle": self._shuffle, "seed": self._seed}

    def _cut(self, left: Ranges) -> Cut:
        """Share out what is left to ranks that have drawn nothing of it."""
        queues: list[list[Ranges]] = [[]] * self._world_size
        return Cut(self._samples, left, queues, self._batch_size, drop_last=self._drop_last)

    def _begin(self, epoch: int, left: Ranges) -> None:
        """Cut an epoch, or what is left of it, with nothing drawn."""
        if epoch != self.epoch:
            self._order = None
        self.epoch = epoch
        self._progress = Progress(self._cut(left), self._rank)
        self._run = None
        self._has_begun = False

    def _draw(self, run: object) -> Iterator[list[int]]:
        while self._run is run and not self._progress.is_drawn:
            self._draws += 1
            yield self._indices(self._progress.draw())

    def _indices(self, batch: Ranges) -> list[int]:
        """Return the dataset's indices of a batch of positions."""
        if not self._shuffle:
            return [at % self._samples for start, stop in batch for at in range(start, stop)]
        if self._order is None:
            random = torch.Generator("cpu").manual_seed(self._seed + self.epoch)
            dtype = torch.int32 if self._samples < 1 << 31 else torch.int64
            self._order = torch.randperm(self._samples, generator=random, dtype=dtype, device="cpu")
        found: list[int] = []
        for start, stop in batch:
            first = start % self._samples
            found.extend(self._order[first : first + stop - start].tolist())
        return found

    def _left(self) -> Ranges:
        """Return what no step that has ended has trained."""
        trained = self._progress.trained_before(self._session.step + 1)
        return self._progress.cut.untrained([trained] * self._world_size)

    def _put_back(self) -> None:
        """Forget what was drawn and not trained."""
        if self._run is not None:
            self._begin(self.epoch, self._left())

    def _track_pass(self, loader: Iterable[BatchType], run: object) -> Iterator[BatchType]:
        """Yield the batches of a loader from its beginning to its end.

        A loader that has ended hears nothing of samples that come back after that: then there is
        another pass.
        """
        draws = self._draws
        for batch in loader:
            self._check_current(run)
            if not self._progress.waiting:
                raise UsageError(
                    "track() got a batch that this sampler has not drawn: give it the loader that "
                    "was made with DataLoader(data, batch_sampler=sampler)"
                )
            if self._progress.take(self._session.step + 1):
                yield batch
        self._check_current(run)
        if self._progress.waiting:
            raise UsageError(
                f"the loader ended with {self._progress.waiting} batches that it had drawn and "
                "did not yield: track() needs every batch, to be trained in its turn"
            )
        if self._draws == draws and not self._progress.is_drawn:
            raise UsageError(
                "track() of a loader that does not draw from this sampler: make it with "
                "DataLoader(data, batch_sampler=sampler)"
            )

    def _check_current(self, run: object) -> None:
        """Check that no other epoch or loop was begun since a loop was."""
        if self._run is not run:
            raise UsageError(
                f"epoch {self.epoch} was begun inside of a track() loop: leave the loop before "
                "set_epoch() of another epoch, and before the next track()"
            )

    def _agree(self) -> bool:
        """Compare all ranks' progress between two steps; return False if the members changed."""
        taken = self._progress.taken
        return self._gather(self._row(taken, taken)) is not None

    def _row(self, trained: int, counted: int, description: str = "") -> AgreementRow:
        """Return this rank's numbers.

        Args:
            trained: batches that the members have trained since the cut.
            counted: those of a lost rank.
            description: of the cut, for ranks that join.
        """
        now = self._progress
        settings = (self._samples, self._batch_size, self._drop_last, self._shuffle, self._seed)
        return AgreementRow(
            settings=tuple(map(int, settings)),
            epoch=self.epoch,
            cut=zlib.crc32(now.cut.describe().encode()),
            trained=trained,
            has_begun=int(self._has_begun),
            is_member=int(not self._joins),
            rank=now.rank,
            counted=counted,
            taken=now.taken,
            drawn=now.drawn,
            description=description,
        )

    def _gather(self, own: AgreementRow) -> list[AgreementRow] | None:
        """Return all ranks' rows; None if the members changed meanwhile, and all is cut for them.

        Raises:
            RanksDifferError: the ranks' datasets, settings or epochs differ.
            SessionFailedError: they are at different places of the epoch.
        """
        changes = self._changes
        gathered = self._session.gather_integers(own.numbers())
        if self._changes != changes:
            return None
        rows = [AgreementRow.of(numbers) for numbers in gathered]
        check_alike(rows, own)
        return rows

    def _on_change(self, change: MembershipChange) -> None:
        """Cut what is left of the epoch for the new members."""
        self._joined.update(change.joined)
        self._joins = change.members[change.rank] in self._joined
        trained = self._progress.trained_before(change.step)
        counted = self._progress.trained_before(change.step - 1)
        knows = [name not in self._joined for name in change.members]
        # The first that knows the cut tells it to those that do not.
        tells = not all(knows) and knows[change.rank] and not any(knows[: change.rank])
        description = self._progress.cut.describe() if tells else ""
        rows = self._gather(self._row(trained, counted, description))
        if rows is None:
            return
        member = next(row for row in rows if row.is_member)
        if self._joins:
            self._take_over(member)
        cut = self._recut(rows, member)
        self._progress.follow(cut, change.rank, 0 if self._joins else member.trained)
        self._rank, self._world_size = change.rank, len(rows)
        self._joined.clear()
        self._joins = False
        self._changes += 1

    def _take_over(self, member: AgreementRow) -> None:
        """Take the epoch and the cut of a rank that was there before this one joined."""
        self._begin(member.epoch, self._whole)
        self._has_begun = bool(member.has_begun)
        self._progress.cut = Cut.from_description(
            member.description, self._samples, self._batch_size, drop_last=self._drop_last
        )

    def _recut(self, rows: Sequence[AgreementRow], member: AgreementRow) -> Cut:
        """Return the cut for the new members.

        Args:
            rows: theirs, by rank.
            member: the row of one that was there before.
        """
        before = self._progress.cut
        drawn = {row.rank: row.drawn for row in rows if row.is_member}
        left = before.untrained(
            [drawn.get(rank, member.counted) for rank in range(len(before.queues))]
        )
        done = member.trained
        ahead = [before.batches(step) for step in range(done, max(drawn.values()))]
        queues = [
            [batches[row.rank] for batches in ahead[: row.drawn - done]] if row.is_member else []
            for row in rows
        ]
        return Cut(
            self._samples,
            left,
            queues,
            self._batch_size,
            drop_last=self._drop_last,
            least_steps=max(row.taken - done for row in rows if row.is_member),
        )
