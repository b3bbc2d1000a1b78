"""Blocks of the ranks of a node, which its leader collects and sends as one block.

Blocks do not add up: each rank of the job gets those of all ranks. So that each leaves a node once,
a node's block is a directory, the bytes of each rank's block in the order of local ranks (i64; -1:
the rank has none), padded to a multiple of 16 bytes, and these blocks below one another.

The leader's shared memory has a room for each tensor with blocks, where the blocks of all nodes
land. Memory that no block reaches takes no place in the machine.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

import torch

from gradlane.errors import GradlaneError
from gradlane.training.core import BLOCK_MOST_BYTES
from gradlane.training.node.layout import NodeLayout
from gradlane.training.node.parts import (
    TensorPart,
    directory_bytes,
    node_block_most_bytes,
    shared_memory_bytes,
)
from gradlane.training.node.sums import Memory, copy, read_bytes

ABSENT = -1
"""In place of a number of bytes: there is no block."""


def room_offsets(parts: Sequence[TensorPart], layout: NodeLayout) -> tuple[dict[int, int], int]:
    """Place the rooms in a leader's shared memory, after its own contributions.

    Args:
        parts: all parts.
        layout: of the ranks on nodes.

    Returns:
        The offset of each room, by the number of its part, and the end of the last one.
    """
    offsets: dict[int, int] = {}
    end = shared_memory_bytes(parts)
    for part in parts:
        if part.has_blocks:
            start = -(-end // 16) * 16
            offsets[part.number] = start
            end = start + layout.nodes * node_block_most_bytes(part.nbytes, layout.local_size)
    return offsets, end


def join_blocks(blocks: Mapping[int, Memory], local_size: int, target: int) -> int:
    """Write a node's block and return its bytes.

    Args:
        blocks: by local rank; ranks without a block are left out.
        local_size: ranks of the node.
        target: address with room for `node_block_most_bytes`.

    Raises:
        GradlaneError: together they are more than a block may be.
    """
    whole = directory_bytes(local_size) + sum(nbytes for _, nbytes in blocks.values())
    if whole > BLOCK_MOST_BYTES:
        raise GradlaneError(
            f"the blocks of the {local_size} ranks of a node have {whole} bytes together, and "
            f'frames say sizes up to {BLOCK_MOST_BYTES}: use local="off"'
        )
    sizes = [blocks[rank][1] if rank in blocks else ABSENT for rank in range(local_size)]
    directory = torch.tensor(sizes, dtype=torch.int64, device="cpu")
    copy(directory.data_ptr(), target, directory.nbytes)
    end = directory_bytes(local_size)
    for rank in sorted(blocks):
        pointer, nbytes = blocks[rank]
        copy(pointer, target + end, nbytes)
        end += nbytes
    return end


def block_sizes(node_block: Memory, local_size: int) -> list[int]:
    """Return the directory of a node's block: the bytes of each local rank's block, or `ABSENT`.

    Raises:
        GradlaneError: the bytes are no block of such a node.
    """
    pointer, nbytes = node_block
    sizes: tuple[int, ...] = ()
    if nbytes >= directory_bytes(local_size):
        sizes = struct.unpack(f"={local_size}q", read_bytes(pointer, 8 * local_size))
    present = [size for size in sizes if size != ABSENT]
    whole = directory_bytes(local_size) + sum(present)
    if not sizes or min(present, default=0) < 0 or whole != nbytes:
        raise GradlaneError(
            f"{nbytes} bytes from another node are no blocks of its {local_size} ranks; do all "
            "ranks run the same version?"
        )
    return list(sizes)


class GatheredBlocks:
    """All ranks' blocks of one tensor in one step, in memory of this process."""

    def __init__(self, nodes: Sequence[Memory | None], layout: NodeLayout) -> None:
        """Copy the blocks of all nodes.

        Args:
            nodes: each node's block, or None.
            layout: of the ranks on nodes.
        """
        self.nbytes = sum(one[1] for one in nodes if one is not None)
        self._memory: torch.Tensor | None = torch.empty(
            self.nbytes, dtype=torch.uint8, device="cpu"
        )
        self._regions: list[tuple[int, int] | None] = []
        own = layout.rank_of(layout.node, layout.local_rank)
        start = self._memory.data_ptr()
        for one in nodes:
            if one is None:
                self._regions += [None] * layout.local_size
                continue
            copy(one[0], start, one[1])
            at = start + directory_bytes(layout.local_size)
            for size in block_sizes((start, one[1]), layout.local_size):
                is_own = len(self._regions) == own
                region = None if size == ABSENT else (0 if is_own else at, size)
                self._regions.append(region)
                at += max(0, size)
            start += one[1]

    def regions(self) -> list[tuple[int, int] | None]:
        """Return (address, nbytes) by rank; None: no block. The own address is 0."""
        return self._regions

    def release(self) -> None:
        """Release the blocks; their memory may not be read afterwards."""
        self._memory = None
