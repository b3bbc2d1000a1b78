"""How a bucket of DDP is cut: shards for ranks, pieces of parameters in them, places on the wire.

A layout follows from the sizes of the bucket's parameters, their codecs and the number of shards
alone, so that every rank makes the same one. Pieces of a shard lie one after another in the bucket
and on the wire; a piece never crosses the border of a parameter or of a shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradlane.codecs import Codec

LENGTH_BYTES = 4
"""Before the bytes of a piece whose length is known only after encoding: how many they are."""
_ALIGNMENT = 64
"""Shards begin at multiples of so many elements, so that codecs see whole vectors."""


@dataclass(frozen=True)
class Part:
    """One parameter's place in a bucket.

    Attributes:
        number: of the parameter, the same on every rank.
        numel: elements of it.
        columns: elements that follow one another for one value of its first dimension.
        codec: encoding of it.
    """

    number: int
    numel: int
    columns: int
    codec: Codec


@dataclass(frozen=True)
class Piece:
    """A part of one parameter that is encoded as one.

    Attributes:
        part: the parameter.
        first: its first element within the parameter.
        begin: its first element within the bucket.
        end: the element of the bucket after its last.
        wire_begin: its first byte within the shard's bytes.
        wire_bytes_max: bytes that it takes at most, without its length.
    """

    part: Part
    first: int
    begin: int
    end: int
    wire_begin: int
    wire_bytes_max: int

    @property
    def numel(self) -> int:
        """Elements of the piece."""
        return self.end - self.begin


@dataclass(frozen=True)
class Shard:
    """What one rank sums up: pieces that lie one after another.

    Attributes:
        begin: its first element within the bucket.
        end: the element of the bucket after its last.
        pieces: in the order of their elements.
        wire_bytes: bytes of all pieces at most, with their lengths.
    """

    begin: int
    end: int
    pieces: tuple[Piece, ...]
    wire_bytes: int


def cut(parts: Sequence[Part], shards: int) -> tuple[Shard, ...]:
    """Cut a bucket that holds these parameters one after another into shards of about one size.

    Args:
        parts: the bucket's parameters in its order.
        shards: how many; small buckets leave the last ones empty.
    """
    total = sum(part.numel for part in parts)
    width = -(-total // shards)
    width += -width % _ALIGNMENT
    borders = [min(number * width, total) for number in range(shards + 1)]
    return tuple(
        _shard(parts, begin, end) for begin, end in zip(borders, borders[1:], strict=False)
    )


def _shard(parts: Sequence[Part], begin: int, end: int) -> Shard:
    pieces: list[Piece] = []
    wire_bytes = 0
    start = 0
    for part in parts:
        low, high = max(begin, start), min(end, start + part.numel)
        if low < high:
            bytes_max = part.codec.wire_bytes_max(high - low, columns=part.columns)
            pieces.append(Piece(part, low - start, low, high, wire_bytes, bytes_max))
            wire_bytes += bytes_max + (0 if part.codec.has_fixed_size else LENGTH_BYTES)
        start += part.numel
    return Shard(begin, end, tuple(pieces), wire_bytes)
