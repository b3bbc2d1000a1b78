"""The two routes of a bucket: gradients are encoded, sent, decoded and added up in rank order.

`GatherRoute` sends every rank's encoded gradient to every rank: one leg, with (N-1) times the
encoded bytes through every port. `ShardRoute` sends each rank the shard that it adds up, and
gathers the encoded means: two legs and two encoding errors, but 2 (N-1) / N times the bytes. Either
way all ranks decode the same bytes in the same order and stay bit-identical.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist

from gradlane.codecs import BROADCAST
from gradlane.ddp.layout import (
    LENGTH_BYTES,
    BucketParameter,
    ParameterPiece,
    Shard,
    cut_into_shards,
)
from gradlane.ddp.residuals import Residuals


@dataclass(frozen=True)
class Peers:
    """This rank's number, and the process groups of the two legs.

    Attributes:
        rank: within the groups.
        world_size: of the groups.
        first_leg: of the thread that encodes.
        second_leg: of the thread that adds up; a group of its own, since ranks must begin the
            collectives of one group in the same order.
    """

    rank: int
    world_size: int
    first_leg: dist.ProcessGroup
    second_leg: dist.ProcessGroup


@dataclass
class BucketExchange:
    """A bucket in flight.

    Attributes:
        values: its gradient, f32 on the CPU; the mean in the end.
        target: DDP's own buffer, which may be `values`.
        step: number of the step, from 0.
        done: resolves to the target.
        received: data of the first leg.
        work: of the first leg, once begun.
    """

    values: torch.Tensor
    target: torch.Tensor
    step: int
    done: torch.futures.Future[torch.Tensor] = field(default_factory=torch.futures.Future)
    received: torch.Tensor = field(default_factory=torch.Tensor)
    work: Any = None


class Route(Protocol):
    """The exchange of buckets with one layout."""

    parts: tuple[BucketParameter, ...]

    def begin(self, exchange: BucketExchange) -> int:
        """Encode and begin the first leg; return the bytes that this rank will send in all."""

    def end(self, exchange: BucketExchange) -> None:
        """Wait for the first leg, add up, run the second leg, and write the mean to
        `exchange.values`."""

    def owned(self) -> Sequence[ParameterPiece]:
        """Return the pieces whose mean this rank encodes."""


class ShardCodec:
    """Encoding and decoding of shards, for both routes."""

    def __init__(self, peers: Peers, residuals: Residuals, seed: int) -> None:
        """Encode for this rank, with its residuals."""
        self.peers = peers
        self._residuals = residuals
        self.seed = seed

    def encode(self, shard: Shard, values: torch.Tensor, step: int, leg: int) -> torch.Tensor:
        """Return the bytes of a shard.

        Args:
            shard: to encode.
            values: the shard alone, f32.
            step: number of the step.
            leg: this rank's number for its gradient, `BROADCAST` for a mean.
        """
        wire = torch.empty(shard.wire_bytes(step, leg), dtype=torch.uint8, device="cpu")
        of = self._residuals.owner_residual if leg == BROADCAST else self._residuals.worker_residual
        for piece, begin, size in shard.wire_ranges(step, leg):
            codec = piece.part.codec
            used = codec.encode_into(
                values[piece.begin - shard.begin : piece.end - shard.begin],
                wire[begin : begin + size],
                residual=of(piece),
                seed=self.seed,
                step=step,
                tensor=piece.part.number,
                leg=leg,
                first_element=piece.first,
            )
            if not codec.is_fixed_size:
                length = torch.frombuffer(
                    bytearray(used.to_bytes(LENGTH_BYTES, "little")), dtype=torch.uint8
                )
                wire[begin - LENGTH_BYTES : begin] = length
                # Unused bytes must not leak memory of this process.
                wire[begin + used : begin + size] = 0
        return wire

    def decode(
        self,
        shard: Shard,
        wire: torch.Tensor,
        values: torch.Tensor,
        *,
        step: int,
        leg: int,
        adds: bool = False,
    ) -> None:
        """Decode a shard into `values`, the shard alone, or add it to them."""
        for piece, begin, size in shard.wire_ranges(step, leg):
            codec = piece.part.codec
            if not codec.is_fixed_size:
                length = wire[begin - LENGTH_BYTES : begin].numpy().tobytes()
                size = min(size, int.from_bytes(length, "little"))
            take = codec.decode_add if adds else codec.decode_into
            take(
                wire[begin : begin + size],
                values[piece.begin - shard.begin : piece.end - shard.begin],
            )


class GatherRoute:
    """A route on which every rank gets all encoded gradients and adds them up."""

    def __init__(self, parts: Sequence[BucketParameter], shard_codec: ShardCodec) -> None:
        """Use the whole bucket as one shard."""
        self.parts = tuple(parts)
        self._shard_codec = shard_codec
        self._peers = shard_codec.peers
        (self._whole,) = cut_into_shards(parts, 1)

    def begin(self, exchange: BucketExchange) -> int:
        """Encode the bucket and begin to gather."""
        wire = self._shard_codec.encode(
            self._whole, exchange.values, exchange.step, self._peers.rank
        )
        exchange.received = torch.empty(
            self._peers.world_size * len(wire), dtype=torch.uint8, device="cpu"
        )
        exchange.work = dist.all_gather_into_tensor(
            exchange.received, wire, group=self._peers.first_leg, async_op=True
        )
        return (self._peers.world_size - 1) * len(wire)

    def end(self, exchange: BucketExchange) -> None:
        """Decode all ranks' gradients in rank order."""
        exchange.work.wait()
        wires = exchange.received.chunk(self._peers.world_size)
        for rank, wire in enumerate(wires):
            self._shard_codec.decode(
                self._whole, wire, exchange.values, step=exchange.step, leg=rank, adds=rank > 0
            )
        exchange.values /= self._peers.world_size

    def owned(self) -> Sequence[ParameterPiece]:
        """Return no pieces: no mean is encoded."""
        return ()


