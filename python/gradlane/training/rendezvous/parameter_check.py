"""The comparison of parameters across ranks every few steps: all of them, or a sample.

With `check_every=K` ranks exchange one checksum a tensor through the rendezvous store. By default a
digest of a sample travels with the rank status that every step sends anyway; the store only helps
to name the tensor once digests differ. As sessions close, ranks leave the checksums of one more
sample in the store.

Frozen parameters may be most of a model, and hardly ever change: of each, a part is compared, the
next one every time, and all of it where torch has counted a write on any rank.
"""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradlane.errors import GradlaneError, SessionFailedError
from gradlane.training.rendezvous.rendezvous import RendezvousScope
from gradlane.training.rendezvous.tensor_table import TensorEntry
from gradlane.training.torch_internals import DisableTorchFunctionSubclass, version_of

SAMPLE_EVERY = 100
"""Steps between samples."""
SAMPLE_BITS = 24
"""A sample's digest is below two to this."""
_FIRST_SAMPLES = (0, 1, 10)
"""Steps since the ranks were connected after which a sample is due, too: a model that was loaded on
one rank alone is found soon."""
_SAMPLE_BYTES = 16_384
"""Bytes of each tensor in a sample; the next sample takes the bytes after them."""
_CLOSING_VALUES = 1_000
"""Most checksums of a rank that its closing sample has; of more tensors, neighbours share one."""


def is_sampled(number: int) -> bool:
    """Return whether a sample is due after this one of steps, or of backward calls."""
    return number in _FIRST_SAMPLES or number % SAMPLE_EVERY == 0


