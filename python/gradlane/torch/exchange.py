"""The way of a bucket: encoded, exchanged, added up in rank order, and given back to DDP.

`Gather` sends every rank's encoded gradient to every rank: one leg, and (N-1) times the encoded bytes
through every port. `Shards` sends each rank the shard that it sums up and gathers the encoded means:
two legs and two errors of encoding, but 2 (N-1) / N times the bytes. Either way all ranks decode the
same bytes in the same order, so that they stay bit-identical.

Backward does not wait for any of this. One thread encodes and begins a bucket's exchange, another
one ends it, so that encoding, sending and adding up of neighbouring buckets overlap. Each thread
alone uses its process group, so that all ranks begin the same collectives in the same order.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist

from gradlane.torch.layout import LENGTH_BYTES, Part, Piece, Shard, cut
from gradlane.torch.residuals import Residuals

WORKER_LEG, OWNER_LEG = 0, 1


@dataclass(frozen=True)
class Place:
    """Where this rank stands, and the two process groups that its threads use.

    Attributes:
        rank: within the groups.
        world_size: of the groups.
        first_leg: of the thread that encodes.
        second_leg: of the thread that adds up.
    """

    rank: int
    world_size: int
    first_leg: dist.ProcessGroup
    second_leg: dist.ProcessGroup


@dataclass
class Job:
    """One bucket on its way.

    Attributes:
        values: its gradient, f32 on the CPU; the mean in the end.
        target: DDP's own buffer, which may be `values`.
        step: number of the step, from 0.
        done: gets the target.
        work: the first leg, once it has begun.
    """

    values: torch.Tensor
    target: torch.Tensor
    step: int
    done: torch.futures.Future[torch.Tensor] = field(default_factory=torch.futures.Future)
    work: Any = None


class Route(Protocol):
    """How a bucket of one layout is exchanged."""

    parts: Sequence[Part]

    def begin(self, job: Job) -> None:
        """Encode and begin the first leg."""

    def end(self, job: Job) -> None:
        """Wait for the first leg, add up, do the second leg, write the mean to `job.values`."""

    def owned(self) -> Sequence[Piece]:
        """Return the pieces of which this rank encodes the mean."""

    @property
    def sent_bytes(self) -> int:
        """Bytes of gradients that leave this rank's port for one bucket, at most."""


class _Encoding:
    """Encodes and decodes shards: what both routes have in common."""

    def __init__(self, residuals: Residuals, seeds: tuple[int, int]) -> None:
        self.residuals = residuals
        self.seeds = seeds

    def encode(self, shard: Shard, values: torch.Tensor, wire: torch.Tensor, step: int) -> None:
        """Encode a shard of this rank's gradient; `values` holds the whole bucket."""
        for piece in shard.pieces:
            states = self.residuals.of_worker(piece)
            source = values[piece.begin : piece.end]
            self._encode(piece, piece.part.codec, source, states, wire, step, WORKER_LEG)

    def encode_mean(
        self, shard: Shard, mean: torch.Tensor, wire: torch.Tensor, step: int
    ) -> None:
        """Encode the mean of a shard; `mean` holds the shard alone."""
        for piece in shard.pieces:
            codec = piece.part.codec.reply(self.residuals.world_size)
            states = self.residuals.of_owner(piece, codec.states)
            source = mean[piece.begin - shard.begin : piece.end - shard.begin]
            self._encode(piece, codec, source, states, wire, step, OWNER_LEG)

    def _encode(
        self,
        piece: Piece,
        codec: Any,
        source: torch.Tensor,
        states: list[torch.Tensor],
        wire: torch.Tensor,
        step: int,
        leg: int,
    ) -> None:
        begin = piece.wire_begin + (0 if codec.has_fixed_size else LENGTH_BYTES)
        used = codec.encode_into(
            source,
            wire[begin : begin + piece.wire_bytes_max],
            states=states,
            seed=self.seeds[leg],
            step=step,
            tensor=piece.part.number,
            first=piece.first,
            columns=piece.part.columns,
        )
        if not codec.has_fixed_size:
            length = wire[piece.wire_begin : begin].numpy()
            length[:] = memoryview(used.to_bytes(LENGTH_BYTES, "little"))

    def decode(
        self, shard: Shard, wire: torch.Tensor, values: torch.Tensor, *, reply: bool, adds: bool
    ) -> None:
        """Decode a shard; `values` holds the shard alone.

        Args:
            shard: what the bytes hold.
            wire: the bytes.
            values: where the values go.
            reply: whether it is a mean.
            adds: whether values are added to what is there.
        """
        for piece in shard.pieces:
            codec = piece.part.codec
            codec = codec.reply(self.residuals.world_size) if reply else codec
            begin, length = piece.wire_begin, piece.wire_bytes_max
            if not codec.has_fixed_size:
                length = int.from_bytes(
                    wire[begin : begin + LENGTH_BYTES].numpy().tobytes(), "little"
                )
                begin += LENGTH_BYTES
            target = values[piece.begin - shard.begin : piece.end - shard.begin]
            take = codec.decode_add if adds else codec.decode_into
            take(wire[begin : begin + length], target, columns=piece.part.columns)


