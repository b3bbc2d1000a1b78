"""Pieces of tensors in one run of bytes, each with a checksum: a file in the safetensors format.

The file is a length of eight bytes, a JSON header, and the pieces' bytes without a gap. Other tools
read the header's own rows. gradlane reads `__metadata__`: under `gradlane` a JSON text with the
version, the writer's facts, and for every piece the tensor, the first element and a CRC-32; under
`crc32` the checksum of that text. Both sets of rows must agree.

With a key the file is signed: each piece has a MAC as well, and `hmac` is the MAC of the text, with
the pieces' MACs and the facts in it. So no piece can be changed, or moved to another file.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Any

import torch
from torch import Tensor

from gradlane.formats.authentication import mac, same_mac
from gradlane.formats.serialization import strict_json
from gradlane.formats.serialization.strict_json import FormatError
from gradlane.formats.serialization.structure import DTYPES

VERSION = 2
"""Version 1 had pickles; no release wrote it."""
SIGNED_VERSION = 3
"""Version of files with MACs."""
HEADER_BYTES_MAX = 100_000_000
"""Limit of safetensors readers."""
_CHUNK_BYTES = 1 << 20
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
"""Names of dtypes in the format. Other dtypes appear as bytes."""
_ROW_TYPES = {"name": str, "start": int, "dtype": str, "bytes": int, "crc32": int}
_MAC = "hmac"


class VersionError(FormatError):
    """The bytes are of another version of this format."""

    def __init__(self, found: object) -> None:
        """Name the version that was found."""
        super().__init__(
            f"it has version {found!r:.40}, and this gradlane reads versions {VERSION} and "
            f"{SIGNED_VERSION}"
        )


class SignatureError(FormatError):
    """The bytes are not signed, or not with this key."""


@dataclass(frozen=True)
class Piece:
    """A range of a tensor's elements.

    Attributes:
        name: the tensor's.
        start: number of the first element, in the order of its indices.
        values: the elements, in one dimension, on the host.
    """

    name: str
    start: int
    values: Tensor


@dataclass(frozen=True)
class _Row:
    """A piece as the header describes it; `hmac` in signed files only."""

    name: str
    start: int
    dtype: str
    bytes: int
    crc32: int
    hmac: str = ""

    def to_json(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != _MAC or value}


def encode_container(
    pieces: Sequence[Piece], facts: dict[str, Any], key: bytes | None = None
) -> list[Any]:
    """Return the bytes of a file, as buffers in order.

    Args:
        pieces: no two with the same name and start.
        facts: JSON-able, such as step and rank.
        key: signs the file; None: it has checksums only.

    Raises:
        FormatError: its header would be too large to be read.
    """
    payloads = [_bytes_of(piece.values) for piece in pieces]
    rows = [
        _Row(
            piece.name,
            piece.start,
            str(piece.values.dtype),
            len(data),
            zlib.crc32(data),
            "" if key is None else mac(key, b"piece", data).hex(),
        )
        for piece, data in zip(pieces, payloads, strict=True)
    ]
    version = VERSION if key is None else SIGNED_VERSION
    described = strict_json.dumps(
        {**facts, "version": version, "pieces": [row.to_json() for row in rows]}
    )
    # The checksums of the pieces do not cover their step and start.
    metadata = {"gradlane": described.decode(), "crc32": str(zlib.crc32(described))}
    if key is not None:
        metadata[_MAC] = mac(key, b"header", described).hex()
    head = strict_json.dumps({**_safetensors_rows(rows), "__metadata__": metadata})
    # Eight bytes of alignment, which the format allows to be spaces.
    head += b" " * (-len(head) % 8)
    if len(head) > HEADER_BYTES_MAX:
        raise FormatError(
            f"its header has {len(head)} bytes for {len(rows)} pieces, over {HEADER_BYTES_MAX}"
        )
    return [len(head).to_bytes(8, "little"), head, *payloads]


def read_container(
    file: IO[bytes], size: int, key: bytes | None = None
) -> tuple[dict[str, Any], list[Piece]]:
    """Read a file, and check every byte of it.

    Args:
        file: at its beginning.
        size: bytes in it.
        key: that the file must be signed with; None: signatures are not looked at.

    Returns:
        The facts, with the `version`, and the pieces.

    Raises:
        FormatError: it is cut off, changed, or no such file.
        VersionError: it is of another version.
        SignatureError: it is not signed with the key.
    """
    facts, rows = _read_header(file, size, key)
    return facts, [_read_piece(file, row, key) for row in rows]


def check_container(file: IO[bytes], size: int) -> None:
    """Check the checksum of every byte of a file without keeping any.

    Args and errors: as `read_container`, without a key.
    """
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    for row in _read_header(file, size, None)[1]:
        checksum, left = 0, row.bytes
        while left:
            part = buffer[: min(left, _CHUNK_BYTES)]
            _read_into(file, part, row.name)
            checksum = zlib.crc32(part, checksum)
            left -= len(part)
        _check_crc(row, checksum)


def _safetensors_rows(rows: Sequence[_Row]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    end = 0
    for row in rows:
        name, begin = _NAMES.get(DTYPES[row.dtype]), end
        end += row.bytes
        found[f"{row.name}@{row.start}"] = {
            "dtype": name or "U8",
            "shape": [row.bytes // DTYPES[row.dtype].itemsize if name else row.bytes],
            "data_offsets": [begin, end],
        }
    if len(found) != len(rows):
        raise FormatError("its header has a piece twice")
    return found


def _read_header(
    file: IO[bytes], size: int, key: bytes | None
) -> tuple[dict[str, Any], list[_Row]]:
    head_bytes = int.from_bytes(file.read(8), "little")
    if size < 8 or head_bytes > size - 8:
        raise FormatError(f"it is cut off: it has {size} bytes, its header alone {head_bytes}")
    if head_bytes > HEADER_BYTES_MAX:
        raise FormatError(f"its header has {head_bytes} bytes, over {HEADER_BYTES_MAX}")
    header = strict_json.loads(file.read(head_bytes))
    metadata = header.pop("__metadata__", None) if isinstance(header, dict) else None
    metadata_json = metadata.get("gradlane") if isinstance(metadata, dict) else None
    if not isinstance(metadata_json, str) or not isinstance(metadata, dict):
        raise FormatError("its header is no header of gradlane's")
    described = metadata_json.encode("utf-8", "surrogatepass")
    if metadata.get("crc32") != str(zlib.crc32(described)):
        raise FormatError("the checksum of its header is wrong")
    is_signed = _MAC in metadata
    if key is not None:
        check_mac(metadata.get(_MAC), key, b"header", described)
    facts = strict_json.loads(described)
    version = SIGNED_VERSION if is_signed else VERSION
    if not isinstance(facts, dict) or facts.get("version") != version:
        raise VersionError(facts.get("version") if isinstance(facts, dict) else None)
    rows = _rows_of(facts.pop("pieces", None), is_signed)
    known = {"gradlane", "crc32", *([_MAC] if is_signed else [])}
    if header != _safetensors_rows(rows) or set(metadata) != known:
        raise FormatError("its header says different things about its pieces")
    whole = 8 + head_bytes + sum(row.bytes for row in rows)
    if whole != size:
        raise FormatError(f"it is cut off or too long: it has {size} bytes, not {whole}")
    return facts, rows


def _rows_of(listed: Any, is_signed: bool) -> list[_Row]:
    if not isinstance(listed, list):
        raise FormatError("its header has no list of pieces")
    types = {**_ROW_TYPES, _MAC: str} if is_signed else _ROW_TYPES
    rows = []
    for one in listed:
        if not isinstance(one, dict) or {key: type(one[key]) for key in one} != types:
            raise FormatError(f"its header has a bad piece {one!r:.80}")
        row = _Row(**one)
        if row.dtype not in DTYPES:
            raise FormatError(f"{row.name[:80]!r} has the unknown dtype {row.dtype[:40]}")
        if row.start < 0 or row.bytes < 0 or row.bytes % DTYPES[row.dtype].itemsize:
            raise FormatError(f"{row.name[:80]!r} has {row.bytes} bytes from {row.start} on")
        rows.append(row)
    return rows


def check_mac(found: object, key: bytes, *parts: bytes | memoryview) -> None:
    """Check the MAC, in hexadecimal digits, of some parts.

    Raises:
        SignatureError: there is none, or another one.
    """
    if found is None:
        raise SignatureError("it is not signed, and the job has a secret")
    expected = mac(key, *parts).hex()
    if not isinstance(found, str) or not same_mac(found, expected):
        raise SignatureError("its signature is wrong: it was changed, or has another secret")


def _read_piece(file: IO[bytes], row: _Row, key: bytes | None) -> Piece:
    # The rows match the size of the file, which bounds the memory.
    with torch.inference_mode(False):
        data = torch.empty(row.bytes, dtype=torch.uint8, device="cpu")
    buffer = data.numpy().data
    if row.bytes:
        _read_into(file, buffer, row.name)
    _check_crc(row, zlib.crc32(buffer))
    if key is not None:
        check_mac(row.hmac, key, b"piece", buffer)
    dtype = DTYPES[row.dtype]
    if dtype is torch.bool and row.bytes and int(data.max()) > 1:
        raise FormatError(f"{row.name[:80]!r} has booleans that are neither 0 nor 1")
    return Piece(row.name, row.start, data.view(dtype))


def _read_into(file: IO[bytes], buffer: memoryview, name: str) -> None:
    done = 0
    while done < len(buffer):
        count = file.readinto(buffer[done:])  # type: ignore[attr-defined]
        if not count:
            raise FormatError(f"it is cut off in {name[:80]!r}")
        done += count


def _check_crc(row: _Row, checksum: int) -> None:
    if checksum != row.crc32:
        raise FormatError(f"the checksum of {row.name[:80]!r} is wrong")


def _bytes_of(values: Tensor) -> Any:
    flat = values.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else b""
