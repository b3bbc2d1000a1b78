"""One rank's file of a checkpoint: pieces of tensors, each with a checksum.

It is a file in the safetensors format (a length of eight bytes, a JSON header, the bytes), so that
other tools can look into it; what gradlane needs beyond that is in the header's `__metadata__`:
version, step, and for every piece the tensor, the elements and a CRC-32.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradlane.errors import CheckpointError
from gradlane.whole_files import replace_whole

VERSION = 1
_HEADER_BYTES_MAX = 1 << 28
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
_DTYPES = {str(dtype): dtype for dtype in (*_NAMES, torch.complex128)}


@dataclass(frozen=True)
class Piece:
    """Some elements of a tensor.

    Attributes:
        name: the tensor's.
        start: number of the first element, in the order of its indices.
        values: the elements, in one dimension, on the host.
    """

    name: str
    start: int
    values: Tensor


def write_shard(path: Path, pieces: Iterable[Piece], facts: dict[str, Any]) -> int:
    """Write a file that is whole or not there, also if the machine stops at any moment.

    Args:
        path: the file; a temporary one is beside it meanwhile.
        pieces: what goes in.
        facts: JSON-able, such as step and rank.

    Returns:
        The file's size in bytes.

    Raises:
        OSError: it cannot be written; nothing of it is left.
    """
    header: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    payloads: list[Any] = []
    offset = 0
    for piece in pieces:
        data = _bytes_of(piece.values)
        name = _NAMES.get(piece.values.dtype)
        header[f"{piece.name}@{piece.start}"] = {
            "dtype": name or "U8",
            "shape": [piece.values.numel() if name else len(data)],
            "data_offsets": [offset, offset + len(data)],
        }
        rows.append(
            {
                "name": piece.name,
                "start": piece.start,
                "dtype": str(piece.values.dtype),
                "begin": offset,
                "bytes": len(data),
                "crc32": zlib.crc32(data),
            }
        )
        payloads.append(data)
        offset += len(data)
    own = json.dumps({**facts, "version": VERSION, "pieces": rows})
    # A changed step or place would not show in the checksums of the pieces.
    header["__metadata__"] = {"gradlane": own, "crc32": str(zlib.crc32(own.encode()))}
    head = json.dumps(header).encode()
    # Eight bytes of alignment, which the format allows to be spaces.
    head += b" " * (-len(head) % 8)
    write_whole(path, [len(head).to_bytes(8, "little"), head, *payloads])
    return 8 + len(head) + offset


def read_shard(path: Path) -> tuple[dict[str, Any], list[Piece]]:
    """Read a file, and check every byte of it.

    Raises:
        CheckpointError: it is missing, cut off, changed, or of another version.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"the checkpoint's file {path} cannot be read: {error}") from error
    head_bytes = int.from_bytes(content[:8], "little")
    if len(content) < 8 or head_bytes > min(_HEADER_BYTES_MAX, len(content) - 8):
        raise _broken(path, "it is cut off")
    try:
        header = json.loads(content[8 : 8 + head_bytes])
        own = header["__metadata__"]["gradlane"]
        is_whole = str(zlib.crc32(own.encode())) == header["__metadata__"]["crc32"]
        facts = json.loads(own)
        version = facts["version"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _broken(path, "its header is no header of gradlane's") from error
    if not is_whole:
        raise _broken(path, "the checksum of its header is wrong")
    if version != VERSION:
        raise CheckpointError(
            f"the checkpoint's file {path} has version {version}, and this gradlane reads version "
            f"{VERSION}: resume with the version of gradlane that wrote it"
        )
    body = memoryview(content)[8 + head_bytes :]
    return facts, [_piece(path, row, body) for row in facts["pieces"]]


def write_whole(path: Path, parts: Iterable[Any]) -> None:
    """Write a file beside its place, have it on the disk, and put it there.

    Raises:
        OSError: it cannot be written; nothing of it is left.
    """

    def write(partial: Path) -> None:
        with partial.open("wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())

    replace_whole(path, write)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Have the names in a folder on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _bytes_of(values: Tensor) -> Any:
    flat = values.detach().contiguous().view(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else b""


def _piece(path: Path, row: dict[str, Any], body: memoryview) -> Piece:
    data = body[row["begin"] : row["begin"] + row["bytes"]]
    if len(data) != row["bytes"]:
        raise _broken(path, f"{row['name']!r} is cut off")
    if zlib.crc32(data) != row["crc32"]:
        raise _broken(path, f"the checksum of {row['name']!r} is wrong")
    dtype = _DTYPES.get(row["dtype"])
    if dtype is None:
        raise _broken(path, f"{row['name']!r} has the unknown dtype {row['dtype']}")
    if not data:
        return Piece(row["name"], row["start"], torch.empty(0, dtype=dtype, device="cpu"))
    values = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    if dtype.is_complex:
        pairs = values.view(dtype.to_real()).view(-1, 2)
        return Piece(row["name"], row["start"], torch.view_as_complex(pairs))
    return Piece(row["name"], row["start"], values.view(dtype))


def _broken(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint's file {path} is damaged: {what}; remove the folder {path.parent} to go "
        "on from the checkpoint before it"
    )
