"""Blocks: the parts that one rank sends of one tensor in one step, as bytes.

A part is a header of 16 bytes and its values, padded to a multiple of 16 bytes with zeros:

| offset | bytes | field |
| ---: | ---: | --- |
| 0 | 1 | kind: 1 dense, 2 factors of a linear layer, 3 rows |
| 1 | 1 | dtype of the values: 1 f32, 2 f16, 3 bf16, 4 f64 |
| 2 | 2 | zero |
| 4 | 4 | rows |
| 8 | 8 | bytes that follow, without padding |

Numbers are little-endian. Dense values are in the parameter's own order of storage; factors are all
rows of the inputs and then all rows of the output gradients; rows, as of an embedding, are their
numbers (i64) and then their values. An empty block is a rank without a gradient.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradlane.errors import GradlaneError

_HEADER = struct.Struct("<BBHIQ")
_ALIGNMENT_BYTES = 16
_DTYPES = {1: torch.float32, 2: torch.float16, 3: torch.bfloat16, 4: torch.float64}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_DENSE, _LINEAR, _ROWS = 1, 2, 3


class BlockError(GradlaneError):
    """Bytes that are no block of the tensor."""


@dataclass(frozen=True)
class Dense:
    """A whole gradient.

    Attributes:
        values: of the parameter's shape.
    """

    values: Tensor


@dataclass(frozen=True)
class LinearFactors:
    """Factors of a linear layer's weight gradient, which is `output_gradients.T @ inputs`.

    Attributes:
        inputs: (rows, in_features).
        output_gradients: (rows, out_features), of the same dtype.
    """

    inputs: Tensor
    output_gradients: Tensor


@dataclass(frozen=True)
class TouchedRows:
    """The rows of a gradient that are not zero, as those of an embedding that were looked up.

    Attributes:
        indices: i64, each row once, ascending.
        values: (rows, ...), each of the shape of a row of the parameter.
    """

    indices: Tensor
    values: Tensor


Part = Dense | LinearFactors | TouchedRows


def can_travel(dtype: torch.dtype) -> bool:
    """Whether values of a dtype can be in a block."""
    return dtype in _CODES


def narrowed(part: Part, dtype: torch.dtype) -> Part:
    """Return a part whose values are rounded to a dtype."""
    if isinstance(part, LinearFactors):
        return LinearFactors(part.inputs.to(dtype), part.output_gradients.to(dtype))
    if isinstance(part, TouchedRows):
        return TouchedRows(part.indices, part.values.to(dtype))
    return Dense(part.values.to(dtype))


def part_bytes(part: Part) -> int:
    """Return what a part takes in a block."""
    return _HEADER.size + _padded(sum(tensor.nbytes for tensor in _tensors(part)))


def block_bytes(nbytes: int) -> int:
    """Return what a whole gradient of so many bytes takes in a block."""
    return _HEADER.size + _padded(nbytes)


def most_rows_bytes(shape: torch.Size, dtype: torch.dtype) -> int:
    """Return what all rows of a parameter take in a block: more than the whole gradient."""
    return _HEADER.size + _padded(shape[0] * _row_bytes(shape, dtype))


def pack(parts: Sequence[Part]) -> Tensor:
    """Return a block with these parts, in this order: u8, on the CPU.

    Raises:
        BlockError: values have a dtype that does not travel.
    """
    block = torch.zeros(sum(map(part_bytes, parts)), dtype=torch.uint8, device="cpu")
    start = 0
    for part in parts:
        tensors = _tensors(part)
        values = tensors[-1]
        if values.dtype not in _CODES:
            raise BlockError(f"values of {values.dtype} cannot travel as factors")
        rows = 0 if isinstance(part, Dense) else tensors[0].shape[0]
        length = sum(tensor.nbytes for tensor in tensors)
        header = _HEADER.pack(_kind_of(part), _CODES[values.dtype], 0, rows, length)
        block[start : start + _HEADER.size] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        at = start + _HEADER.size
        for tensor in tensors:
            if tensor.nbytes:
                place = block[at : at + tensor.nbytes].view(tensor.dtype)
                place.view(tensor.shape).copy_(tensor)
            at += tensor.nbytes
        start += _HEADER.size + _padded(length)
    return block


def dense_block(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return a block with one whole gradient, whose values are not written yet.

    Raises:
        BlockError: values of this dtype do not travel.
    """
    if dtype not in _CODES:
        raise BlockError(f"values of {dtype} cannot travel as factors")
    length = shape.numel() * dtype.itemsize
    block = torch.empty(block_bytes(length), dtype=torch.uint8, device="cpu")
    header = _HEADER.pack(_DENSE, _CODES[dtype], 0, 0, length)
    block[: _HEADER.size] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    block[_HEADER.size + length :] = 0
    return block