class Gather:
    """Every rank gets every rank's encoded gradient, and adds all of them up."""

    def __init__(
        self, parts: Sequence[Part], place: Place, residuals: Residuals, seeds: tuple[int, int]
    ) -> None:
        self.parts = parts
        self._place = place
        self._coding = _Encoding(residuals, seeds)
        (self._whole,) = cut(parts, 1)
        self._own = torch.empty(self._whole.wire_bytes, dtype=torch.uint8)
        self._all = torch.empty(place.world_size * self._whole.wire_bytes, dtype=torch.uint8)

    def begin(self, job: Job) -> None:
        """Encode the bucket and begin to gather."""
        self._coding.encode(self._whole, job.values, self._own, job.step)
        job.work = dist.all_gather_into_tensor(
            self._all, self._own, group=self._place.first_leg, async_op=True
        )

    def end(self, job: Job) -> None:
        """Decode all ranks' gradients in rank order."""
        job.work.wait()
        for rank, wire in enumerate(self._all.chunk(self._place.world_size)):
            self._coding.decode(self._whole, wire, job.values, reply=False, adds=rank > 0)
        job.values /= self._place.world_size

    def owned(self) -> Sequence[Piece]:
        """Return nothing: no mean is encoded."""
        return ()

    @property
    def sent_bytes(self) -> int:
        """Bytes of gradients that leave this rank's port for one bucket, at most."""
        return (self._place.world_size - 1) * self._whole.wire_bytes


class Shards:
    """Every rank adds up its shard and sends the encoded mean to all."""

    def __init__(
        self, parts: Sequence[Part], place: Place, residuals: Residuals, seeds: tuple[int, int]
    ) -> None:
        self.parts = parts
        self._place = place
        self._coding = _Encoding(residuals, seeds)
        self._shards = cut(parts, place.world_size)
        self._replies = cut(
            [_as_reply(part, place.world_size) for part in parts], place.world_size
        )
        self._own = self._shards[place.rank]
        self._sizes = [shard.wire_bytes for shard in self._shards]
        self._send = torch.empty(sum(self._sizes), dtype=torch.uint8)
        self._receive = torch.empty(place.world_size * self._own.wire_bytes, dtype=torch.uint8)
        # Gathering takes as many bytes from every rank.
        largest = max(shard.wire_bytes for shard in self._replies)
        self._reply = torch.zeros(largest, dtype=torch.uint8)
        self._all = torch.empty(place.world_size * largest, dtype=torch.uint8)
        self._mean = torch.empty(self._own.end - self._own.begin)

    def begin(self, job: Job) -> None:
        """Encode the bucket and begin to send each rank its shard."""
        for shard, wire in zip(self._shards, self._send.split(self._sizes), strict=True):
            self._coding.encode(shard, job.values, wire, job.step)
        job.work = dist.all_to_all_single(
            self._receive,
            self._send,
            [self._own.wire_bytes] * self._place.world_size,
            self._sizes,
            group=self._place.first_leg,
            async_op=True,
        )

    def end(self, job: Job) -> None:
        """Add up the own shard, gather the encoded means and decode them."""
        job.work.wait()
        for rank, wire in enumerate(self._receive.chunk(self._place.world_size)):
            self._coding.decode(self._own, wire, self._mean, reply=False, adds=rank > 0)
        self._mean /= self._place.world_size
        self._coding.encode_mean(
            self._replies[self._place.rank], self._mean, self._reply, job.step
        )
        dist.all_gather_into_tensor(self._all, self._reply, group=self._place.second_leg)
        wires = self._all.chunk(self._place.world_size)
        for shard, wire in zip(self._replies, wires, strict=True):
            values = job.values[shard.begin : shard.end]
            self._coding.decode(shard, wire, values, reply=False, adds=False)

    def owned(self) -> Sequence[Piece]:
        """Return the pieces of this rank's shard."""
        return self._replies[self._place.rank].pieces

    @property
    def sent_bytes(self) -> int:
        """Bytes of gradients that leave this rank's port for one bucket, at most."""
        others = self._place.world_size - 1
        return sum(self._sizes) - self._own.wire_bytes + others * len(self._reply)


class Pipeline:
    """The two threads that carry buckets through their routes, in order."""

    def __init__(self) -> None:
        """Start nothing yet: threads appear with the first bucket."""
        self._encoder = ThreadPoolExecutor(1, "gradlane-encode")
        self._adder = ThreadPoolExecutor(1, "gradlane-add")
        weakref.finalize(self, _stop, self._encoder, self._adder)

    def submit(self, route: Route, job: Job) -> torch.futures.Future[torch.Tensor]:
        """Begin to exchange a bucket and return the future of its mean."""
        self._encoder.submit(self._guarded, job, self._begin, route)
        return job.done

    def _begin(self, route: Route, job: Job) -> None:
        route.begin(job)
        self._adder.submit(self._guarded, job, self._end, route)

    def _end(self, route: Route, job: Job) -> None:
        route.end(job)
        if job.target is not job.values:
            job.target.copy_(job.values)
        job.done.set_result(job.target)

    def _guarded(self, job: Job, does: Callable[[Route, Job], None], route: Route) -> None:
        """Do a part of the job; a failure ends backward on this rank instead of this thread."""
        try:
            does(route, job)
        except Exception as error:
            where = f"step {job.step}, a bucket of {job.values.numel()} gradients"
            job.done.set_exception(RuntimeError(f"gradlane's hook failed ({where}): {error}"))

    def close(self) -> None:
        """Wait for what is on its way and end the threads."""
        _stop(self._encoder, self._adder)


def _stop(encoder: ThreadPoolExecutor, adder: ThreadPoolExecutor) -> None:
    encoder.shutdown()
    adder.shutdown()
