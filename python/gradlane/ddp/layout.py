"""How a bucket of DDP is cut: shards for ranks, pieces of parameters in them, places on the wire.

A layout follows from the bucket's parameters, their codecs, the number of shards and the step's
bounds of encoded sizes alone, so that every rank makes the same one. Pieces of a shard lie one
after another in the bucket and on the wire; a piece never crosses the border of a parameter or of a
shard, and begins where its codec allows a tensor to be cut.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from gradlane.codecs import Codec

LENGTH_BYTES = 4
"""Before the bytes of a piece whose length is known only after encoding: how many they are."""


@dataclass(frozen=True)
class BucketParameter:
    """One parameter in a bucket.

    Attributes:
        number: of the parameter, the same on every rank.
        numel: elements of it.
        codec: encoding of it.
    """

    number: int
    numel: int
    codec: Codec


@dataclass(frozen=True)
class Piece:
    """A part of one parameter that is encoded as one.

    Attributes:
        part: the parameter.
        first: its first element within the parameter.
        begin: its first element within the bucket.
        end: the element of the bucket after its last.
    """

    part: BucketParameter
    first: int
    begin: int
    end: int

    @property
    def numel(self) -> int:
        """Elements of the piece."""
        return self.end - self.begin


@dataclass(frozen=True)
class Shard:
    """Pieces that lie one after another: what one rank sums up.

    Attributes:
        begin: its first element within the bucket.
        end: the element of the bucket after its last.
        pieces: in the order of their elements.
    """

    begin: int
    end: int
    pieces: tuple[Piece, ...]

    @property
    def numel(self) -> int:
        """Elements of the shard."""
        return self.end - self.begin

    def wire_ranges(self, step: int, leg: int) -> list[tuple[Piece, int, int]]:
        """Return each piece with its first byte on the wire and the most bytes that it takes.

        Where a codec's sizes vary, the length of the encoding lies in the bytes before.
        """
        wire_ranges = []
        begin = 0
        for piece in self.pieces:
            codec = piece.part.codec
            begin += 0 if codec.is_fixed_size else LENGTH_BYTES
            size = codec.wire_bytes_max(piece.numel, step=step, leg=leg)
            wire_ranges.append((piece, begin, size))
            begin += size
        return wire_ranges

    def wire_bytes(self, step: int, leg: int) -> int:
        """Return the most bytes of all pieces, with their lengths."""
        wire_ranges = self.wire_ranges(step, leg)
        return wire_ranges[-1][1] + wire_ranges[-1][2] if wire_ranges else 0


def cut_into_shards(parts: Sequence[BucketParameter], shards: int) -> tuple[Shard, ...]:
    """Cut a bucket that holds these parameters one after another into shards of about one size.

    Args:
        parts: the bucket's parameters in its order.
        shards: how many; some are empty where the bucket has few places to cut.
    """
    total = sum(part.numel for part in parts)
    borders = [_border(parts, total * number // shards) for number in range(1, shards)]
    borders = [0, *borders, total]
    return tuple(
        Shard(begin, end, _pieces(parts, begin, end)) for begin, end in itertools.pairwise(borders)
    )


def _border(parts: Sequence[BucketParameter], wanted: int) -> int:
    """Return the place to cut that is next to the wanted element of the bucket."""
    start = 0
    for part in parts:
        if wanted < start + part.numel:
            granule = part.codec.granule
            inside = (wanted - start + granule // 2) // granule * granule
            return start + min(inside, part.numel)
        start += part.numel
    return start


def _pieces(parts: Sequence[BucketParameter], begin: int, end: int) -> tuple[Piece, ...]:
    pieces: list[Piece] = []
    start = 0
    for part in parts:
        low, high = max(begin, start), min(end, start + part.numel)
        if low < high:
            pieces.append(Piece(part, low - start, low, high))
        start += part.numel
    return tuple(pieces)
