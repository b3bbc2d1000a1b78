"""The comparison of parameters across ranks every few steps: all of them, or a sample.

With `check_every=K` ranks exchange one checksum a tensor through the rendezvous store. By default a
digest of a sample travels with the rank status that every step sends anyway; the store only helps
to name the tensor once digests differ.
"""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from gradlane.errors import GradlaneError, SessionFailedError
from gradlane.training.rendezvous.rendezvous import RendezvousScope
from gradlane.training.rendezvous.tensor_table import TensorEntry

SAMPLE_EVERY = 100
"""Steps between samples."""
SAMPLE_BITS = 24
"""A sample's digest is below two to this."""
_SAMPLE_BYTES = 16_384
"""Bytes of each tensor in a sample; the next sample takes the bytes after them."""


class ParameterCheck:
    """Compares parameters across ranks."""

    def __init__(
        self,
        scope: RendezvousScope,
        trained: Sequence[TensorEntry],
        every: int | None,
        steps_before: int,
    ) -> None:
        """Compare the given tensors every so many steps; 0: never; None: a sample of them.

        Args:
            scope: where all ranks meet.
            trained: the tensors.
            every: steps between two comparisons.
            steps_before: training steps before the ranks were connected; a sample is due then.
        """
        self._scope = scope
        self._trained = trained
        self._every = every or 0
        self._steps_before = steps_before
        self._samples = every is None and scope.rank_info.world_size > 1

    def is_due(self, step: int) -> bool:
        """Return whether the ranks compare after this step, which is then a collective call."""
        return self._every > 0 and step > 0 and step % self._every == 0

    def sample(self, step: int) -> int:
        """Return a digest of `SAMPLE_BITS` of the sample after a step; 0: no sample is due.

        Every parameter must have its update.
        """
        is_due = step % SAMPLE_EVERY == 0 or step == self._steps_before
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
                for entry, mine, theirs_value in zip(self._trained, own, theirs, strict=True):
                    if mine != theirs_value:
                        return f" ({entry.name!r} on ranks {rank_info.rank} and {other})"
        return ""

    def _sampled_checksums(self, step: int) -> list[int]:
        with torch.no_grad():
            return [
                zlib.crc32(_bytes_of(_window(entry.tensor.detach().reshape(-1), step)))
                for entry in self._trained
            ]

    def after_step(self, step: int) -> None:
        """Compare after a step in which a comparison is due; every parameter must have its update.

        Raises:
            SessionFailedError: a parameter differs between two ranks; the message names it.
        """
        rank, world_size = self._scope.rank_info.rank, self._scope.rank_info.world_size
        own = self._checksums()
        self._scope.put(f"checksums/{step}/{rank}", json.dumps(own))
        for other in range(world_size):
            theirs = json.loads(self._scope.get(f"checksums/{step}/{other}", other))
            for entry, mine, theirs_value in zip(self._trained, own, theirs, strict=True):
                if mine != theirs_value:
                    raise SessionFailedError(
                        f"parameter {entry.name!r} differs between rank {rank} and rank {other} "
                        f"after step {step}: the optimizer or the hardware of the two does not "
                        "give the same bits",
                        step,
                    )
        # All ranks have read the previous keys: they reached this comparison after them.
        self._scope.delete(f"checksums/{step - self._every}/{rank}")

    def _checksums(self) -> list[int]:
        with torch.no_grad():
            return [zlib.crc32(_bytes_of(entry.tensor.detach())) for entry in self._trained]


def _window(values: Tensor, step: int) -> Tensor:
    """Return the elements of a tensor that a step samples."""
    count = max(1, _SAMPLE_BYTES // values.element_size())
    start = step // SAMPLE_EVERY * count % max(1, values.numel())
    return values[start : start + count]


def _bytes_of(values: Tensor) -> memoryview:
    """Return a tensor's elements in their logical order."""
    found: memoryview = values.cpu().contiguous().view(-1).view(torch.uint8).numpy().data
    return found