def unpack(block: Tensor, shape: torch.Size, dtype: torch.dtype, sender: int) -> list[Part]:
    """Return the parts of a block, as views of its memory.

    Args:
        block: u8, one-dimensional and contiguous, its memory aligned to 16 bytes.
        shape: of the parameter.
        dtype: of the parameter.
        sender: the rank that it came from, for messages.

    Raises:
        BlockError: the bytes are no block of such a parameter.
    """

    def refuse(what: str) -> BlockError:
        return BlockError(
            f"rank {sender} sent {block.nbytes} bytes of factors for a parameter of shape "
            f"{tuple(shape)} that make no sense: {what}; do all ranks run the same version?"
        )

    parts: list[Part] = []
    start = 0
    while start < block.nbytes:
        if block.nbytes - start < _HEADER.size:
            raise refuse(f"{block.nbytes - start} bytes are left at byte {start}")
        header = bytes(block[start : start + _HEADER.size].tolist())
        kind, code, zero, rows, length = _HEADER.unpack(header)
        start += _HEADER.size
        if zero or code not in _DTYPES:
            raise refuse(f"unknown dtype {code} at byte {start}")
        if _padded(length) > block.nbytes - start:
            raise refuse(f"{length} bytes are announced at byte {start}")
        values_dtype = _DTYPES[code]
        expected = _expected_bytes(kind, rows, shape, dtype, values_dtype)
        if expected != length:
            raise refuse(f"{length} bytes of kind {kind} with {rows} rows at byte {start}")
        payload = block[start : start + length]
        parts.append(_part_of(kind, rows, payload, shape, values_dtype))
        last = parts[-1]
        if isinstance(last, TouchedRows) and not _are_rows_of(last.indices, shape[0]):
            raise refuse(f"rows that the parameter does not have, at byte {start}")
        start += _padded(length)
    return parts


def _expected_bytes(
    kind: int, rows: int, shape: torch.Size, dtype: torch.dtype, values_dtype: torch.dtype
) -> int:
    """Bytes that a part of this kind must have; -1 where there is no such part."""
    if kind == _DENSE and rows == 0 and values_dtype == dtype:
        return shape.numel() * dtype.itemsize
    if kind == _LINEAR and len(shape) == 2:
        return rows * (shape[0] + shape[1]) * values_dtype.itemsize
    if kind == _ROWS and len(shape) > 0:
        return rows * _row_bytes(shape, values_dtype)
    return -1


def _row_bytes(shape: torch.Size, dtype: torch.dtype) -> int:
    """Bytes of one row: its number and its values."""
    return 8 + math.prod(shape[1:]) * dtype.itemsize


def _part_of(
    kind: int, rows: int, payload: Tensor, shape: torch.Size, values_dtype: torch.dtype
) -> Part:
    if kind == _DENSE:
        return Dense(payload.view(values_dtype).view(shape))
    if kind == _LINEAR:
        values = payload.view(values_dtype)
        inputs, output_gradients = values[: rows * shape[1]], values[rows * shape[1] :]
        return LinearFactors(inputs.view(rows, shape[1]), output_gradients.view(rows, shape[0]))
    numbers, values = payload[: 8 * rows], payload[8 * rows :]
    return TouchedRows(numbers.view(torch.int64), values.view(values_dtype).view(rows, *shape[1:]))


def _are_rows_of(indices: Tensor, count: int) -> bool:
    if indices.numel() == 0:
        return True
    ascends = bool((indices[1:] > indices[:-1]).all())
    return ascends and int(indices[0]) >= 0 and int(indices[-1]) < count


def _tensors(part: Part) -> tuple[Tensor, ...]:
    if isinstance(part, Dense):
        return (part.values,)
    if isinstance(part, LinearFactors):
        return (part.inputs, part.output_gradients)
    return (part.indices, part.values)


def _kind_of(part: Part) -> int:
    if isinstance(part, Dense):
        return _DENSE
    return _LINEAR if isinstance(part, LinearFactors) else _ROWS


def _padded(count: int) -> int:
    return -(-count // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
