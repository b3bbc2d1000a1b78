"""Assembly of tensors from pieces, and packing of whole values into bytes."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradlane.formats.serialization import strict_json
from gradlane.formats.serialization.container import Piece, encode_container, read_container
from gradlane.formats.serialization.strict_json import FormatError
from gradlane.formats.serialization.structure import Leaf, flatten, leaves, to_json, unflatten

STRUCTURE = "structure"
"""Name of the JSON piece; names of tensors begin with a slash."""


def structure_piece(tree: Any) -> Piece:
    """Return a structure as a piece."""
    content = bytearray(to_json(tree))
    return Piece(STRUCTURE, 0, torch.frombuffer(content, dtype=torch.uint8))


def find_structure(pieces: Iterable[Piece]) -> Any:
    """Return the structure among pieces.

    Raises:
        FormatError: there is none, or it is damaged.
    """
    for piece in pieces:
        if piece.name == STRUCTURE:
            return strict_json.loads(piece.values.numpy().tobytes())
    raise FormatError("it has no structure")


def assemble(expected: Sequence[Leaf], pieces: Iterable[Piece]) -> dict[str, Tensor]:
    """Assemble whole tensors from the pieces of all ranks.

    Args:
        expected: the tensors.
        pieces: in any order; those of other tensors are ignored.

    Raises:
        FormatError: elements are missing or there twice, or do not fit.
    """
    parts: dict[str, list[Piece]] = {leaf.name: [] for leaf in expected}
    for piece in pieces:
        if piece.name in parts:
            parts[piece.name].append(piece)
    return {leaf.name: _whole(leaf, parts[leaf.name]) for leaf in expected}


def _whole(leaf: Leaf, parts: list[Piece]) -> Tensor:
    parts.sort(key=lambda piece: (piece.start, piece.values.numel()))
    end, have = 0, sum(piece.values.numel() for piece in parts)
    if have < leaf.numel:
        raise FormatError(f"it lacks {leaf.numel - have} elements of {leaf.name!r}")
    for piece in parts:
        if piece.start != end or piece.values.dtype is not leaf.dtype:
            raise FormatError(
                f"a piece of {leaf.name!r} does not fit: {piece.values.dtype} from element "
                f"{piece.start} on, where {leaf.dtype} from {end} on is missing"
            )
        end += piece.values.numel()
    if end != leaf.numel:
        raise FormatError(f"it has {end} elements of {leaf.name!r}, which has {leaf.numel}")
    # The file holds these elements, whatever the structure claims, which bounds the memory.
    with torch.inference_mode(False):
        whole = torch.empty(leaf.numel, dtype=leaf.dtype, device="cpu")
        for piece in parts:
            whole[piece.start : piece.start + piece.values.numel()] = piece.values
        try:
            return whole.view(leaf.shape)
        except (RuntimeError, TypeError, OverflowError) as error:
            raise FormatError(f"{leaf.name!r} has the shape {leaf.shape}: {error}") from error


def pack(values: dict[str, Any]) -> bytes:
    """Return values as bytes.

    Raises:
        UnstorableError: one cannot be stored; the message has its path.
    """
    tree, tensors = flatten(values)
    parts = [
        Piece(name, 0, tensor.detach().reshape(-1).to("cpu")) for name, tensor in tensors.items()
    ]
    return b"".join(encode_container([structure_piece(tree), *parts], {}))


def unpack(content: bytes, device: torch.device) -> Any:
    """Return the values that `pack` has packed.

    Args:
        content: may be untrusted.
        device: for tensors that were not in the host's memory.

    Raises:
        FormatError: it is not what `pack` makes.
    """
    _facts, pieces = read_container(io.BytesIO(content), len(content))
    tree = find_structure(pieces)
    expected = leaves(tree)
    values = assemble(expected, pieces)
    tensors = {
        leaf.name: values[leaf.name].to("cpu" if leaf.on_host else device) for leaf in expected
    }
    return unflatten(tree, lambda leaf: tensors[leaf.name])
