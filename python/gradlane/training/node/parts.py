"""Assignment of tensors to the leaders of a node: whole tensors, or an equal share of each.

All ranks compute the same parts from the tensor table. A part has the priority of its tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradlane.training.core import BLOCK_MOST_BYTES

ELEMENT_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "f64": 8, "u8": 1}
_ALIGNMENT_BYTES = 64
_SPLIT_FROM_ELEMS = 4096
"""Smaller tensors stay whole: the headers of more frames would cost more than a share saves."""
BLOCKS = "gather"
"""The scheme of tensors whose ranks exchange blocks, which do not add up."""


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
        has_blocks: True if ranks exchange blocks of at most `nbytes`, in all steps but step 0.
    """

    number: int
    tensor: int
    dtype: str
    first_byte: int
    nbytes: int
    leader: int
    offset: int
    only_first: bool
    has_blocks: bool = False

    def takes_part(self, step: int) -> bool:
        """Return whether a step has this part."""
        return not self.has_blocks if step == 0 else not self.only_first


def node_block_most_bytes(nbytes: int, local_size: int) -> int:
    """Return the most bytes of a node's block of a tensor, which is below the limit of a block.

    Args:
        nbytes: the most bytes of a rank's block.
        local_size: ranks of a node.
    """
    return min(directory_bytes(local_size) + local_size * nbytes, BLOCK_MOST_BYTES)


def directory_bytes(local_size: int) -> int:
    """Return the bytes of the directory of a node's block: a number of 8 bytes a rank, padded."""
    return -(-8 * local_size // 16) * 16


def cut_into_parts(rows: Sequence[Mapping[str, Any]], leaders: int) -> list[TensorPart]:
    """Cut the tensors of a plan into parts; blocks stay whole.

    Args:
        rows: the plan's tensors, with `numel`, `dtype`, `role` and, of some, `scheme`.
        leaders: of a node; a single one leads every tensor whole.
    """
    parts: list[TensorPart] = []
    loads = [0] * leaders
    offset = 0
    for tensor, row in enumerate(rows):
        numel, dtype = int(row["numel"]), str(row["dtype"])
        size = ELEMENT_BYTES[dtype]
        has_blocks = row.get("scheme") == BLOCKS
        if leaders == 1 or has_blocks or numel < _SPLIT_FROM_ELEMS:
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
                len(parts),
                tensor,
                dtype,
                first * size,
                nbytes,
                leader,
                offset,
                only_first,
                has_blocks,
            )
            parts.append(part)
            offset += -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    return parts


def shared_memory_bytes(parts: Sequence[TensorPart]) -> int:
    """Return the bytes of shared memory that each rank of a node contributes in."""
    return max((part.offset + part.nbytes for part in parts), default=0)


def rows_of_leader(
    rows: Sequence[Mapping[str, Any]], parts: Sequence[TensorPart], leader: int, local_size: int
) -> list[dict[str, Any]]:
    """Return the plan's rows for a leader's parts, in the order of its parts.

    Args:
        rows: the plan's tensors.
        parts: all parts.
        leader: local rank of the leader.
        local_size: ranks of a node, whose blocks leave as one.
    """
    leader_rows = []
    for part in parts:
        if part.leader != leader:
            continue
        row = dict(rows[part.tensor])
        numel = part.nbytes // ELEMENT_BYTES[part.dtype]
        if part.has_blocks:
            most_bytes = node_block_most_bytes(part.nbytes, local_size)
            row["numel"] = most_bytes // ELEMENT_BYTES[part.dtype]
        elif numel != row["numel"]:
            row["name"] = f"{row['name']} from byte {part.first_byte}"
            row["numel"] = numel
        leader_rows.append(row)
    return leader_rows
