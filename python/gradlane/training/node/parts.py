"""Assignment of tensors to the leaders of a node: whole tensors, or an equal share of each.

All ranks compute the same parts from the tensor table. A part has the priority of its tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ELEMENT_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "f64": 8, "u8": 1}
_ALIGNMENT_BYTES = 64
_SPLIT_FROM_ELEMS = 4096
"""Smaller tensors stay whole: the headers of more frames would cost more than a share saves."""


@dataclass(frozen=True)
class TensorPart:
    """A range of one tensor with its leader on each node.

    Attributes:
        number: of the part.
        tensor: number of its tensor.
        dtype: as the core names it.
        first_byte: its first byte in the tensor.
        nbytes: its length.
        leader: local rank of its leader.
        offset: in every rank's shared memory.
        only_first: True if it takes part in step 0 only.
    """

    number: int
    tensor: int
    dtype: str
    first_byte: int
    nbytes: int
    leader: int
    offset: int
    only_first: bool


def cut_into_parts(rows: Sequence[Mapping[str, Any]], leaders: int) -> list[TensorPart]:
    """Cut the tensors of a plan into parts.

    Args:
        rows: the plan's tensors, with `numel`, `dtype` and `role`.
        leaders: of a node; a single one leads every tensor whole.
    """
    parts: list[TensorPart] = []
    loads = [0] * leaders
    offset = 0
    for tensor, row in enumerate(rows):
        numel, dtype = int(row["numel"]), str(row["dtype"])
        size = ELEMENT_BYTES[dtype]
        if leaders == 1 or numel < _SPLIT_FROM_ELEMS:
            # The first leader with the least load so far.
            pieces = [(min(range(leaders), key=loads.__getitem__), 0, numel)]
        else:
            bounds = [numel * index // leaders for index in range(leaders + 1)]
            pieces = [(index, bounds[index], bounds[index + 1]) for index in range(leaders)]
        for leader, first, end in pieces:
            nbytes = (end - first) * size
            loads[leader] += nbytes
            only_first = row["role"] != "parameter"
            part = TensorPart(
                len(parts), tensor, dtype, first * size, nbytes, leader, offset, only_first
            )
            parts.append(part)
            offset += -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    return parts


def shared_memory_bytes(parts: Sequence[TensorPart]) -> int:
    """Return the bytes of shared memory of each rank of a node."""
    return max((part.offset + part.nbytes for part in parts), default=0)


def rows_of_leader(
    rows: Sequence[Mapping[str, Any]], parts: Sequence[TensorPart], leader: int
) -> list[dict[str, Any]]:
    """Return the plan's rows for a leader's parts, in the order of its parts."""
    leader_rows = []
    for part in parts:
        if part.leader != leader:
            continue
        row = dict(rows[part.tensor])
        numel = part.nbytes // ELEMENT_BYTES[part.dtype]
        if numel != row["numel"]:
            row["name"] = f"{row['name']} from byte {part.first_byte}"
            row["numel"] = numel
        leader_rows.append(row)
    return leader_rows
