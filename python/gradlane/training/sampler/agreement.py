"""The numbers that the ranks' samplers tell each other, and the errors where they do not fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradlane.errors import RanksDifferError, SessionFailedError

SETTINGS = ("number of samples", "batch_size", "drop_last", "shuffle", "seed")
"""Names of a sampler's settings, in their order."""


@dataclass(frozen=True)
class AgreementRow:
    """A rank's numbers at a change of the members, or at the beginning or end of an epoch.

    Attributes:
        settings: as `SETTINGS` names them.
        epoch: its epoch.
        cut: checksum of its cut.
        trained: batches that are trained, from the cut on.
        has_begun: 1 inside of a `track` loop that all ranks have begun.
        is_member: 0 on a rank that joins, whose numbers of the epoch mean nothing.
        rank: its rank in the cut.
        counted: batches of a lost rank that are trained.
        taken: batches that its program has taken.
        drawn: batches that its loader has drawn.
        description: the cut, for ranks that join; else empty.
    """

    settings: tuple[int, ...]
    epoch: int
    cut: int
    trained: int
    has_begun: int
    is_member: int
    rank: int
    counted: int
    taken: int
    drawn: int
    description: str = ""

    def numbers(self) -> list[int]:
        """Return all of it as numbers."""
        progress = [self.epoch, self.cut, self.trained, self.has_begun, self.is_member]
        own = [self.rank, self.counted, self.taken, self.drawn]
        return [*self.settings, *progress, *own, *self.description.encode()]

    @classmethod
    def of(cls, numbers: Sequence[int]) -> AgreementRow:
        """Read what `numbers` has made."""
        first, last = len(SETTINGS), len(SETTINGS) + 9
        epoch, cut, trained, has_begun, is_member, rank, counted, taken, drawn = numbers[first:last]
        return cls(
            settings=tuple(numbers[:first]),
            epoch=epoch,
            cut=cut,
            trained=trained,
            has_begun=has_begun,
            is_member=is_member,
            rank=rank,
            counted=counted,
            taken=taken,
            drawn=drawn,
            description=bytes(numbers[last:]).decode(),
        )


def check_alike(rows: Sequence[AgreementRow], own: AgreementRow) -> None:
    """Compare the members; a rank that joins compares itself with them, and they not with it.

    Args:
        rows: by rank.
        own: this rank's.

    Raises:
        RanksDifferError: datasets, settings or epochs differ.
        SessionFailedError: the members are at different places of the epoch, or none is left.
    """
    members = [(rank, row) for rank, row in enumerate(rows) if row.is_member]
    if not members:
        raise SessionFailedError(
            "no rank that is left knows which samples of the epoch are trained: go on from the "
            "last checkpoint"
        )
    first, row = members[0]
    for rank, other in members:
        _check_settings(row, other, f"the samplers of ranks {first} and {rank}")
        if row.epoch != other.epoch:
            raise RanksDifferError(
                f"rank {first} is in epoch {row.epoch} of its sampler, and rank {rank} in epoch "
                f"{other.epoch}: call set_epoch() alike on all ranks"
            )
        if (row.cut, row.trained, row.has_begun) != (other.cut, other.trained, other.has_begun):
            raise SessionFailedError(
                f"the samplers of ranks {first} and {rank} are at different places of epoch "
                f"{row.epoch}, {row.trained} and {other.trained} batches after its beginning or "
                "the last change: leave track() loops at the same batch, and load the same state, "
                "on all ranks"
            )
    if not own.is_member:
        _check_settings(row, own, f"the samplers of rank {first} and of this rank, which joins,")


def _check_settings(one: AgreementRow, two: AgreementRow, where: str) -> None:
    for name, first, second in zip(SETTINGS, one.settings, two.settings, strict=True):
        if first != second:
            raise RanksDifferError(
                f"{where} differ in their {name}: {first} and {second}; make them with the same "
                "data and arguments"
            )
