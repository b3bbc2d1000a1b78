"""Residuals that a hook keeps between steps, as a worker and as an owner of shards.

They belong to parameters and not to buckets, since DDP rebuilds its buckets after the first step.
When a rank no longer owns a piece, its residual of the mean returns to this rank's next gradient,
times the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gradlane.ddp.layout import BucketParameter, ParameterPiece

OwnerKey = tuple[int, int, int]
"""Number of the parameter, first element of the piece, elements of the piece."""


def key_of(piece: ParameterPiece) -> OwnerKey:
    """Return the key of a piece of a mean."""
    return (piece.part.number, piece.first, piece.numel)


class Residuals:
    """Residuals of one rank: f32 on the CPU, with the codec's width for each element.

    Attributes:
        world_size: number of ranks of a mean.
        worker: the unsent part of each parameter's gradient, by its number.
        owner: the unsent part of the mean, by piece.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.worker: dict[int, torch.Tensor] = {}
        self.owner: dict[OwnerKey, torch.Tensor] = {}

    def worker_residual(self, piece: ParameterPiece) -> torch.Tensor | None:
        """Return the residual of a piece of this rank's gradient; None if the codec keeps none."""
        width = piece.part.codec.residual_width
        if width == 0:
            return None
        whole = self._whole(piece.part)
        return whole[piece.first * width : (piece.first + piece.numel) * width]

    def owner_residual(self, piece: ParameterPiece) -> torch.Tensor | None:
        """Return the residual of a piece of the mean; None if the codec keeps none."""
        numbers = piece.numel * piece.part.codec.residual_width
        if numbers == 0:
            return None
        kept = self.owner.get(key_of(piece))
        if kept is None or kept.numel() != numbers:
            kept = self.owner[key_of(piece)] = torch.zeros(
                numbers, dtype=torch.float32, device="cpu"
            )
        return kept

    def release_unowned(
        self, parts: Sequence[BucketParameter], owned: Sequence[ParameterPiece]
    ) -> None:
        """Return residuals of the mean of these parameters to gradients, except for the owned
        pieces."""
        by_number = {part.number: part for part in parts}
        stays = {key_of(piece) for piece in owned}
        for key in [key for key in self.owner if key[0] in by_number and key not in stays]:
            kept = self.owner.pop(key)
            number, first, numel = key
            width = by_number[number].codec.residual_width
            if width and kept.numel() == numel * width:
                whole = self._whole(by_number[number])
                unsent = whole[first * width : (first + numel) * width : width]
                unsent += kept[::width] * self.world_size

    def _whole(self, part: BucketParameter) -> torch.Tensor:
        numbers = part.numel * part.codec.residual_width
        kept = self.worker.get(part.number)
        if kept is None or kept.numel() != numbers:
            kept = self.worker[part.number] = torch.zeros(
                numbers, dtype=torch.float32, device="cpu"
            )
        return kept
