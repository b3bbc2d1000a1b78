"""What each rank of a node carries to the network: whole tensors, or an equal share of each.

All ranks compute the same from the tensor table alone. A part keeps the place of its tensor in the
order of urgency.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ELEMENT_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "f64": 8, "u8": 1}
_ALIGNMENT_BYTES = 64
_SPLIT_FROM_ELEMS = 4096
"""Smaller tensors go whole: a share would be less than a frame's headers are worth."""


@dataclass(frozen=True)
class Part:
    """A range of one tensor that one rank of each node carries.

    Attributes:
        number: of the part.
        tensor: number of its tensor.
        dtype: in the core's terms.
        first_byte: where it begins in the tensor.
        nbytes: its length.
        leader: local rank that carries it.
        offset: where it is in every rank's shared memory.
        only_first: whether it takes part in step 0 alone.
    """

    number: int
    tensor: int
    dtype: str
    first_byte: int
    nbytes: int
    leader: int
    offset: int
    only_first: bool


def cut_into_parts(rows: Sequence[Mapping[str, Any]], leaders: int) -> list[Part]:
    """Cut the tensors of a plan.

    Args:
        rows: the plan's tensors, with `numel`, `dtype` and `role`.
        leaders: ranks of a node that carry; with one it carries every tensor whole.
    """
    parts: list[Part] = []
    loads = [0] * leaders
    offset = 0
    for tensor, row in enumerate(rows):
        numel, dtype = int(row["numel"]), str(row["dtype"])
        size = ELEMENT_BYTES[dtype]
        if leaders == 1 or numel < _SPLIT_FROM_ELEMS:
            # The one with the least so far; the first of several.
            pieces = [(min(range(leaders), key=loads.__getitem__), 0, numel)]
        else:
            bounds = [numel * index // leaders for index in range(leaders + 1)]
            pieces = [(index, bounds[index], bounds[index + 1]) for index in range(leaders)]
        for leader, first, end in pieces:
            nbytes = (end - first) * size
            loads[leader] += nbytes
            only_first = row["role"] != "parameter"
            part = Part(len(parts), tensor, dtype, first * size, nbytes, leader, offset, only_first)
            parts.append(part)
            offset += -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    return parts


def shared_memory_bytes(parts: Sequence[Part]) -> int:
    """Return the bytes of shared memory that every rank of a node has."""
    return max((part.offset + part.nbytes for part in parts), default=0)


def rows_of_leader(
    rows: Sequence[Mapping[str, Any]], parts: Sequence[Part], leader: int
) -> list[dict[str, Any]]:
    """Return the plan's rows of what a rank carries, in the order of its parts."""
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
