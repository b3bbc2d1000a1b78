"""State dictionaries taken apart into tensors and what is around them, and put together again.

Each tensor is cut into as many pieces as there are ranks, so that all write at once; small ones
stay whole. A piece is known by tensor and elements, not by rank, so that any world can read it.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradlane.checkpoints.shard import Piece
from gradlane.errors import CheckpointError

WHOLE_ELEMS = 4096
"""Tensors with no more elements are not cut."""


@dataclass(frozen=True)
class Leaf:
    """Stands in a tree for a tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def take_apart(tree: Any, name: str = "") -> tuple[Any, dict[str, Tensor]]:
    """Return a tree of plain values in which lists stand for tensors, and the tensors by name.

    Args:
        tree: dictionaries, lists, tuples, tensors and plain values.
        name: what the names of the tensors begin with.
    """
    if isinstance(tree, Tensor):
        return {"__tensor__": [name, list(tree.shape), str(tree.dtype)]}, {name: tree}
    if isinstance(tree, (Mapping, list, tuple)):
        items = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
        tensors: dict[str, Tensor] = {}
        parts = []
        for key, value in items:
            part, found = take_apart(value, f"{name}/{key}")
            parts.append((key, part))
            tensors.update(found)
        if isinstance(tree, Mapping):
            return dict(parts), tensors
        return type(tree)(part for _, part in parts), tensors
    return tree, {}


def put_together(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Undo `take_apart`."""
    if isinstance(tree, Mapping):
        if set(tree) == {"__tensor__"}:
            return tensors[tree["__tensor__"][0]]
        return {key: put_together(value, tensors) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(put_together(value, tensors) for value in tree)
    return tree


def leaves(tree: Any) -> Iterator[Leaf]:
    """Yield what a tree expects, in order."""
    if isinstance(tree, Mapping):
        if set(tree) == {"__tensor__"}:
            name, shape, dtype = tree["__tensor__"]
            yield Leaf(name, tuple(shape), getattr(torch, dtype.removeprefix("torch.")))
            return
        for value in tree.values():
            yield from leaves(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from leaves(value)


def pieces_of(
    tensors: Mapping[str, Tensor], rank: int, world_size: int, apart: Container[str] = ()
) -> list[Piece]:
    """Return copies of what one rank writes of tensors that all ranks have.

    Args:
        tensors: by name.
        rank: this rank.
        world_size: how many ranks write.
        apart: names of those that differ from rank to rank: rank 0 writes its own.
    """
    pieces = []
    # An optimizer's state is in the order in which gradients came, another one on every rank.
    for number, name in enumerate(sorted(tensors)):
        tensor = tensors[name]
        count = tensor.numel()
        if name in apart:
            number, begin, end = 0, 0, count if rank == 0 else 0
        elif count <= WHOLE_ELEMS:
            begin, end = (0, count) if number % world_size == rank else (0, 0)
        else:
            begin, end = count * rank // world_size, count * (rank + 1) // world_size
        if end > begin or (count == 0 and number % world_size == rank):
            part = tensor.detach().reshape(-1)[begin:end]
            pieces.append(Piece(name, begin, part.to("cpu", copy=True)))
    return pieces


def assemble(expected: Iterable[Leaf], pieces: Iterable[Piece]) -> dict[str, Tensor]:
    """Put whole tensors together from the pieces of all ranks.

    Raises:
        CheckpointError: elements are missing, or do not fit.
    """
    with torch.inference_mode(False):
        whole = {
            leaf.name: torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu") for leaf in expected
        }
    missing = {name: tensor.numel() for name, tensor in whole.items()}
    for piece in pieces:
        target = whole.get(piece.name)
        if target is None:
            continue
        end = piece.start + piece.values.numel()
        if end > target.numel() or piece.values.dtype is not target.dtype:
            raise CheckpointError(f"a piece of {piece.name!r} does not fit: elements to {end}")
        target.view(-1)[piece.start : end] = piece.values
        missing[piece.name] -= piece.values.numel()
    for name, count in missing.items():
        if count:
            raise CheckpointError(f"the checkpoint lacks {count} elements of {name!r}")
    return whole
