"""The elements of each tensor that a rank writes.

Each tensor is cut into as many pieces as there are ranks, so that all write at once; small ones
stay whole. A piece is known by tensor and elements, not by rank, so that any world can read it.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

from torch import Tensor

from gradlane.formats.serialization.container import Piece

WHOLE_ELEMS = 4096
"""Tensors with no more elements are not cut."""


def pieces_of(
    tensors: Mapping[str, Tensor], rank: int, world_size: int, per_rank: Container[str] = ()
) -> list[Piece]:
    """Return copies of what one rank writes of tensors that all ranks have.

    Args:
        tensors: by name.
        rank: this rank.
        world_size: how many ranks write.
        per_rank: names of those that differ from rank to rank: rank 0 writes its own.
    """
    pieces = []
    # An optimizer's state is in the order in which gradients came, another one on every rank.
    for number, name in enumerate(sorted(tensors)):
        tensor = tensors[name]
        count = tensor.numel()
        if name in per_rank:
            number, begin, end = 0, 0, count if rank == 0 else 0
        elif count <= WHOLE_ELEMS:
            begin, end = (0, count) if number % world_size == rank else (0, 0)
        else:
            begin, end = count * rank // world_size, count * (rank + 1) // world_size
        if end > begin or (count == 0 and number % world_size == rank):
            part = tensor.detach().reshape(-1)[begin:end]
            pieces.append(Piece(name, begin, part.to("cpu", copy=True)))
    return pieces