class ParameterCheck:
    """Compares parameters across ranks."""

    def __init__(
        self,
        scope: RendezvousScope,
        trained: Sequence[TensorEntry],
        frozen: Sequence[TensorEntry],
        every: int | None,
        steps_before: int,
    ) -> None:
        """Compare the given tensors every so many steps; 0: never; None: a sample of them.

        Args:
            scope: where all ranks meet.
            trained: parameters that are trained.
            frozen: parameters that are not.
            every: steps between two comparisons.
            steps_before: training steps before the ranks were connected; a sample is due then.
        """
        self._scope = scope
        self._trained = trained
        self._frozen = frozen
        self._all = [*trained, *frozen]
        self._agreed = [_written(entry.tensor) for entry in frozen]
        """How often each frozen parameter was written when all ranks had the same."""
        self._read_keys: list[str] = []
        """Of the last comparison, written by this rank."""
        self._new_keys: list[str] = []
        """Of the one that is under way."""
        self._every = every or 0
        self._steps_before = steps_before
        self._samples = every is None and scope.rank_info.world_size > 1
        self.is_on = every != 0 and scope.rank_info.world_size > 1
        """Whether ranks compare at all."""

    def is_due(self, step: int) -> bool:
        """Return whether the ranks compare after this step, which is then a collective call."""
        return self._every > 0 and step > 0 and step % self._every == 0

    def sample(self, step: int) -> int:
        """Return a digest of `SAMPLE_BITS` of the sample after a step; 0: no sample is due.

        Every parameter must have its update.
        """
        is_due = step % SAMPLE_EVERY == 0 or step - self._steps_before in _FIRST_SAMPLES
        if not self._samples or step == 0 or not is_due:
            return 0
        checksums = json.dumps(self._sampled_checksums(step)).encode()
        return zlib.crc32(checksums) % ((1 << SAMPLE_BITS) - 1) + 1

    def describe_difference(self, step: int, ranks: Sequence[int]) -> str:
        """Return the name of a parameter that differs in the sample, if the store can tell.

        Every rank calls it once the digests differ, before parameters change again.

        Args:
            step: after which the sample was taken.
            ranks: those whose digests are known.
        """
        rank_info = self._scope.rank_info
        own = self._sampled_checksums(step)
        with contextlib.suppress(GradlaneError):
            self._scope.put(f"samples/{step}/{rank_info.rank}", json.dumps(own))
            for other in ranks:
                theirs = json.loads(self._scope.get(f"samples/{step}/{other}", other))
                for entry, mine, theirs_value in zip(self._all, own, theirs, strict=True):
                    if mine != theirs_value:
                        return f" ({entry.name!r} on ranks {rank_info.rank} and {other})"
        return ""

    def _sampled_checksums(self, step: int) -> list[int]:
        return _checksums(self._all, step // SAMPLE_EVERY)

    def after_step(self, step: int) -> None:
        """Compare after a step in which a comparison is due; every parameter must have its update.

        Raises:
            SessionFailedError: a parameter differs between two ranks; the message names it.
        """
        written = [
            index
            for index, (entry, agreed) in enumerate(zip(self._frozen, self._agreed, strict=True))
            if _written(entry.tensor) != agreed
        ]
        own = [*_checksums(self._trained), *_checksums(self._frozen, step // self._every)]
        told = self._exchange(f"checksums/{step}", [own, written])
        self._compare(step, self._all, own, [checksums for checksums, _ in told])
        # All ranks see the same: whoever has not written one compares it all the same.
        somewhere = sorted({index for _, indices in told for index in indices})
        if somewhere:
            entries = [self._frozen[index] for index in somewhere]
            own = _checksums(entries)
            self._compare(step, entries, own, self._exchange(f"frozen/{step}", own))
        self._agreed = [_written(entry.tensor) for entry in self._frozen]
        # All ranks have read the previous keys: they reached this comparison after them.
        for key in self._read_keys:
            self._scope.delete(key)
        self._read_keys, self._new_keys = self._new_keys, []

    def _exchange(self, key: str, value: Any) -> list[Any]:
        """Return the value of each rank, by rank; a collective call."""
        rank_info = self._scope.rank_info
        self._new_keys.append(f"{key}/{rank_info.rank}")
        self._scope.put(self._new_keys[-1], json.dumps(value))
        return [
            json.loads(self._scope.get(f"{key}/{other}", other))
            for other in range(rank_info.world_size)
        ]

    def _compare(
        self,
        step: int,
        entries: Sequence[TensorEntry],
        own: Sequence[int],
        told: Sequence[Sequence[int]],
    ) -> None:
        """Compare this rank's checksums with those of each rank.

        Raises:
            SessionFailedError: two differ.
        """
        rank = self._scope.rank_info.rank
        for other, theirs in enumerate(told):
            for entry, mine, theirs_value in zip(entries, own, theirs, strict=True):
                if mine == theirs_value:
                    continue
                what = "parameter" if entry.trained else "frozen parameter"
                why = (
                    "the optimizer or the hardware of the two does not give the same bits, or a "
                    "rank has changed it by itself"
                    if entry.trained
                    else "a rank has changed it by itself, as by loading or merging weights: do "
                    "that on all ranks alike, or before prepare()"
                )
                raise SessionFailedError(
                    f"{what} {entry.name!r} differs between rank {rank} and rank {other} after "
                    f"step {step}: {why}",
                    step,
                )

    # ---- as the session closes

    def closing_sample(self, step: int) -> list[int | None]:
        """Return the checksums of a last sample, for `closing_difference`; empty: no comparison.

        A tensor that was converted since it was prepared, for an export for example, has None.
        """
        if not self.is_on:
            return []
        found: list[int | None] = []
        for group in self._closing_groups():
            values = None
            if not any(_is_converted(entry) for entry in group):
                values = zlib.crc32(json.dumps(_checksums(group, step // SAMPLE_EVERY)).encode())
            found.append(values)
        return found

    def closing_difference(self, told: Mapping[int, Sequence[int | None]]) -> str:
        """Return a sentence on the first difference between closing samples; empty: none.

        Args:
            told: by rank; all ranks have taken the same number of steps. Ranks of another shard
                than this one's may have other tensors, of which none is named.
        """
        first_rank, own = next(iter(told.items()))
        groups = self._closing_groups() if self._scope.rank_info.rank in told else None
        for other, theirs in told.items():
            for at, (first, second) in enumerate(zip(own, theirs, strict=False)):
                if first == second or first is None or second is None:
                    continue
                what = "a shard"
                if groups is not None:
                    group = groups[at]
                    more = f", or of the {len(group) - 1} after it," if len(group) > 1 else ""
                    what = f"{group[0].name!r}{more}"
                return f"values of {what} differ between rank {first_rank} and rank {other}"
        return ""

    def _closing_groups(self) -> list[Sequence[TensorEntry]]:
        size = -(-len(self._all) // _CLOSING_VALUES)
        return [self._all[first : first + size] for first in range(0, len(self._all), size)]


def _written(tensor: Tensor) -> tuple[int, int]:
    """Return what changes when a tensor is written or gets other memory."""
    with DisableTorchFunctionSubclass():
        return tensor.data_ptr(), version_of(tensor)


def _is_converted(entry: TensorEntry) -> bool:
    tensor = entry.tensor
    return (tensor.dtype, tensor.shape, tensor.device.type) != (
        entry.dtype,
        entry.shape,
        entry.device.type,
    )


def _checksums(entries: Sequence[TensorEntry], window: int | None = None) -> list[int]:
    """Return a checksum of each tensor.

    Args:
        entries: the tensors.
        window: number of the part of each that counts; None: all of it.
    """
    found = []
    with torch.no_grad():
        for entry in entries:
            values = entry.tensor.detach().reshape(-1)
            found.append(
                zlib.crc32(_bytes_of(values if window is None else part_of(values, window)))
            )
    return found


def part_of(values: Tensor, number: int, part_bytes: int = _SAMPLE_BYTES) -> Tensor:
    """Return one part of a tensor's elements; higher numbers go on, and begin again.

    After as many numbers as there are parts, each element has been in one.
    """
    count = max(1, part_bytes // values.element_size())
    parts = max(1, -(-values.numel() // count))
    start = number % parts * count
    return values[start : start + count]


def _bytes_of(values: Tensor) -> memoryview:
    """Return a tensor's elements in their logical order."""
    found: memoryview = values.cpu().contiguous().view(-1).view(torch.uint8).numpy().data
    return found
