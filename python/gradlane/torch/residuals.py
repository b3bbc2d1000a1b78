"""What a hook keeps between steps: residuals of parameters, as a worker and as an owner of shards.

They belong to parameters and not to buckets, since DDP makes its buckets anew after the first step.
What a rank kept as the owner of a piece that is not its own any more goes back to where it came
from: this rank's next gradient, times the number of ranks, since it is a part of a mean.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gradlane.torch.layout import Part, Piece

OwnerKey = tuple[int, int, int]
"""Number of the parameter, first element of the piece, elements of the piece."""


def _key(piece: Piece) -> OwnerKey:
    return (piece.part.number, piece.first, piece.numel)


class Residuals:
    """Residuals of one rank, f32 on the CPU, as many as its codecs keep for an element."""

    def __init__(self, world_size: int) -> None:
        """Begin with nothing kept.

        Args:
            world_size: ranks whose gradients a mean is of.
        """
        self.world_size = world_size
        self.worker: dict[int, torch.Tensor] = {}
        """By parameter: (states of the codec, elements); the last state is the residual."""
        self.owner: dict[OwnerKey, torch.Tensor] = {}

    def of_worker(self, piece: Piece) -> list[torch.Tensor]:
        """Return the states of a piece of this rank's gradient, each (elements of the piece,)."""
        whole = self._whole(piece.part)
        return [state[piece.first : piece.first + piece.numel] for state in whole]

    def of_owner(self, piece: Piece, states: int) -> list[torch.Tensor]:
        """Return the states of a piece of the mean, each (elements of the piece,)."""
        if states == 0:
            return []
        kept = self.owner.get(_key(piece))
        if kept is None or len(kept) != states:
            kept = self.owner[_key(piece)] = torch.zeros(states, piece.numel)
        return list(kept)

    def reown(self, parts: Sequence[Part], owned: Sequence[Piece]) -> None:
        """Give back what was kept of the mean of these parameters, except for these pieces."""
        numbers = {part.number: part for part in parts}
        stays = {_key(piece) for piece in owned}
        for key in [key for key in self.owner if key[0] in numbers and key not in stays]:
            kept = self.owner.pop(key)
            number, first, numel = key
            whole = self._whole(numbers[number])
            if len(whole):
                whole[-1, first : first + numel] += kept[-1] * self.world_size

    def _whole(self, part: Part) -> torch.Tensor:
        kept = self.worker.get(part.number)
        if kept is None or kept.shape != (part.codec.states, part.numel):
            kept = self.worker[part.number] = torch.zeros(part.codec.states, part.numel)
        return kept
