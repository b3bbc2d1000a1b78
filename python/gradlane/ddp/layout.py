"""The layout of a DDP bucket: shards for ranks, pieces of parameters in them, ranges on the wire.

A layout follows only from the bucket's parameters, their codecs, the number of shards and the
step's bounds of encoded sizes, so every rank computes the same one. Pieces of a shard are adjacent
in the bucket and on the wire. A piece never crosses the border of a parameter or of a shard, and
begins at a multiple of its codec's granule.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from gradlane.codecs import Codec

LENGTH_BYTES = 4
"""Size of the length field before a piece whose encoded length varies."""


@dataclass(frozen=True)
class BucketParameter:
    """A parameter in a bucket.

    Attributes:
        number: of the parameter, the same on every rank.
        numel: number of elements.
        codec: of its gradient.
    """

    number: int
    numel: int
    codec: Codec


@dataclass(frozen=True)
class ParameterPiece:
    """A range of one parameter that is encoded as one.

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
        """Number of elements of the piece."""
        return self.end - self.begin


@dataclass(frozen=True)
class Shard:
    """Adjacent pieces that one rank adds up.

    Attributes:
        begin: its first element within the bucket.
        end: the element of the bucket after its last.
        pieces: in the order of their elements.
    """

    begin: int
    end: int
    pieces: tuple[ParameterPiece, ...]

    @property
    def numel(self) -> int:
        """Number of elements of the shard."""
        return self.end - self.begin

    def wire_ranges(self, step: int, leg: int) -> list[tuple[ParameterPiece, int, int]]:
        """Return each piece with its first byte on the wire and its largest encoded size.

        For codecs with varying sizes the bytes before hold the encoded length.
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
        """Return the largest encoded size of all pieces, with their length fields."""
        wire_ranges = self.wire_ranges(step, leg)
        return wire_ranges[-1][1] + wire_ranges[-1][2] if wire_ranges else 0


def cut_into_shards(parts: Sequence[BucketParameter], shards: int) -> tuple[Shard, ...]:
    """Cut a bucket of adjacent parameters into shards of about the same size.

    Args:
        parts: the bucket's parameters in its order.
        shards: their number; some are empty if the bucket has few allowed borders.
    """
    total = sum(part.numel for part in parts)
    borders = [_border(parts, total * number // shards) for number in range(1, shards)]
    borders = [0, *borders, total]
    return tuple(
        Shard(begin, end, _pieces(parts, begin, end)) for begin, end in itertools.pairwise(borders)
    )


def _border(parts: Sequence[BucketParameter], wanted: int) -> int:
    """Return the allowed border that is nearest to an element of the bucket."""
    start = 0
    for part in parts:
        if wanted < start + part.numel:
            granule = part.codec.granule
            inside = (wanted - start + granule // 2) // granule * granule
            return start + min(inside, part.numel)
        start += part.numel
    return start


def _pieces(parts: Sequence[BucketParameter], begin: int, end: int) -> tuple[ParameterPiece, ...]:
    pieces: list[ParameterPiece] = []
    start = 0
    for part in parts:
        low, high = max(begin, start), min(end, start + part.numel)
        if low < high:
            pieces.append(ParameterPiece(part, low - start, low, high))
        start += part.numel
    return tuple(pieces)
