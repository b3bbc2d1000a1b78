"""The comparison of all ranks' parameters every few steps, for clusters of unlike machines.

Ranks exchange one checksum a tensor through the rendezvous store; nothing of it is on the way when
`check_every` is 0.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence

import torch

from gradlane.errors import SessionFailed
from gradlane.ranks.rendezvous import Meeting
from gradlane.ranks.table import Entry


class AgreementCheck:
    """Compares parameters across ranks."""

    def __init__(self, meeting: Meeting, trained: Sequence[Entry], every: int) -> None:
        """Compare these tensors after every so many steps; 0: never."""
        self._meeting = meeting
        self._trained = trained
        self._every = every

    def is_due(self, step: int) -> bool:
        """Whether the ranks compare after this step; they come together then."""
        return self._every > 0 and step > 0 and step % self._every == 0

    def after_step(self, step: int) -> None:
        """Compare after a step in which it is due; every parameter must have its update.

        Raises:
            SessionFailed: a parameter differs between two ranks; the message names it.
        """
        rank, world_size = self._meeting.place.rank, self._meeting.place.world_size
        own = self._checksums()
        self._meeting.put(f"checksums/{step}/{rank}", json.dumps(own))
        for other in range(world_size):
            theirs = json.loads(self._meeting.get(f"checksums/{step}/{other}", other))
            for entry, mine, its in zip(self._trained, own, theirs, strict=True):
                if mine != its:
                    raise SessionFailed(
                        f"parameter {entry.name!r} differs between rank {rank} and rank {other} "
                        f"after step {step}: the optimizer or the hardware of the two does not "
                        "give the same bits",
                        step,
                    )
        # Everybody has read the keys before these: nobody comes here before all were there.
        self._meeting.drop(f"checksums/{step - self._every}/{rank}")

    def _checksums(self) -> list[int]:
        with torch.no_grad():
            return [
                zlib.crc32(
                    entry.tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
                )
                for entry in self._trained
            ]