class ShardRoute:
    """A route on which every rank adds up its shard and sends the encoded mean to all."""

    def __init__(self, parts: Sequence[BucketParameter], shard_codec: ShardCodec) -> None:
        """Cut the bucket into as many shards as there are ranks."""
        self.parts = tuple(parts)
        self._shard_codec = shard_codec
        self._peers = shard_codec.peers
        self._shards = cut_into_shards(parts, self._peers.world_size)
        self._own = self._shards[self._peers.rank]

    def begin(self, exchange: BucketExchange) -> int:
        """Encode the bucket and begin to send each rank its shard."""
        rank, world_size = self._peers.rank, self._peers.world_size
        wires = [
            self._shard_codec.encode(
                shard, exchange.values[shard.begin : shard.end], exchange.step, rank
            )
            for shard in self._shards
        ]
        own_bytes = len(wires[rank])
        exchange.received = torch.empty(world_size * own_bytes, dtype=torch.uint8, device="cpu")
        sent = torch.cat(wires)
        exchange.work = dist.all_to_all_single(
            exchange.received,
            sent,
            [own_bytes] * world_size,
            [len(wire) for wire in wires],
            group=self._peers.first_leg,
            async_op=True,
        )
        return len(sent) - own_bytes + (world_size - 1) * self._reply_bytes(exchange.step)

    def _reply_bytes(self, step: int) -> int:
        """Return the bytes of the longest encoded mean, which all ranks use on the wire."""
        return max(shard.wire_bytes(step, BROADCAST) for shard in self._shards)

    def end(self, exchange: BucketExchange) -> None:
        """Add up the own shard, gather the encoded means and decode them."""
        exchange.work.wait()
        world_size, step = self._peers.world_size, exchange.step
        mean = torch.zeros(self._own.numel, dtype=torch.float32, device="cpu")
        for rank, wire in enumerate(
            exchange.received.chunk(world_size) if len(exchange.received) else ()
        ):
            self._shard_codec.decode(self._own, wire, mean, step=step, leg=rank, adds=rank > 0)
        mean /= world_size
        own = self._shard_codec.encode(self._own, mean, step, BROADCAST)
        reply = torch.zeros(self._reply_bytes(step), dtype=torch.uint8, device="cpu")
        reply[: len(own)] = own
        replies = torch.empty(world_size * len(reply), dtype=torch.uint8, device="cpu")
        dist.all_gather_into_tensor(replies, reply, group=self._peers.second_leg)
        for shard, wire in zip(self._shards, replies.chunk(world_size), strict=True):
            values = exchange.values[shard.begin : shard.end]
            self._shard_codec.decode(shard, wire, values, step=step, leg=BROADCAST)

    def owned(self) -> Sequence[ParameterPiece]:
        """Return the pieces of this rank's shard."""
        return self._own.pieces
